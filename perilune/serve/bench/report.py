"""What a load showed: percentiles, rates, goodput under an SLO, and a picture of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perilune.errors import Error
from perilune.serve.bench.client import Record


@dataclass(frozen=True)
class Slo:
    """A request is good if it came whole, its first token within `ttft_ms`, and each further one within `tpot_ms` on
    average. None sets no bound. Raises Error for a bound <= 0."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise Error(f"slo_{name} is {value}; must be > 0")

    def met(self, record: Record) -> bool:
        """Whether a request was good."""
        if record.error is not None:
            return False
        if self.ttft_ms is not None and record.ttft * 1e3 > self.ttft_ms:
            return False
        return self.tpot_ms is None or record.tpot is None or record.tpot * 1e3 <= self.tpot_ms


def summarize(records: Sequence[Record], slo: Slo) -> dict[str, Any]:
    """The figures of a load, JSON-able. Times of requests that failed count nowhere; rates are over the whole time.

    Raises Error for no record.
    """
    if not records:
        raise Error("the load has no request; needs at least one")
    whole = [record for record in records if record.error is None]
    seconds = max(record.last for record in records) - min(record.planned for record in records)
    prompt, cached, output = (
        sum(getattr(record, name) for record in whole) for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    )
    good = sum(slo.met(record) for record in records)
    errors = Counter(record.error for record in records if record.error is not None)

    def rate(count: float) -> float:
        return round(count / seconds, 4) if seconds > 0 else 0.0

    return {
        "requests": len(records),
        "failed": len(records) - len(whole),
        "seconds": round(seconds, 3),
        "ttft_ms": spread([record.ttft for record in whole]),
        "itl_ms": spread([gap for record in whole for gap in record.gaps]),
        "tpot_ms": spread([record.tpot for record in whole if record.tpot is not None]),
        "latency_ms": spread([record.last - record.planned for record in whole]),
        "tokens": {"prompt": prompt, "cached": cached, "output": output},
        "hit_rate": round(cached / prompt, 4) if prompt else None,
        "throughput": {
            "requests_per_s": rate(len(whole)),
            "output_tokens_per_s": rate(output),
            "tokens_per_s": rate(prompt + output),
        },
        "goodput": {
            "slo_ttft_ms": slo.ttft_ms,
            "slo_tpot_ms": slo.tpot_ms,
            "share": round(good / len(records), 4),
            "requests_per_s": rate(good),
        },
        "sent_late_ms": spread([record.sent - record.planned for record in records]),
        "errors": dict(errors.most_common(10)),
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds, linear between two values; None for no value."""
    if not seconds:
        return None
    values = np.asarray(seconds) * 1e3
    named = {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}
    return {name: round(value, 3) for name, value in {"mean": float(values.mean()), **named}.items()}


def draw(records: Sequence[Record], slo: Slo, path: str, title: str = "") -> None:
    """Four panels into an image: TTFT and time a token as shares of requests, TTFT by prompt, the load over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    whole = [record for record in records if record.error is None]
    figure, ((first, token), (prompt, time)) = plt.subplots(2, 2, figsize=(10, 7))
    tpots = [record.tpot for record in whole if record.tpot is not None]
    for axes, values, bound, label in (
        (first, [record.ttft for record in whole], slo.ttft_ms, "time to first token, ms"),
        (token, tpots, slo.tpot_ms, "time a token after it, ms"),
    ):
        if values:
            axes.ecdf([value * 1e3 for value in values])
        if bound is not None:
            axes.axvline(bound, linestyle="--", color="tab:red", label=f"SLO {bound:g} ms")
            axes.legend()
        axes.set_xlabel(label)
        axes.set_ylabel("share of requests")
        axes.grid(alpha=0.3)
    shares = [record.cached_tokens / max(1, record.prompt_tokens) for record in whole]
    dots = prompt.scatter(
        [record.prompt_tokens for record in whole],
        [record.ttft * 1e3 for record in whole],
        c=shares,
        s=12,
        vmin=0,
        vmax=1,
    )
    figure.colorbar(dots, ax=prompt, label="cached share of the prompt")
    prompt.set_xlabel("prompt tokens")
    prompt.set_ylabel("time to first token, ms")
    edges = sorted([(r.sent, 1) for r in records] + [(r.last, -1) for r in records])
    time.step([at for at, _ in edges], np.cumsum([change for _, change in edges]), where="post")
    time.set_xlabel("seconds")
    time.set_ylabel("requests on their way")
    time.grid(alpha=0.3)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


__all__ = ["Slo", "draw", "spread", "summarize"]
