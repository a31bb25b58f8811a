"""A device whose calls fail, one kind of call after the other: no request is lost, no page, slot or lease either."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from test_scheduler import UNIT, Memory, add, build, finish, step, words

from perilune.serve.cache import Chain, check_integrity


@pytest.mark.parametrize("on_grid", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("where", ["load", "save", "accept", "copy_pages", "move", "fetch", "arrived"])
def test_what_fails_in_the_memory_ends_requests_and_loses_none(
    where: str, late: bool, on_grid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """late: the call fails after its work. As in `Engine`, all that run are ended then; the others go on."""
    name = "fetch" if where == "arrived" else where
    real, draw, failed = getattr(Memory, name), random.Random(1), 0

    def perhaps(call: Callable[..., Any], *args: Any) -> Any:
        nonlocal failed
        fails = draw.random() < 0.2
        failed += fails
        result = call(*args) if late or not fails else None
        if fails:
            raise MemoryError("on purpose")
        return result

    def call(*args: Any) -> Any:
        if where != "arrived":
            return perhaps(real, *args)
        arrived = real(*args)
        return lambda: perhaps(arrived)

    monkeypatch.setattr(Memory, name, call)
    scheduler, memory = build(pages=60, host=200, on_grid=on_grid, slots=3, reserve=0.0)
    prompts, ended, now = [words(30 + i, i) for i in range(12)], list[int](), 0.0
    for id in range(100):
        add(scheduler, id, prompts[draw.randrange(12)] + words(3, id), now, 8)
        for _ in range(4 if id < 99 else 1000):
            now += 1
            try:
                ended += [output.id for output in step(scheduler, memory, now) if output.finished]
            except MemoryError as error:
                scheduler.fail(f"a step failed: {error!r}")
            scheduler.check_integrity()
            check_integrity(scheduler.cache)
            if not scheduler.requests() and not scheduler.has_outputs:
                break
    assert failed
    assert sorted(ended) == list(range(100))


@pytest.mark.parametrize("where", ["fetch", "arrived"])
def test_a_hold_whose_copies_fail_keeps_no_lease(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, memory = build(pages=40, host=200, slots=1)
    for id in range(4):
        add(scheduler, id, words(60, id), id)
        finish(scheduler, memory, id)

    def fails(*_: Any) -> Any:
        raise MemoryError("on purpose")

    monkeypatch.setattr(memory, "fetch", fails if where == "fetch" else lambda _: fails)
    with pytest.raises(MemoryError):
        scheduler.holds.take(Chain.of(words(60, 0), UNIT, "", 0), 9.0, 60.0, 60)
    assert scheduler.cache.leases == len(scheduler.holds) == 0
    check_integrity(scheduler.cache)
