"""A service that is killed at a chosen step: run by test_kill.py as a process of its own.

    python -m tests.sandbox.victim ROOT DRIVER PASSES

It goes through every transition again and again, prints a line for everything it has acknowledged, and kills itself
with SIGKILL when its transitions have passed PASSES steps.
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


async def main(root: Path, kind: str, passes: int) -> None:
    left = passes

    async def gate(step: Step, box: str) -> None:
        nonlocal left
        if box.startswith("golden"):
            return
        left -= 1
        if left < 0:
            say("killed", step.value)
            os.kill(os.getpid(), signal.SIGKILL)

    assets = Assets(root)
    driver: Driver = FakeDriver(gate) if kind == "fake" else QemuDriver(assets.confine, "tcg", gate)
    manager = await Manager.open(assets, driver, gate=gate)

    async def write(box: str, value: int) -> None:
        say("writing", box, value)
        await manager.run(box, Command(f"echo {value} > /root/value; sync"))

    value = 0
    while True:
        box = (await manager.create(Options())).id
        say("created", box)
        for _ in range(2):
            value += 1
            await write(box, value)
            await manager.checkpoint(box)
            say("saved", box, value)
            value += 1
            await write(box, value)
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
        value += 1
        await write(box, value)
        await manager.rollback(box, snapshot.id)
        say("saved", box, value - 1)
        await manager.kill(kid.id)
        say("ended", kid.id)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
