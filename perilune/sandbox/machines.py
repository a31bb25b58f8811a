"""Machines and the store together: starting from snapshots, and making captures durable."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perilune.sandbox.assets import Assets
from perilune.sandbox.driver import Capture, Command, Driver, Gate, Handle, Image, Machine, Network, Step
from perilune.sandbox.errors import Conflict, SandboxError, Terminal
from perilune.sandbox.layers import Layers, Memory
from perilune.sandbox.snapshot import Snapshot, check_format
from perilune.sandbox.states import State
from perilune.sandbox.store import LayerRow, Record, Store

BOOT_S = 20.0
BOOT_TRIES = 3
USUAL_COPIES = 4
# A read goes through every layer of a disk: from this number on they are made one.
DISK_LAYERS = 12


@dataclass
class Running:
    """A machine that runs for a sandbox, and what its next capture is based on.

    base: memory layers in the image it was started from. memory, disks: layers of its last snapshot. taken: how many
    of the disk layers that it has frozen are in that. touched: how often the guest was used; captured: that number at
    the last snapshot. used, looked: when it was last used and looked at, by the monotonic
    clock.
    """

    handle: Handle
    machine: Machine
    base: tuple[str, ...]
    memory: tuple[str, ...]
    disks: tuple[str, ...]
    snapshot: Snapshot
    taken: int = 0
    touched: int = 1
    captured: int = 0
    used: float = field(default_factory=time.monotonic)
    looked: float = 0.0


class Machines:
    """Starts machines from snapshots and commits their captures; knows no requests and no lifetimes."""

    def __init__(self, assets: Assets, driver: Driver, store: Store, layers: Layers, gate: Gate) -> None:
        self.assets = assets
        self.driver = driver
        self.store = store
        self.layers = layers
        self.gate = gate
        self.running: dict[str, Running] = {}
        # Taking layers in and removing unused ones must not overlap.
        self._storing = asyncio.Lock()
        self._golden: dict[str, asyncio.Lock] = {}
        self._used: Counter[str] = Counter()

    def directory(self, box: str) -> Path:
        """Where a machine's own files are while it runs."""
        return self.assets.root / "boxes" / box

    def machine(self, spec: dict[str, Any] | Any) -> Machine:
        """The machine of a sandbox's specification."""
        template = self.assets.template(spec["template"])
        if spec.get("digest", template.digest) != template.digest:
            template = type(template)(template.name, spec["digest"], template.memory_mib, template.disk_mib)
        return self.assets.machine(template, spec.get("memory_mib"), spec.get("disk_mib"))

    @contextlib.contextmanager
    def using(self, snapshot: Snapshot) -> Iterator[None]:
        """A snapshot that is being started from stays until its sandbox stands on it, also if it is deleted."""
        self._used[snapshot.id] += 1
        try:
            yield
        finally:
            self._used[snapshot.id] -= 1

    # Starting

    async def start(
        self, box: str, snapshot: Snapshot, machine: Machine, network: Network, continues: bool = False
    ) -> Running:
        """Resume one machine from a snapshot and give it an identity of its own."""
        (started,) = await self.start_many([box], snapshot, machine, network, continues)
        if isinstance(started, SandboxError):
            raise started
        return started

    async def start_many(
        self, boxes: Sequence[str], snapshot: Snapshot, machine: Machine, network: Network, continues: bool = False
    ) -> list[Running | SandboxError]:
        """Resume a snapshot as many machines; each result is one of them or why it could not be started."""
        check_format(snapshot, await self.driver.format(machine))
        disks, state = await asyncio.to_thread(self._files, snapshot)
        memory = await self._memory(snapshot, machine.memory_mib << 20, len(boxes))
        image = Image(memory.image, state, disks, memory.patches, snapshot.clean)
        try:
            directories = [self.directory(box) for box in boxes]
            for directory in directories:
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir(parents=True, mode=0o700)
            handles: list[Handle | SandboxError]
            if len(boxes) == 1:
                try:
                    handles = [
                        await self.driver.resume(boxes[0], machine, image, directories[0], network, continues=continues)
                    ]
                except SandboxError as error:
                    handles = [error]
            else:
                handles = await self.driver.fork(boxes, machine, image, directories, network)
        finally:
            self.layers.release(memory)
        results = await asyncio.gather(*(self._started(handle, machine, memory, snapshot) for handle in handles))
        for directory, result in zip(directories, results, strict=True):
            if isinstance(result, SandboxError):
                shutil.rmtree(directory, ignore_errors=True)
        return results

    async def _started(
        self, handle: Handle | SandboxError, machine: Machine, memory: Memory, snapshot: Snapshot
    ) -> Running | SandboxError:
        if isinstance(handle, SandboxError):
            return handle
        try:
            await self.driver.refresh(handle, handle.box)
        except BaseException as error:  # a caller that goes away, too
            await asyncio.shield(self.driver.stop(handle))
            if isinstance(error, SandboxError):
                return error
            raise
        running = Running(handle, machine, memory.base, snapshot.memory, snapshot.disks, snapshot)
        self.running[handle.box] = running
        return running

    def _files(self, snapshot: Snapshot) -> tuple[tuple[Path, ...], Path]:
        """Its disks and its device state."""
        return tuple(self.layers.verify(layer) for layer in snapshot.disks), self.layers.verify(snapshot.state)

    async def _memory(self, snapshot: Snapshot, size: int, copies: int) -> Memory:
        """Held until it is released; a caller that goes away while it is made need not."""
        making = asyncio.ensure_future(asyncio.to_thread(self.layers.memory, snapshot.memory, size, copies))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._unwanted)
            raise

    def _unwanted(self, making: asyncio.Future[Memory]) -> None:
        if not making.cancelled() and making.exception() is None:
            self.layers.release(making.result())

    async def prepare(self, snapshot: Snapshot, machine: Machine) -> None:
        """Make the snapshot's memory image now, if a few copies of it would want one."""
        self.layers.release(await self._memory(snapshot, machine.memory_mib << 20, USUAL_COPIES))

    async def stop(self, box: str) -> None:
        """End a sandbox's machine, if it has one, and remove its files."""
        running = self.running.pop(box, None)
        handle = running.handle if running is not None else Handle(box, 0, self.directory(box))
        await self.driver.stop(handle)
        await asyncio.to_thread(shutil.rmtree, self.directory(box), True)

    # Captures

    async def commit(
        self,
        record: Record,
        running: Running,
        capture: Capture,
        staging: Path,
        after: State,
        keep: bool = True,
        label: str | None = None,
        barrier: str | None = None,
    ) -> Snapshot:
        """Make a capture durable and move the sandbox, in one transaction; the parent moves only with it."""
        async with self._storing:
            facts = dict(await self.driver.format(running.machine))
            known = set(self.store.layers())
            rows: list[LayerRow] = []
            try:
                memory, state = await asyncio.to_thread(self._take, running, capture, staging, rows)
                disks = await self._disks(running, rows, staging)
                snapshot = Snapshot(
                    box=record.id,
                    parent=running.snapshot.id or None,
                    template=record.template,
                    format=facts,
                    memory=memory,
                    disks=disks,
                    state=state,
                    clean=capture.clean,
                    created=time.time(),
                    bytes=sum(row.bytes for row in rows),
                    label=label,
                    barrier=barrier,
                ).sealed()
                await self.gate(Step.COMMITTING, record.id)
                self.store.commit(snapshot, rows, self.store.get(record.id), after, keep)
            except BaseException:
                await asyncio.to_thread(self.layers.remove, [row for row in rows if row.id not in known])
                raise
        running.memory, running.disks, running.snapshot = memory, disks, snapshot
        running.taken = len(capture.disks)
        with contextlib.suppress(Exception):  # it is committed; what is left over goes with a later one
            await self.collect()
        return snapshot

    def _take(
        self, running: Running, capture: Capture, staging: Path, rows: list[LayerRow]
    ) -> tuple[tuple[str, ...], str]:
        """Take the capture's files in; the layers of its memory and its device state. New rows are added to `rows`."""
        memory, new = self.layers.extend(capture.memory, running.base, running.memory, staging)
        rows += new
        rows.append(self.layers.take(capture.state, "state"))
        state = rows[-1].id
        for path in capture.disks[running.taken :]:
            rows.append(self.layers.copy(path, "disk", staging))
        return memory, state

    async def _disks(self, running: Running, rows: list[LayerRow], staging: Path) -> tuple[str, ...]:
        """The snapshot's disk layers; many are made one, which is as long to read as the disk has data."""
        chain = (*running.disks, *(row.id for row in rows if row.kind == "disk"))
        if len(chain) <= DISK_LAYERS:
            return chain
        target = staging / "merged-disk"
        await self.driver.merge_disks(running.machine, [self.layers.path(layer) for layer in chain], target)
        rows.append(await asyncio.to_thread(self.layers.copy, target, "disk", staging))
        return (rows[-1].id,)

    async def relabel(
        self, record: Record, snapshot: Snapshot, after: State, label: str | None, barrier: str | None
    ) -> Snapshot:
        """The same instant under another name, without a new layer."""
        named = replace(
            snapshot, box=record.id, parent=snapshot.id, label=label, barrier=barrier, created=time.time(), bytes=0
        ).sealed()
        async with self._storing:
            now = self.store.get(record.id)
            if now.state is not record.state or (now.state is State.PAUSED and now.snapshot != record.snapshot):
                raise Conflict(f"box {record.id!r} is {now.state.value} now: it went on while its snapshot was named")
            self.store.commit(named, [], now, after)
        return named

    async def collect(self) -> None:
        """Remove layers that nothing uses any more."""
        async with self._storing:
            self._used = +self._used
            rows = self.store.collect(self._used)
            if rows:
                await asyncio.to_thread(self.layers.remove, rows)

    # Golden snapshots: a template, booted once

    async def golden(self, template: str, machine: Machine) -> Snapshot:
        """The snapshot of a booted template on this machine; boots it the first time."""
        formats = {**await self.driver.format(machine), "initrd": self.assets.kernel().initrd}
        key = f"golden {template} " + " ".join(f"{name}={value}" for name, value in sorted(formats.items()))
        async with self._golden.setdefault(key, asyncio.Lock()):
            known = self.store.fact(key)
            if known is not None:
                try:
                    return self.store.snapshot(known)
                except SandboxError:
                    pass  # deleted meanwhile: boot again
            snapshot = await self._boot(template, machine)
            self.store.remember(key, snapshot.id)
            return snapshot

    async def _boot(self, template: str, machine: Machine) -> Snapshot:
        for attempt in range(BOOT_TRIES):
            box = f"golden-{os.urandom(4).hex()}"
            try:
                # A kernel that hangs is found soon; a host that is slow is waited for in the end.
                return await self._boot_once(box, template, machine, BOOT_S * (attempt + 1))
            except Terminal:
                if attempt == BOOT_TRIES - 1:
                    raise
            finally:
                await self.stop(box)
        raise AssertionError

    async def _boot_once(self, box: str, template: str, machine: Machine, limit_s: float) -> Snapshot:
        directory = self.directory(box)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, mode=0o700)
        record = self.store.insert(box, template, {"template": template}, {}, owner="golden")
        try:
            handle = await self.driver.start(box, machine, directory, Network())
            try:
                await self.driver.wait_ready(handle, limit_s)
                # What a first program needs is in the guest's memory then, in every copy.
                await (await self.driver.exec(handle, Command(":"))).wait()
                empty = Snapshot(box, None, template, {}, (), (), "", True, 0.0, 0)
                running = Running(handle, machine, (), (), (), empty)
                with self.layers.staged(box) as staging:
                    capture = await self.driver.checkpoint(handle, staging)
                    snapshot = await self.commit(record, running, capture, staging, State.CREATING)
            finally:
                await self.driver.stop(handle)
        finally:
            self.store.move(self.store.get(box), State.ENDED)
            self.store.delete(box)
        await self.prepare(snapshot, machine)
        return snapshot


__all__ = ["Machines", "Running"]
