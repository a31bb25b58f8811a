"""OpenTelemetry: FastAPI makes a span of every request; here it learns where spans go, and what a request was about.

Without a provider, of this module or of the process, nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.telemetry import TelemetryConfig
from opentelemetry import trace

from perilune.errors import Error

_ATTRIBUTES = {
    "id": "perilune.request_id",
    "tenant": "perilune.tenant",
    "prompt": "gen_ai.usage.input_tokens",
    "answer": "gen_ai.usage.output_tokens",
    "cached": "perilune.usage.cached_tokens",
    "finished": "perilune.finish_reasons",
}


def telemetry(endpoint: str | None) -> TelemetryConfig:
    """FastAPI's setting: spans of requests alone. endpoint: OTLP over HTTP; None leaves it to the process.

    Raises Error where what an endpoint needs is not installed.
    """
    config = TelemetryConfig(operation_spans=False, metrics=False, logs=False)
    if endpoint is not None:
        config["tracer_provider"] = _provider(endpoint)
    return config


def describe(facts: Mapping[str, Any]) -> None:
    """Put what is known of the request into its span."""
    span = trace.get_current_span()
    for fact, attribute in _ATTRIBUTES.items():
        if facts.get(fact) is not None:
            span.set_attribute(attribute, facts[fact])


def _provider(endpoint: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as missing:
        raise Error(
            f"otlp_traces_endpoint is {endpoint!r}, but {missing.name!r} is not installed; "
            "`pip install 'perilune[otel]'` brings it"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "perilune"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


__all__ = ["describe", "telemetry"]
