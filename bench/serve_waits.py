"""Who waits in the replay of serve_replay.py, and what other orders of admission would do, without a GPU.

    python bench/serve_waits.py --trace agentic.jsonl.gz --offsets agentic-offsets.json --out waits.json

The engine's own scheduler and cache, with the pages of Kimi-Linear at --layers, on a clock that is modelled: a step
takes --step seconds and 1 / --rate for each of its tokens, as fitted to the run on an H200. Rows: the default order,
then others by `ageing` and `max_wait` of `EngineConfig`. First tokens in seconds; `slowest`: a tenth of them, `others`:
the rest, each with means of the first token, of the time before the first chunk, of the hit and of the prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from serve import config_of
from serve_replay import ANSWER, Session, Words, sessions

from perilune import Error, ModelConfig
from perilune.serve import EngineConfig, Params
from perilune.serve.cache import PrefixCache
from perilune.serve.cuts import reach_of
from perilune.serve.incoming import new_request
from perilune.serve.pools import Layout
from perilune.serve.request import Request
from perilune.serve.scheduler import Scheduler
from perilune.serve.work import Result

ORDERS: tuple[dict[str, float], ...] = ({}, {"ageing": 5e3}, {"ageing": 2e4}, {"max_wait": 5.0}, {"max_wait": 2.0})
PARTS = ("first_token", "queued", "hit", "prompt")


class Nothing:
    """A device without bytes: only the scheduler's decisions are looked at."""

    on_grid = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@dataclass
class Seen:
    """A request on its way. started: (seconds in the queue, hit, prompt) at its first chunk."""

    session: Session
    came: float
    started: tuple[float, int, int] | None = None
    answered: bool = False


def run(model: ModelConfig, order: dict[str, float], options: argparse.Namespace) -> dict[str, Any]:
    config = EngineConfig(options.arena, slots=options.sessions, token_budget=options.budget, **order)  # type: ignore[arg-type]
    geometry = Layout.of(model, config, torch.bfloat16).geometry()
    cache = PrefixCache(geometry, config.arena_bytes, 0, config.placement, config.eviction)
    scheduler = Scheduler(config, cache, Nothing(), reach=reach_of(model))  # type: ignore[arg-type]
    waiting = sessions(options.trace, options.offsets, options.sessions)
    words = Words(model.vocab_size, 64)
    first = min(session.left[0].at for session in waiting)
    now, made, computed = 0.0, 0, 0
    running: dict[int, Seen] = {}
    done: list[tuple[float, float, int, int]] = []
    while now < options.seconds:
        for session in waiting:
            if session.busy or not session.left or (session.left[0].at - first) / options.faster > now:
                continue
            asked = session.left.popleft()
            try:
                request = made_of(words.prompt(asked), asked.turn, made, model, now)
                scheduler.add(request)
            except Error:  # longer than what the arena holds
                session.left.clear()
                continue
            session.busy, running[made], made = True, Seen(session, now), made + 1
        chunks = scheduler.schedule(now)
        for chunk in chunks:
            seen = running[chunk.request.id]
            if seen.started is None:
                seen.started = (now - seen.came, chunk.start, len(chunk.request.tokens))
        size = sum(len(chunk.tokens) for chunk in chunks)
        computed += sum(len(chunk.tokens) for chunk in chunks if not chunk.decodes)
        now += options.step + size / options.rate
        for output in scheduler.postprocess(chunks, [Result([5] * chunk.sampled) for chunk in chunks], now):
            seen = running[output.id]
            if output.tokens and not seen.answered:
                assert seen.started is not None
                seen.answered = True
                done.append((now - seen.came, *seen.started))
            if output.finished:
                seen.session.busy = False
                del running[output.id]
    return (
        {"order": order}
        | summary(done, [now - seen.came for seen in running.values() if not seen.answered])
        | {
            "computed_tokens": computed,
            "hit_rate": round(scheduler.counters.cached / (scheduler.counters.cached + computed), 4),
        }
    )


def made_of(tokens: list[int], turn: int, id: int, model: ModelConfig, now: float) -> Request:
    nothing: dict[str, Any] = dict.fromkeys(("deadline", "hold", "stop", "mask"))
    params = Params(max_tokens=ANSWER, temperature=0)
    return new_request(id, tokens, params, model, now, 0, salt="", turn=turn, marks=(), priority=0, **nothing)


def summary(done: Sequence[tuple[float, float, int, int]], left: Sequence[float]) -> dict[str, Any]:
    """left: seconds that those have waited who have no first token at the end."""
    ranked = sorted(done)
    times = [one[0] for one in ranked]
    tenth = len(ranked) // 10
    parts = {"slowest": ranked[-tenth:], "others": ranked[:-tenth]}
    return {
        "first_tokens": len(ranked),
        "median": round(statistics.median(times), 3),
        "p90": round(statistics.quantiles(times, n=10)[8], 3),
        "mean": round(statistics.fmean(times), 3),
        **{
            name: {
                part: round(statistics.fmean(column), 3)
                for part, column in zip(PARTS, zip(*rows, strict=True), strict=True)
            }
            for name, rows in parts.items()
        },
        "left_waiting": len(left),
        "left_longest": round(max(left, default=0.0), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--offsets", type=Path)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--faster", type=float, default=100.0, help="than the trace's own time")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--arena", type=int, default=750_000_000)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--step", type=float, default=0.004)
    parser.add_argument("--rate", type=float, default=97_000.0, help="tokens a second")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, rows = config_of(options.layers), list[dict[str, Any]]()
    for order in ORDERS:
        rows.append(run(model, order, options))
        print(json.dumps(rows[-1]), flush=True)
        if options.out is not None:
            settings = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
            options.out.write_text(json.dumps({"options": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
