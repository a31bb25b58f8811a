"""Prometheus metrics: vLLM's names where the meaning is the same, `perilune:` before what it has no name for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from perilune.serve.llm import LLM
from perilune.serve.request import State

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, *(10**e * m for e in (3, 4, 5) for m in (1, 2, 5)), 10**6)


@dataclass(frozen=True)
class Facts:
    """What the engine's thread reads off itself for one scrape."""

    running: int
    waiting: int
    used: float
    counters: dict[str, int]
    checkpoints: int
    hittable: int


class Metrics:
    """Histograms are filled as requests end; the engine's own sums are read when somebody asks."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._label = model
        names = ("model_name",)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            made = Histogram(name, text, names, registry=self.registry, buckets=tuple(buckets))
            return made.labels(model)

        self.first = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self.between = histogram("vllm:inter_token_latency_seconds", "Time between two steps with tokens.", _BETWEEN)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _SECONDS)
        self.prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.answer = histogram("vllm:request_generation_tokens", "Answer tokens of a request.", _TOKENS)
        self.asked = histogram("vllm:request_params_max_tokens", "max_tokens of a request.", _TOKENS)
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens.", names, registry=self.registry)
        self.generation_tokens = Counter("vllm:generation_tokens", "Answer tokens.", names, registry=self.registry)
        self.queries = Counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", names, registry=self.registry
        )
        self.hits = Counter("vllm:prefix_cache_hits", "Prompt tokens that came from it.", names, registry=self.registry)
        self.success = Counter(
            "vllm:request_success", "Requests that ended.", (*names, "finished_reason"), registry=self.registry
        )
        self.refused = Counter(
            "perilune:requests_refused", "Requests that got an error.", (*names, "status"), registry=self.registry
        )

    def ended(self, prompt: int, cached: int, answer: int, reason: str) -> None:
        """Count a request that ended."""
        self.queries.labels(self._label).inc(prompt)
        self.hits.labels(self._label).inc(cached)
        self.prompt.observe(prompt)
        self.answer.observe(answer)
        self.prompt_tokens.labels(self._label).inc(prompt)
        self.generation_tokens.labels(self._label).inc(answer)
        self.success.labels(self._label, reason).inc()

    def refuse(self, status: int) -> None:
        """Count a request that got an error."""
        self.refused.labels(self._label, str(status)).inc()

    def text(self, facts: Facts) -> bytes:
        """The page."""
        return generate_latest(self.registry) + generate_latest(_Of(facts, self._label))


class _Of(CollectorRegistry):
    """The engine's numbers as a registry of one page."""

    def __init__(self, facts: Facts, model: str) -> None:
        super().__init__()
        self.facts, self.model = facts, model

    def collect(self) -> Iterable[Metric]:
        facts, counters = self.facts, self.facts.counters
        yield self._gauge("vllm:num_requests_running", "Requests that hold a slot.", facts.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for one.", facts.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the arena in use, 1 is all.", facts.used)
        yield self._gauge("perilune:cached_checkpoints", "States in the prefix cache.", facts.checkpoints)
        text = "Tokens that two prompts must share before the second can hit."
        yield self._gauge("perilune:min_hittable_tokens", text, facts.hittable)
        sums = {
            "vllm:num_preemptions": ("Requests that were preempted.", counters["preempted"]),
            "vllm:spec_decode_num_draft_tokens": ("Drafted tokens.", counters["drafted"]),
            "vllm:spec_decode_num_accepted_tokens": ("Drafts that were right.", counters["accepted"]),
            "perilune:kv_matched_no_state_tokens": (
                "Prompt tokens whose KV was cached without a state at their end.",
                counters["stateless"],
            ),
            "perilune:steps": ("Steps of the engine.", counters["steps"]),
        }
        for name, (text, value) in sums.items():
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self.model], value)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family


def look(llm: LLM) -> Facts:
    """In the engine's thread, between two steps."""
    engine, scheduler = llm.engine, llm.engine.scheduler
    states = [request.state for request in scheduler.requests()]
    running = sum(state in (State.PREFILL, State.DECODE) for state in states)
    arena = engine.cache.arenas[0]
    used = 1 - arena.free_pages / arena.capacity
    checkpoints = sum(node.state is not None for node in engine.cache.tree.nodes())
    hittable = engine.cache.min_hittable_tokens()
    return Facts(running, len(states) - running, used, dict(vars(engine.counters)), checkpoints, hittable)


def total(facts: Sequence[Facts]) -> Facts:
    """Several engines as one."""
    counters = {name: sum(each.counters[name] for each in facts) for name in facts[0].counters}
    used = sum(each.used for each in facts) / len(facts)
    running, waiting, checkpoints = (
        sum(getattr(each, name) for each in facts) for name in ("running", "waiting", "checkpoints")
    )
    return Facts(running, waiting, used, counters, checkpoints, facts[0].hittable)


def alive(llm: LLM) -> None:
    """Something for the engine's thread to answer."""


__all__ = ["Facts", "Metrics", "alive", "look", "total"]
