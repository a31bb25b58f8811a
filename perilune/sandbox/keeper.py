"""What happens by itself: sandboxes whose time is up or that stand idle are paused or killed."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from perilune.sandbox.errors import SandboxError
from perilune.sandbox.machines import Running
from perilune.sandbox.states import State
from perilune.sandbox.store import Record

if TYPE_CHECKING:
    from perilune.sandbox.manager import Manager

TICK_S = 1.0
# The real clock runs away from the monotonic one by less than this in a tick, unless somebody has set it.
CLOCK_SET_S = 2.0
# What a machine uses is read in a millisecond or two: this many in a tick, those that have waited longest first.
LOOKS = 32


async def keep(manager: Manager) -> None:
    """Look after a manager's sandboxes until cancelled."""
    ahead = _ahead()
    while True:
        await asyncio.sleep(TICK_S)
        try:
            ahead = follow_clock(manager, ahead)
            await sweep(manager)
        except Exception as error:  # the next look may go well; without one nobody's time would ever be up
            manager.transitions.emit("keep", "", time.perf_counter(), str(error))


def _ahead() -> float:
    return time.time() - time.monotonic()


def follow_clock(manager: Manager, before: float) -> float:
    """Lives last as long as was said, also when the host's clock is set. before: what this returned at the last look.

    Returns the seconds by which the real clock is ahead of the monotonic one.
    """
    now = _ahead()
    if abs(now - before) > CLOCK_SET_S:
        manager.store.shift(now - before)
        manager.transitions.emit("clock", "", time.perf_counter(), f"the clock was set by {now - before:.1f} s")
    return now


async def sweep(manager: Manager) -> None:
    """One look at those whose time is up, and at what the machines use."""
    expired = [_expire(manager, record) for record in manager.store.expired(time.time())]
    waiting = sorted(manager.machines.running.items(), key=lambda item: item[1].looked)
    machines = [_look(manager, box, running) for box, running in waiting[:LOOKS]]
    await asyncio.gather(*expired, *machines)


async def _expire(manager: Manager, record: Record) -> None:
    pauses = record.spec.get("on_timeout") == "pause"
    if record.state is State.PAUSED and pauses:
        return  # it waits without cost
    if record.state is State.ENDED:
        manager.store.delete(record.id)  # it was kept to say why
        return
    if record.state not in (State.RUNNING, State.PAUSED) or manager.transitions.busy(record.id):
        return  # the next look finds what comes of it
    try:
        # If it was renewed since it was read, its version is another one and this fails. What follows begins at once.
        manager.store.move(record, record.state, reason="its time is up")
        await (manager.pause(record.id) if pauses else manager.kill(record.id))
    except (SandboxError, OSError) as error:
        manager.transitions.emit("expire", record.id, time.perf_counter(), str(error))


async def _look(manager: Manager, box: str, running: Running) -> None:
    running.looked = time.monotonic()
    try:
        stats = await manager.driver.stats(running.handle)
        manager.admission.note(box, stats.private)
        record = manager.store.get(box)
        idle_s = record.spec.get("idle_s")
        if record.state is not State.RUNNING or idle_s is None or time.monotonic() - running.used < idle_s:
            return
        if await manager.driver.idle(running.handle):
            await manager.pause(box)
    except (SandboxError, OSError) as error:
        manager.transitions.emit("look", box, time.perf_counter(), str(error))


__all__ = ["LOOKS", "TICK_S", "keep", "sweep"]
