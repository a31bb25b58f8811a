"""A driver with a machine and a directory: what tests of drivers work in."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

from perilune.sandbox.driver import Capture, Command, Driver, Handle, Image, Machine, Network, Result
from perilune.sandbox.pages import lay_over, open_layer
from perilune.sandbox.sparse import copy_sparse

# Against hangs, not against a host that is busy: on two quiet cores everything takes a small part of it.
BOOT_S = 90.0
TIME_LIMIT_S = 150.0


# A driver, its machine, and the image of a booted one where booting takes long.
Given = tuple[Driver, Machine, Image | None]


def run(work: Awaitable[Any], limit_s: float = TIME_LIMIT_S) -> Any:
    """Run a coroutine against the clock: a hang is a failure."""

    async def limited() -> Any:
        async with asyncio.timeout(limit_s):
            return await work

    return asyncio.run(limited())


class World:
    """A driver, its machine and a directory; images are made from captures as the store would."""

    def __init__(self, driver: Driver, machine: Machine, golden: Image | None, place: Path) -> None:
        self.driver = driver
        self.machine = machine
        self.golden = golden
        self.place = place
        self._count = 0

    def directory(self, name: str) -> Path:
        self._count += 1
        path = self.place / f"{name}-{self._count}"
        path.mkdir(mode=0o711)
        return path

    async def boot(self, box: str = "box") -> Handle:
        """A machine that has just booted, or is a copy of one that had."""
        if self.golden is not None:
            return await self.resume(box, self.golden)
        handle = await self.driver.start(box, self.machine, self.directory(box), Network())
        await self.driver.wait_ready(handle, BOOT_S)
        return handle

    async def resume(self, box: str, image: Image, continues: bool = False) -> Handle:
        return await self.driver.resume(box, self.machine, image, self.directory(box), Network(), continues=continues)

    async def sh(self, handle: Handle, script: str, **options: object) -> Result:
        process = await self.driver.exec(handle, Command(script, **options))  # type: ignore[arg-type]
        return await process.wait()

    def image(self, capture: Capture, base: Image | None = None) -> Image:
        """An image of `capture`, taken of a machine that was started from `base`, or by `boot`."""
        base = base or self.golden
        place = self.directory("image")
        memory = place / "memory"
        if base is None:
            memory.touch()
        else:
            copy_sparse(base.memory, memory)
        with memory.open("rb+") as file:
            os.ftruncate(file.fileno(), self.machine.memory_mib << 20)
            for patch in base.patches if base else ():
                lay_over(open_layer(patch), file.fileno())
            lay_over(open_layer(capture.memory), file.fileno())
        disks = list(base.disks if base else ())
        for path in capture.disks:
            disks.append(place / f"{len(disks)}.qcow2")
            copy_sparse(path, disks[-1])
        state = place / "state"
        copy_sparse(capture.state, state)
        for path in (memory, state, *disks):
            path.chmod(0o444)
        return Image(memory, state, tuple(disks), (), capture.clean)

    async def checkpoint(self, handle: Handle) -> Capture:
        return await self.driver.checkpoint(handle, self.directory("capture"))

    async def pause(self, handle: Handle) -> Capture:
        """Pause; the capture's disks are copied while the machine stands, as a store does."""
        kept: list[Path] = []

        async def commit(capture: Capture) -> None:
            place = self.directory("kept")
            for path in capture.disks:
                kept.append(place / path.name)
                copy_sparse(path, kept[-1])

        capture = await self.driver.pause(handle, self.directory("capture"), commit)
        return dataclasses.replace(capture, disks=tuple(kept))


@contextlib.asynccontextmanager
async def world(given: Given, place: Path) -> AsyncIterator[World]:
    """A world whose machines are all ended afterwards, and gone as processes."""
    made = World(*given, place)
    try:
        yield made
    finally:
        for box in list(made.driver.vms):  # type: ignore[attr-defined]
            vm = made.driver.vms[box]  # type: ignore[attr-defined]
            await made.driver.stop(Handle(box, getattr(vm, "generation", 1), place))
        assert not made.driver.vms  # type: ignore[attr-defined]
