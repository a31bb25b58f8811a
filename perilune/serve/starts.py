"""How requests start: who of those that wait, with what lease, stage and slot, and from what state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perilune.serve.cache import live
from perilune.serve.request import Request, State

if TYPE_CHECKING:
    from perilune.serve.scheduler import Scheduler

MISSES = 8  # requests that do not fit before a step looks no further


def admit(scheduler: Scheduler, now: float) -> None:
    """Let those who wait start, as far as slots and memory go."""
    scheduler.settled = True
    if not scheduler.waiting or not scheduler.slots:
        return
    active = [*scheduler.running, *(request for request, _ in scheduler.fetching)]
    misses = 0
    for request in scheduler.admission.order(scheduler.waiting, scheduler.version, now):
        if not scheduler.slots:
            return
        overdue = scheduler.admission.overdue(request, now)
        if not overdue and scheduler.admission.coming(request, active, scheduler.version):
            continue
        fits = scheduler.admission.fits(request, active)
        if not fits and not active:
            # A hit keeps pages of its own; a request that fits only without it runs without it.
            request.cold = True
            fits = request.cold = scheduler.admission.fits(request, active)
        if fits and _start(scheduler, request, now):
            active.append(request)
        elif overdue or (misses := misses + 1) == MISSES:
            return  # nobody overtakes a request that has waited for too long


def _start(scheduler: Scheduler, request: Request, now: float) -> bool:
    chain, cache = scheduler.admission.chain(request, scheduler.version), scheduler.cache
    lease = cache.acquire(chain, now, scheduler.admission.limit(request))
    try:
        stage = live.reserve(cache, lease, chain, request.length, now, request.turn)
        arrived = None if stage is None or lease.ready else scheduler.device.fetch(lease.copies)
    except BaseException:  # the request waits on
        cache.release(lease)
        scheduler.device.settle()
        raise
    if stage is None:
        cache.release(lease)
        return False
    scheduler.waiting.remove(request)
    request.lease, request.stage, request.slot = lease, stage, scheduler.slots.pop()
    request.version, request.publish, request.cold = scheduler.version, True, False
    if arrived is None:
        begin(scheduler, request)
    else:
        request.move(State.PREFETCHING)
        scheduler.fetching.append((request, arrived))
    return True


def begin(scheduler: Scheduler, request: Request) -> None:
    """Its hit is on the device: load it, and plan the states that the request leaves."""
    lease, stage = request.lease, request.stage
    assert lease is not None
    assert stage is not None
    request.move(State.PREFILL)
    scheduler.running.append(request)
    scheduler.device.copy_pages(*live.copies(scheduler.cache, lease, stage))
    state = lease.node.state if lease.node is not None else None
    assert request.slot is not None
    scheduler.device.load(request.slot, state or (), lease.depth)
    request.table = live.table(scheduler.cache, lease, stage)
    request.computed = lease.depth
    if request.first_cached:
        request.cached, request.first_cached = lease.depth, False
        scheduler.counters.cached += lease.depth
        scheduler.counters.stateless += max(0, lease.kv_depth - lease.depth)
    marks = scheduler.cache.plan(lease, request.length, request.length, marks=request.client_marks)
    request.marks = {mark.depth: mark for mark in marks}
    if scheduler.began is not None:
        scheduler.began(request)


__all__ = ["admit", "begin"]
