"""Checkpoints and forks of sandboxes: what a manager does with a guest that runs on."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from perilune.sandbox.creation import check_count
from perilune.sandbox.driver import Capture
from perilune.sandbox.errors import Recoverable, SandboxError, Terminal
from perilune.sandbox.machines import Running
from perilune.sandbox.options import network_of
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.states import Request, State
from perilune.sandbox.store import Record

if TYPE_CHECKING:
    from perilune.sandbox.manager import Manager

# Frozen disk layers of one machine; then it goes on as a new process, which starts with few.
RECYCLE = 64


async def checkpoint(manager: Manager, box: str, label: str | None = None, barrier: str | None = None) -> Snapshot:
    """Save the sandbox while it runs on. Without any use since the last snapshot that one is returned."""

    async def work(record: Record) -> Snapshot | None:
        running = manager.machines.running[box]
        touched = running.touched
        if touched == running.captured and await manager.driver.idle(running.handle):
            return await _named(manager, record, running.snapshot, State.RUNNING, label, barrier)
        with manager.layers.staged(f"checkpoint-{box}") as staging:
            capture = await manager.driver.checkpoint(running.handle, staging)
            manager.transitions.emit("captured", box, time.perf_counter() - capture.pause_s, bytes=capture.dirty_bytes)
            after = State.RUNNING if len(capture.disks) < RECYCLE else State.SNAPSHOTTING
            with _recoverable():
                snapshot = await manager.machines.commit(
                    record, running, capture, staging, after, label=label, barrier=barrier
                )
        # A program that ran in it may change things afterwards, and end unseen.
        running.captured = touched if capture.idle else -1
        if running.taken >= RECYCLE:
            await _recycle(manager, record, running)
        return snapshot

    record = manager.store.get(box)
    if record.state is State.PAUSED:
        paused = manager.store.snapshot(str(record.snapshot))
        return await _named(manager, record, paused, State.PAUSED, label, barrier)

    taken = await manager.transitions.ask(box, Request.CHECKPOINT, work, lambda: None)
    return taken if taken is not None else await checkpoint(manager, box, label, barrier)  # it was paused meanwhile


async def _recycle(manager: Manager, record: Record, running: Running) -> None:
    """Let a machine go on as a new process: the old one has a layer more for every capture of a written disk."""
    box = record.id
    with manager.layers.staged(f"recycle-{box}") as staging:

        async def commit(capture: Capture) -> None:
            await manager.machines.commit(record, running, capture, staging, State.SNAPSHOTTING, keep=False)
            # From here on whoever wants the guest waits for the new process.
            manager.machines.running.pop(box)

        try:
            await manager.driver.pause(running.handle, staging, commit)
        except BaseException:
            manager.machines.running[box] = running
            raise
    snapshot, machine = running.snapshot, running.machine
    try:
        again = await manager.machines.start(box, snapshot, machine, network_of(record), continues=True)
    except SandboxError as error:
        raise Terminal(f"box {box!r} stood at snapshot {snapshot.id} and could not go on: {error}") from error
    manager.watch(again)
    manager.store.move(manager.store.get(box), State.RUNNING)


async def _named(
    manager: Manager, record: Record, snapshot: Snapshot, after: State, label: str | None, barrier: str | None
) -> Snapshot:
    listed = snapshot.id in {known.id for known in manager.store.snapshots()}
    if listed and (label, barrier) in ((None, None), (snapshot.label, snapshot.barrier)):
        if record.state is not after:
            manager.store.move(manager.store.get(record.id), after)
        return snapshot
    return await manager.machines.relabel(record, snapshot, after, label, barrier)


async def fork(
    manager: Manager, box: str, count: int, label: str | None = None, barrier: str | None = None
) -> list[Record | SandboxError]:
    """Copies of a running or paused sandbox, from one instant; for each that could not be made, why."""

    async def work(record: Record) -> list[Record | SandboxError]:
        running = manager.machines.running.get(box)
        before = State.PAUSED if running is None else State.RUNNING
        if running is None:
            snapshot = manager.store.snapshot(str(record.snapshot))
            if label or barrier:
                snapshot = await manager.machines.relabel(record, snapshot, State.FORKING, label, barrier)
        else:
            with manager.layers.staged(f"fork-{box}") as staging:
                capture = await manager.driver.checkpoint(running.handle, staging)
                with _recoverable():
                    snapshot = await manager.machines.commit(
                        *(record, running, capture, staging, State.FORKING),
                        keep=bool(label or barrier),
                        label=label,
                        barrier=barrier,
                    )
        results = await _children(manager, record, snapshot, count)
        manager.store.move(manager.store.get(box), before)
        return results

    none: list[Record | SandboxError] = []
    return await manager.transitions.ask(box, Request.FORK, work, lambda: none)


async def _children(manager: Manager, parent: Record, snapshot: Snapshot, count: int) -> list[Record | SandboxError]:
    machine = manager.machines.machine(parent.spec)
    results: list[Record | SandboxError] = []
    records = []
    timeout_s = parent.spec.get("timeout_s")
    expires = None if timeout_s is None else time.time() + timeout_s
    metadata = {**parent.metadata, "parent": parent.id}
    for _ in range(count):
        child = secrets.token_hex(8)
        try:
            check_count(manager)
            manager.admission.admit(child, machine.memory_mib)
            records.append(
                manager.store.insert(child, parent.template, parent.spec, metadata, parent.owner, expires, snapshot.id)
            )
        except SandboxError as error:
            manager.admission.release(child)
            results.append(error)
    if not records:
        return results
    boxes = [record.id for record in records]
    started: Sequence[Running | SandboxError]
    try:
        started = await manager.machines.start_many(boxes, snapshot, machine, network_of(parent))
    except BaseException as error:
        for child in boxes:
            await _drop(manager, child, f"fork failed: {error}")
        raise
    for child, result in zip(boxes, started, strict=True):
        try:
            if isinstance(result, SandboxError):
                raise result
            results.append(manager.store.move(manager.store.get(child), State.RUNNING))
            manager.watch(result)
        except SandboxError as error:
            await _drop(manager, child, str(error))
            results.append(error)
    return results


async def _drop(manager: Manager, child: str, reason: str) -> None:
    """A copy that could not be made leaves nothing: nobody has its name."""
    await manager.end(child, reason)
    manager.store.delete(child)


@contextlib.contextmanager
def _recoverable() -> Iterator[None]:
    """A capture that was taken of a guest that runs on, and cannot be stored."""
    try:
        yield
    except Exception as error:
        raise Recoverable(f"the capture could not be stored, the guest runs on: {error}") from error


__all__ = ["checkpoint", "fork"]
