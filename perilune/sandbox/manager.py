"""The life of sandboxes: every request decided by its state, every transition done once and shared by who asks."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perilune.sandbox import captures, creation
from perilune.sandbox.admission import Admission
from perilune.sandbox.assets import Assets
from perilune.sandbox.driver import Capture, Command, Driver, Gate, Network, Process, Result, Stats, Step, open_gate
from perilune.sandbox.errors import Conflict, NotFound, Recoverable, SandboxError
from perilune.sandbox.image_config import ImageConfig, with_defaults
from perilune.sandbox.keeper import keep
from perilune.sandbox.layers import Layers
from perilune.sandbox.machines import Machines, Running
from perilune.sandbox.network import check
from perilune.sandbox.options import Limits, Options, network_of
from perilune.sandbox.pool import Pool
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.states import Decision, Request, State, decide
from perilune.sandbox.store import Record, Store
from perilune.sandbox.tokens import Tokens
from perilune.sandbox.transitions import Transitions

FORKS = 64
READ_LIMIT = 256 << 20


class Manager:
    """One service over one root directory. Open it with `Manager.open`, close it with `close`."""

    def __init__(self, assets: Assets, driver: Driver, limits: Limits, gate: Gate) -> None:
        root = assets.root
        for directory in (root, root / "boxes"):
            directory.mkdir(parents=True, exist_ok=True, mode=0o711)
        self.limits = limits
        self.driver = driver
        self.gate = gate
        self.store = Store(root / "state.db")
        self.layers = Layers(root, limits.disk)
        self.machines = Machines(assets, driver, self.store, self.layers, gate)
        self.admission = Admission(limits.memory)
        self.pool = Pool(self.machines, self.admission, limits.pool_low, limits.pool_high)
        self.transitions = Transitions(self.store, self.end)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.tokens = Tokens(root / "seed")

    @classmethod
    async def open(
        cls, assets: Assets, driver: Driver, limits: Limits | None = None, gate: Gate = open_gate
    ) -> Manager:
        """Take over a root directory: what an earlier service left is brought into a state that is true."""
        manager = cls(assets, driver, limits or Limits(), gate)
        await manager._reconcile()
        manager.spawn(keep(manager))
        return manager

    async def _reconcile(self) -> None:
        for box in await self.driver.reconcile(self.machines.assets.root / "boxes"):
            self.transitions.emit("orphan", box, time.perf_counter())
        for record in self.store.reconcile():
            self.transitions.emit("reconciled", record.id, time.perf_counter(), record.reason)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        known = list(self.store.layers())
        await asyncio.to_thread(self.layers.reconcile, known, boot)
        for record in self.store.boxes([State.ENDED]):
            if record.owner == "golden" or record.reason == "killed":
                self.store.delete(record.id)
        await asyncio.to_thread(_empty, self.machines.assets.root / "boxes")
        await self.machines.collect()

    async def close(self) -> None:
        """End every machine; paused sandboxes and snapshots stay."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.transitions.all_settled()
        await self.pool.close()
        for box in list(self.machines.running):
            await self.machines.stop(box)
        self.store.reconcile()
        self.store.close()

    def spawn(self, work: Awaitable[Any]) -> None:
        """Do it beside everything else, until the service closes."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_done)

    def _spawned_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.transitions.emit("background", "", time.perf_counter(), str(task.exception()))

    async def end(self, box: str, reason: str) -> None:
        """Whatever state it is in, it is over."""
        await self.machines.stop(box)
        record = self.store.get(box)
        if record.state is not State.ENDED:
            self.store.move(record, State.ENDED, reason=reason)
        self.admission.release(box)
        await self.machines.collect()

    # Life

    async def create(self, options: Options) -> Record:
        """A new sandbox that runs and answers; from a snapshot, or from its template's golden one."""
        return await creation.create(self, options)

    def watch(self, running: Running) -> None:
        async def watch() -> None:
            box = running.handle.box
            why = await self.driver.ended(running.handle)
            await self.transitions.settled(box)
            if self.machines.running.get(box) is running:
                self.transitions.emit("died", box, time.perf_counter(), why)
                await self.end(box, why)

        self.spawn(watch())

    async def pause(self, box: str) -> Record:
        """Save the sandbox and free its processor and memory."""

        async def work(record: Record) -> Record:
            running = self.machines.running[box]
            with self.layers.staged(f"pause-{box}") as staging:

                async def commit(capture: Capture) -> None:
                    await self.machines.commit(record, running, capture, staging, State.PAUSED, keep=False)

                try:
                    await self.driver.pause(running.handle, staging, commit)
                finally:
                    if self.store.get(box).state is State.PAUSED:  # committed: the machine is its sandbox's no more
                        self.machines.running.pop(box, None)
                        self.admission.release(box)
            await asyncio.to_thread(_remove, self.machines.directory(box))
            await self.gate(Step.COMMITTED, box)
            self.spawn(self.machines.prepare(running.snapshot, running.machine))
            return self.store.get(box)

        return await self.transitions.ask(box, Request.PAUSE, work, lambda: self.store.get(box))

    async def resume(self, box: str) -> Record:
        """Let a paused sandbox go on where it was."""

        async def work(record: Record) -> Record:
            return await self._resume(record, None)

        return await self.transitions.ask(box, Request.RESUME, work, lambda: self.store.get(box))

    async def rollback(self, box: str, snapshot: str) -> Record:
        """Let a sandbox go on from any snapshot of its template; what it did since is lost."""
        self.store.snapshot(snapshot)

        async def work(record: Record) -> Record:
            node = self.store.snapshot(snapshot)  # it may have been deleted while this waited
            with self.machines.using(node):
                return await self._resume(record, node)

        return await self.transitions.ask(box, Request.ROLLBACK, work, lambda: self.store.get(box))

    async def _resume(self, record: Record, node: Snapshot | None) -> Record:
        box = record.id
        if record.snapshot is None and node is None:
            raise SandboxError(f"box {box!r} has no snapshot to resume from")
        snapshot = node or self.store.snapshot(str(record.snapshot))
        machine = self.machines.machine(record.spec)
        self.admission.admit(box, machine.memory_mib)
        try:
            if node is not None or box in self.machines.running:
                await self.machines.stop(box)  # also programs of a paused one, which do not go on
            running = await self.machines.start(box, snapshot, machine, network_of(record), continues=node is None)
            await self.gate(Step.COMMITTING, box)
            timeout_s = record.spec.get("timeout_s")
            # A longer life that somebody asked for is kept.
            now = self.store.get(box)
            expires = None if timeout_s is None else max(time.time() + timeout_s, now.expires or 0.0)
            changes = {"snapshot": snapshot.id, "expires": expires, "reason": ""}
            moved = self.store.move(now, State.RUNNING, **changes)
        except Exception as error:
            await self.machines.stop(box)
            self.admission.release(box)
            stands = record.snapshot or snapshot.id
            self.store.move(self.store.get(box), State.PAUSED, snapshot=stands, reason=str(error))
            raise Recoverable(f"{error}; box {box!r} stays paused") from error
        self.watch(running)
        return moved

    async def checkpoint(self, box: str, label: str | None = None, barrier: str | None = None) -> Snapshot:
        """Save the sandbox while it runs on. Without any use since the last snapshot that one is returned."""
        return await captures.checkpoint(self, box, label, barrier)

    async def fork(
        self, box: str, count: int, label: str | None = None, barrier: str | None = None
    ) -> list[Record | SandboxError]:
        """Copies of a running or paused sandbox, from one instant; for each that could not be made, why."""
        if not 1 <= count <= FORKS:
            raise ValueError(f"count is {count}; it must be between 1 and {FORKS}")
        return await captures.fork(self, box, count, label, barrier)

    async def kill(self, box: str) -> None:
        """End a sandbox for good; its snapshots stay. Works in every state, waits for what is under way."""

        async def work(record: Record) -> None:
            await self.machines.stop(box)
            self.admission.release(box)
            self.store.move(self.store.get(box), State.ENDED, reason="killed")
            await self.machines.collect()

        await self.transitions.ask(box, Request.KILL, work, lambda: None)
        self.store.delete(box)

    def keep_alive(self, box: str, timeout_s: float) -> Record:
        """Let it live so much longer from now on."""
        if not 0 < timeout_s < 1e9:
            raise ValueError(f"timeout_s is {timeout_s}; it must be more than 0 seconds")
        record = self.store.get(box)
        if record.state in (State.KILLING, State.ENDED):
            raise Conflict(f"box {box!r} is {record.state.value}")
        return self.store.move(record, record.state, expires=time.time() + timeout_s)

    # The guest

    async def _use(self, box: str) -> Running:
        busy = self.transitions.busy
        while self.store.get(box).state is State.SNAPSHOTTING and box not in self.machines.running and busy(box):
            await self.transitions.settled(box)  # it goes on as another process in a moment
        record = self.store.get(box)
        running = self.machines.running.get(box)
        if decide(Request.USE, record.state) is not Decision.NOTHING or running is None:
            raise Conflict(f"box {box!r} is {record.state.value}: nothing can run in it now")
        running.touched += 1
        running.used = time.monotonic()
        return running

    async def exec(self, box: str, command: Command) -> Process:
        """Start a program in a sandbox that runs."""
        running = await self._use(box)
        spec = self.store.get(box).spec
        command = with_defaults(command, ImageConfig.of(spec.get("image", {})), spec.get("env", {}))
        return await self.driver.exec(running.handle, command)

    async def run(self, box: str, command: Command) -> Result:
        """Run a program to its end."""
        return await (await self.exec(box, command)).wait()

    async def read(self, box: str, path: str, limit: int = READ_LIMIT) -> bytes:
        """A file of the guest."""
        return await self.driver.read((await self._use(box)).handle, path, limit)

    async def write(self, box: str, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file of the guest in one piece."""
        running = await self._use(box)
        try:
            await self.driver.write(running.handle, path, data, mode)
        finally:
            running.touched += 1  # what was captured meanwhile has not all of it

    async def stats(self, box: str) -> Stats:
        """What its machine costs now; zeros while it is paused."""
        running = self.machines.running.get(box)
        if running is None:
            self.store.get(box)
            return Stats(0, 0, 0, 0, 0, 0.0)
        return await self.driver.stats(running.handle)

    async def set_network(self, box: str, network: Network) -> Record:
        """Replace what a sandbox may reach: at once where it runs, and for every resume from now on."""
        check(network)
        # A machine on its way up would have the policy of before.
        while (record := self.store.get(box)).state not in (State.RUNNING, State.PAUSED):
            if record.state in (State.KILLING, State.ENDED):
                raise Conflict(f"box {box!r} is {record.state.value}")
            await self.transitions.settled(box)
            await asyncio.sleep(0.01)
        before = record.spec.get("network")
        # Stored first: a machine that is started meanwhile has it already.
        moved = self.store.move(record, record.state, spec={**record.spec, "network": asdict(network)})
        running = self.machines.running.get(box)
        try:
            if running is not None:
                await self.driver.set_network(running.handle, network)
        except Exception:
            if self.machines.running.get(box) is running:
                now = self.store.get(box)
                self.store.move(now, now.state, spec={**now.spec, "network": before})
                raise
        return moved

    # Snapshots and tokens

    def snapshots(self, box: str | None = None) -> list[Snapshot]:
        """Snapshots that were asked for, the oldest first."""
        return [snapshot for snapshot in self.store.snapshots(box) if not snapshot.box.startswith("golden-")]

    async def delete_snapshot(self, snapshot: str) -> None:
        """Delete one; its layers go when nothing else needs them."""
        node = self.store.snapshot(snapshot)
        if node.box.startswith("golden-"):
            raise Conflict(f"snapshot {snapshot!r} is its template's own: sandboxes begin at it")
        self.store.hide(node.id)
        await self.machines.collect()

    def token(self, box: str, kind: str) -> str:
        """The secret of one sandbox for one purpose ("access", "traffic"): derived, never stored, another for each."""
        self.store.get(box)
        return self.tokens.of(box, kind)

    def check_token(self, box: str, kind: str, token: str) -> bool:
        """Compare in constant time; False for a sandbox that there is not."""
        try:
            self.store.get(box)
        except NotFound:
            return False
        return self.tokens.check(box, kind, token)


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        _remove(path)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


__all__ = ["FORKS", "READ_LIMIT", "Manager"]
