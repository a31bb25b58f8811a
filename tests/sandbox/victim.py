"""A service that is killed at a chosen step: run by test_kill.py as a process of its own.

    python -m tests.sandbox.victim ROOT DRIVER STEP STATE TIMES
    python -m tests.sandbox.victim ROOT DRIVER list
    python -m tests.sandbox.victim ROOT DRIVER

It goes through every transition again and again, and prints a line for everything it has acknowledged. It kills itself
with SIGKILL when it has passed STEP so many times in a sandbox of that STATE; with `list` it ends after a round and
prints the steps and states that it passed; with neither it goes on until somebody kills it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from perilune.sandbox import Assets, Command, Manager, Options, Record
from perilune.sandbox.driver import Driver, Step
from perilune.sandbox.fake import FakeDriver
from perilune.sandbox.qemu import QemuDriver


def say(*words: object) -> None:
    """What is printed is acknowledged: it must be true after the kill."""
    print(*words, flush=True)


async def main(root: Path, kind: str, plan: list[str]) -> None:
    listing = plan == ["list"]
    step, state, times = plan if len(plan) == 3 else ("", "", "0")
    left = int(times)

    async def gate(passed: Step, box: str) -> None:
        nonlocal left
        if box.startswith("golden") and passed is not Step.READY:
            return
        now = manager.store.get(box).state.value if known(box) else "gone"
        if listing:
            say("passed", passed.value, now)
        if (passed.value, now) == (step, state):
            left -= 1
            if left < 0:
                say("killed", step, state)
                os.kill(os.getpid(), signal.SIGKILL)

    def known(box: str) -> bool:
        return box in {record.id for record in manager.store.boxes()}

    assets = Assets(root)
    driver: Driver = FakeDriver(gate) if kind == "fake" else QemuDriver(assets.confine, "tcg", gate)
    manager = await Manager.open(assets, driver, gate=gate)
    if listing or step == Step.READY:
        # A size that was never booted: what a template's boot passes.
        while True:
            sizes = {snapshot.format["memory_mib"] for snapshot in manager.store.snapshots()}
            least = 144 if kind == "fake" else assets.kernel().least_memory_mib + 16
            size = next(size for size in range(least, 1 << 20, 16) if str(size) not in sizes)
            await manager.create(Options(memory_mib=size))
            if listing:
                break
    value = 0
    while True:
        value = await one_round(manager, value)
        if listing:
            listing = False  # what closing passes is no transition
            return await manager.close()


async def one_round(manager: Manager, value: int) -> int:
    """Every transition at least once. value: the number that was last written; returns the one now."""

    async def write(box: str) -> None:
        nonlocal value
        value += 1
        say("writing", box, value)
        await manager.run(box, Command(f"echo {value} > /root/value; sync"))

    box = (await manager.create(Options())).id
    say("created", box)
    for _ in range(2):
        await write(box)
        await manager.checkpoint(box)
        say("saved", box, value)
        await write(box)
        await manager.pause(box)
        say("saved", box, value)
        say("paused", box)
        await manager.resume(box)
        say("running", box)
    (kid,) = await manager.fork(box, 1)
    assert isinstance(kid, Record)
    say("saved", box, value)
    say("saved", kid.id, value)
    await manager.pause(kid.id)
    say("paused", kid.id)
    snapshot = await manager.checkpoint(box, label=f"label-{value}")
    await write(box)
    await manager.rollback(box, snapshot.id)
    value -= 1
    say("saved", box, value)
    for one in (kid.id, box):  # a paused one, and one that runs
        say("ending", one)
        await manager.kill(one)
        say("ended", one)
    return value


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
