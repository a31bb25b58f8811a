"""A trace of agents' sessions against the engine, the same kernels under three ways to keep states.

perilune: the engine as it is. aligned: states at multiples of 6144 tokens only, evicted by age, as vLLM's blocks of a
hybrid model are. ends: a state at every prompt's and answer's end and where two prompts part, evicted by age, as
SGLang's radix cache keeps them. All three with one arena for rows and states; the simulator (`perilune simulate-cache`)
models the peers' own memory layouts.

A request arrives at its time on the trace, scaled, or when its session's request before it has ended. Prompts are those
of the trace; answers are cut to a few tokens, which the next prompt does not hold.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune import Error, Transformer
from perilune.serve import Engine, EngineConfig, Params
from perilune.serve.cache.eviction import Eviction
from perilune.serve.cache.placement import Mark, Placement
from perilune.serve.simulate.traces import Request, read

ANSWER = 8  # tokens
WARM_UP = 10.0  # seconds


class Aligned(Placement):
    """A state after every 6144 tokens, and nowhere else."""

    block = 6144

    def plan(self, match: Any, prompt: int, total: int, *_: Any, **__: Any) -> list[Mark]:
        return [Mark(d, "step") for d in range(match.depth // self.block * self.block + self.block, prompt, self.block)]


POLICIES: dict[str, dict[str, Any]] = {
    "perilune": {},
    "aligned": {"placement": Aligned(keep=0), "eviction": "lru"},
    "ends": {"placement": Placement(keep=0, low_fork=False, min_turn=1), "eviction": "lru"},
}


@dataclass
class Session:
    """Requests that are to come, and whether one is on its way."""

    left: deque[Request]
    busy: bool = False


def sessions(trace: Path, offsets: Path | None, count: int) -> list[Session]:
    """The first sessions of an agentic trace."""
    found: dict[int, Session] = defaultdict(lambda: Session(deque()))
    for request in read(trace, offsets=offsets, limit=count).requests:
        key = request.keys[0]
        assert isinstance(key, int)
        found[key >> 32].left.append(request)
    return list(found.values())


class Words:
    """Tokens of keys: 64 of a long random text, from a place that the key names."""

    def __init__(self, vocabulary: int, unit: int) -> None:
        dice = random.Random(0)
        self.unit, self.text = unit, [dice.randrange(vocabulary) for _ in range(1 << 20)]

    def prompt(self, request: Request) -> list[int]:
        tokens, whole = list[int](), request.prompt // self.unit
        for key in [*request.keys[:whole], (request.at, request.turn)]:
            at = hash(key) * 0x9E3779B97F4A7C15 % (len(self.text) - self.unit)
            tokens += self.text[at : at + self.unit]
        return tokens[: request.prompt]


def replay(model: Transformer, options: Any) -> Iterator[dict[str, Any]]:
    """One engine for all, so that they share its kernels, graphs and memory; a run of the first one warms it up."""
    config = EngineConfig(options.replay_arena, slots=options.sessions, token_budget=options.budget)
    engine = Engine(model, config)
    for name, policy in [("warm-up", POLICIES["perilune"]), *POLICIES.items()]:
        engine.cache.placement = policy.get("placement", config.placement)
        engine.cache.eviction = Eviction(policy.get("eviction", config.eviction))
        engine.counters.prefill = engine.counters.cached = 0
        row = _run(engine, options, WARM_UP if name == "warm-up" else options.seconds)
        if name != "warm-up":
            yield {"policy": name, **row}
        for request in engine.scheduler.requests():
            engine.abort(request.id)
        engine.step()
        engine.clear_cache()
        engine.check_integrity()


def _run(engine: Engine, options: Any, seconds: float) -> dict[str, Any]:
    waiting = sessions(options.trace, options.offsets, options.sessions)
    words = Words(engine.model.config.vocab_size, 64)
    first = min(session.left[0].at for session in waiting)
    running: dict[int, tuple[Session, float]] = {}
    first_token: list[float] = []
    ended = 0
    begin = time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds:
        for session in waiting:
            if not session.busy and session.left and (session.left[0].at - first) / options.faster <= passed:
                request = session.left.popleft()
                try:
                    id = engine.add(words.prompt(request), Params(max_tokens=ANSWER, temperature=0), turn=request.turn)
                except Error:  # longer than what the arena holds
                    session.left.clear()
                    continue
                session.busy, running[id] = True, (session, time.perf_counter())
        for output in engine.step():
            session, since = running[output.id]
            if output.tokens and since:
                first_token.append(time.perf_counter() - since)
                running[output.id] = (session, 0.0)
            if output.finished:
                session.busy = False
                del running[output.id]
                ended += 1
    computed = engine.counters.prefill
    prompted = computed + engine.counters.cached
    return {
        "seconds": seconds,
        "ended": ended,
        "hit_rate": round(engine.counters.cached / max(1, prompted), 4),
        "computed_tokens": computed,
        "served_tokens_s": round(prompted / seconds),
        "ttft_ms": [round(1e3 * x, 1) for x in _spread(first_token)],
    }


def _spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, 90th percentile, mean."""
    if len(times) < 2:
        return (0.0, 0.0, 0.0)
    cuts = statistics.quantiles(times, n=10)
    return (statistics.median(times), cuts[8], statistics.fmean(times))


__all__ = ["replay"]
