"""Any interleaving of requests against the memory of `cache_model`: a hit is what its tokens say, always."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import suppress

import pytest
from cache_model import CopyError, Model, Run

from perilune.serve.cache import Geometry, Placement, live

GEOMETRIES = [
    Geometry(token_bytes=1, state_bytes=10, page_tokens=4, match_unit=4, grid=4),
    Geometry(token_bytes=1, state_bytes=10, page_tokens=16, match_unit=4, grid=4),  # pages hold four units
    Geometry(token_bytes=1, state_bytes=10, page_tokens=4, match_unit=8, grid=4),  # units hold two pages
    Geometry(token_bytes=1, state_bytes=120, page_tokens=48, match_unit=4, grid=4),  # the published 6144 / 512
]
VERBS = ["open", "whole", "land", "live", "grow", "leave", "arrive", "end", "fork", "expire", "abandon"]
Step = tuple[str, int, tuple[int, ...]]


def steps(draw: random.Random, count: int) -> Iterator[Step]:
    """Verbs with a number and a prompt; half of the prompts begin like an earlier one."""
    seen: list[tuple[int, ...]] = [(0,)]
    for _ in range(count):
        start = draw.choice(seen) if draw.random() < 0.5 else ()
        kept = start[: draw.randrange(len(start) + 1)]
        tokens = (*kept, *(draw.randrange(2) for _ in range(draw.randrange(1, 12 if kept else 50))))
        seen = [*seen[-20:], tokens]
        often = ["open", "open", "whole", "whole", "land", "land", "leave", "leave"]
        rare = ["clear", "version", "quarantine", "fail"] if draw.random() < 0.2 else []
        yield draw.choice([*VERBS, *often, *rare]), draw.randrange(1000), tokens


def step(model: Model, verb: str, number: int, tokens: tuple[int, ...], now: float) -> None:
    """One step of the verb, if there is a request for it. number: which request, and how far it goes."""
    run = model.running[number % len(model.running)] if model.running else None
    if verb in ("open", "whole"):
        opened = model.open(tokens, number % len(tokens), now, now + number % 60 if number % 2 else None)
        if verb == "whole":
            model.arrive(opened)
            prompt = opened.depth + 1 + number % (len(tokens) - opened.depth)
            marks = model.cache.plan(opened.lease, prompt, len(tokens), exact=True)
            model.stage(opened, marks, now)
    elif verb == "expire":
        model.expire(now)
    elif verb == "quarantine":
        model.quarantine(tokens, number % len(tokens))
    elif verb == "clear" and not model.complete:
        live.clear(model.cache)
    elif verb == "version" and number % 4 == 0:
        model.version += 1
    elif verb == "fail":
        model.failing = number % 2 == 0
    elif run is not None:
        continued(model, run, verb, number, now)


def continued(model: Model, run: Run, verb: str, number: int, now: float) -> None:
    whole = run.stage is not None and bool(run.stage.states)  # staged at once, not growing
    if verb == "arrive":
        model.arrive(run)
    elif verb == "land":
        model.arrive(run)
        model.land(run, now) if whole else model.end(run)
    elif verb == "end":
        model.end(run)
    elif verb == "fork" and run.lease.ready:
        model.fork(run, 2)
    elif verb == "abandon" and run.stage is not None:
        model.abandon(run)
    elif verb == "live" and run.stage is None and run.lease.ready and run.depth < len(run.tokens):
        model.reserve(run, run.depth + 1 + number % (len(run.tokens) - run.depth), now)
    elif verb == "grow" and run.stage is not None and not whole:
        model.grow(run, run.computed + number % (len(run.tokens) - run.computed + 1), now)
    elif verb == "leave" and not whole and run.computed > run.depth:
        model.leave(run, run.depth + 1 + number % (run.computed - run.depth), now)


def play(model: Model, played: Iterable[Step]) -> None:
    for now, (verb, number, tokens) in enumerate(played):
        with suppress(CopyError):  # what needed room was told so, and nothing else happened
            step(model, verb, number, tokens, now)
        model.check()
    model.failing = False
    model.finish()


def run_of(seed: int, count: int) -> None:
    draw = random.Random(seed)
    geometry = GEOMETRIES[seed % len(GEOMETRIES)]
    device, host = draw.choice([0, 8, 40, 100, 160, 400, 1000]), draw.choice([0, 20, 60, 400])
    place = Placement(keep=draw.choice([0, 1, 2]), min_turn=1, every=draw.choice([0, 8]))
    play(Model(geometry, device, host, place, draw.choice(["auto", "gain", "lru"])), steps(draw, count))


def test_a_hit_is_what_its_tokens_say() -> None:
    for seed in range(24):
        run_of(seed, 100)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_with_room_for_all_a_hit_is_the_longest_prefix_ever_written(geometry: Geometry) -> None:
    model = Model(geometry, 800 * geometry.page_bytes, 0, Placement(keep=0, min_turn=1), "auto")
    model.complete = True
    play(model, steps(random.Random(0), 60))


@pytest.mark.slow
def test_a_hit_is_what_its_tokens_say_in_many_runs() -> None:
    for seed in range(1000, 4000):
        run_of(seed, 150)
