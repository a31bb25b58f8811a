"""Prometheus metrics of a service: what happened, as it happens, and what there is, when somebody asks."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from perilune.sandbox.manager import Manager
from perilune.sandbox.options import Event
from perilune.sandbox.states import State

# A client can write any word there; each other one would be a series of its own for ever.
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Metrics:
    """A registry of its own, so that two services in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        events = ("event", "outcome")
        self._events = Counter(
            "perilune_sandbox_events", "Transitions and other events", events, registry=self.registry
        )
        self._seconds = Histogram(
            "perilune_sandbox_event_seconds", "How long they took", ("event",), buckets=_BUCKETS, registry=self.registry
        )
        self._captured = Counter(
            "perilune_sandbox_captured_bytes", "Bytes of pages captured while guests ran on", registry=self.registry
        )
        names = ("method", "route", "status")
        self._requests = Counter("perilune_sandbox_http_requests", "Requests answered", names, registry=self.registry)
        self._answers = Histogram(
            "perilune_sandbox_http_seconds", "Time to the end of an answer", ("route",), registry=self.registry
        )

    def watch(self, manager: Manager) -> None:
        """Listen to a manager, and look at it whenever metrics are read."""
        manager.transitions.listeners.append(self._happened)
        self.registry.register(_State(manager))

    def _happened(self, event: Event) -> None:
        self._events.labels(event.name, "error" if event.error else "ok").inc()
        self._seconds.labels(event.name).observe(max(event.seconds, 0.0))
        if event.name == "captured":
            self._captured.inc(event.detail.get("bytes", 0))

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request's end. route: the path as declared, never the path of a request, of which there is no end."""
        self._requests.labels(method if method in _METHODS else "other", route, str(status)).inc()
        self._answers.labels(route).observe(seconds)


class _State(Collector):
    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        manager = self._manager
        states = Count(record.state for record in manager.store.boxes() if record.owner != "golden")
        boxes = GaugeMetricFamily("perilune_sandbox_boxes", "Sandboxes by state", labels=["state"])
        for state in State:
            boxes.add_metric([state.value], states[state])
        yield boxes
        values: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("machines", "Virtual machines that run", lambda: len(manager.machines.running)),
            ("pool_ready", "Booted machines kept ready", manager.pool.size),
            ("memory_used_bytes", "Memory counted for machines", manager.admission.used),
            ("memory_limit_bytes", "Memory that may be counted", lambda: manager.admission.limit),
            ("overcommit_ratio", "Memory promised over memory counted", manager.admission.overcommit),
            ("snapshots", "Snapshots that are kept", lambda: len(manager.snapshots())),
            ("layers_bytes", "Size of all layers", lambda: sum(row.bytes for row in manager.store.layers().values())),
        )
        for name, text, value in values:
            yield GaugeMetricFamily(f"perilune_sandbox_{name}", text, value())


__all__ = ["Metrics"]
