"""What drivers of real machines have in common: the guest's verbs, the frame around a capture, the end."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from perilune.sandbox.agent import Agent
from perilune.sandbox.capture import captured
from perilune.sandbox.driver import (
    Capture,
    Command,
    Commit,
    Gate,
    Handle,
    Image,
    Machine,
    Network,
    Process,
    Stats,
    Step,
)
from perilune.sandbox.errors import SandboxError, Terminal
from perilune.sandbox.plain import read_plain
from perilune.sandbox.spawn import Spawned, cpu_seconds, memory_of

# A guest that is alive answers within a millisecond or two; one that is not is captured as it is.
QUIESCE_S = 0.5
REFRESH_S = 30.0
_LAST_WORDS_S = 0.2
LOG_MAX = 64 << 10


@dataclass
class RunningVm:
    """What every driver keeps of a machine that runs."""

    box: str
    generation: int
    machine: Machine
    directory: Path
    process: Spawned
    agent: Agent
    busy: asyncio.Lock = field(default_factory=asyncio.Lock, kw_only=True)
    watcher: asyncio.Task[None] | None = field(default=None, kw_only=True)

    @property
    def size(self) -> int:
        """Bytes of guest memory."""
        return self.machine.memory_mib << 20

    def why(self) -> str:
        """Why the machine ended, as far as can be told: the line of its log that speaks of an error, or the last."""
        try:
            log = read_plain(self.directory / "log", LOG_MAX)
        except (OSError, SandboxError) as error:
            log = f"its log cannot be read: {error}".encode()
        lines = log.decode(errors="replace").strip().splitlines()
        said = [line for line in lines if "rror" in line] or lines[-1:]
        return f"its process ended with {self.process.exit_code}" + (f": {said[0]}" if said else "")

    def gone(self) -> Terminal:
        """The error for whoever still wants something of it."""
        return Terminal(f"box {self.box!r}: {self.why()}")


V = TypeVar("V", bound=RunningVm)


class VmDriver(ABC, Generic[V]):
    """A driver whose guests have our agent. It adds how machines start, and the five methods that are abstract here."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.vms: dict[str, V] = {}
        self._paused: dict[str, Agent] = {}

    @abstractmethod
    async def resume(
        self, box: str, machine: Machine, image: Image, directory: Path, network: Network, continues: bool = False
    ) -> Handle: ...

    @abstractmethod
    async def _capture(self, vm: V, into: Path, keep: bool) -> Capture:
        """Capture; the guest runs on if `keep`, else it stands afterwards."""

    @abstractmethod
    async def _go_on(self, vm: V) -> None:
        """Let the guest run, whatever a capture had done before it failed."""

    @abstractmethod
    async def _release(self, vm: V) -> None:
        """Give back what a machine held whose process has ended."""

    @abstractmethod
    async def _dirty(self, vm: V) -> int:
        """Bytes written since the start."""

    # Starting

    async def fork(
        self, boxes: Sequence[str], machine: Machine, image: Image, directories: Sequence[Path], network: Network
    ) -> list[Handle | SandboxError]:
        made: list[Handle] = []

        async def one(box: str, directory: Path) -> Handle | SandboxError:
            try:
                handle = await self.resume(box, machine, image, directory, network)
            except SandboxError as error:
                return error
            made.append(handle)
            return handle

        try:
            async with asyncio.TaskGroup() as group:
                copies = [group.create_task(one(*given)) for given in zip(boxes, directories, strict=True)]
        except BaseException as error:  # whoever asked has gone, or something that nobody thought of
            for handle in made:
                await asyncio.shield(self.stop(handle))
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        return [copy.result() for copy in copies]

    def _add(self, vm: V) -> Handle:
        """A machine has been started."""
        self.vms[vm.box] = vm
        vm.watcher = asyncio.create_task(_watch(vm))
        return self._handle(vm)

    async def _failed(self, vm: V, error: BaseException, what: str) -> None:
        """End a machine that could not be started; an error becomes `Terminal` with what its process said."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(vm.process.gone.wait(), _LAST_WORDS_S)
        why = f"; {vm.why()}" if vm.process.gone.is_set() else ""
        await self.stop(self._handle(vm))
        if isinstance(error, Exception) and not isinstance(error, Terminal):
            said = str(error) or type(error).__name__
            raise Terminal(f"box {vm.box!r} could not be {what}: {said}{why}") from error

    def _handle(self, vm: V) -> Handle:
        return Handle(vm.box, vm.generation, vm.directory, vm.process.pid)

    def _vm(self, handle: Handle) -> V:
        vm = self.vms.get(handle.box)
        if vm is None or vm.generation != handle.generation:
            raise Terminal(f"box {handle.box!r}: its machine is gone")
        if vm.process.gone.is_set():
            raise vm.gone()
        return vm

    # Captures

    async def checkpoint(self, handle: Handle, into: Path) -> Capture:
        vm = self._vm(handle)
        async with vm.busy:
            return await captured(
                lambda: self._capture(vm, into, keep=True), lambda: self._resume_after(vm), lambda: self.stop(handle)
            )

    async def pause(self, handle: Handle, into: Path, commit: Commit) -> Capture:
        vm = self._vm(handle)

        async def body() -> Capture:
            capture = await self._capture(vm, into, keep=False)
            await commit(capture)
            return capture

        async with vm.busy:
            capture = await captured(body, lambda: self._resume_after(vm), lambda: self.stop(handle))
            self._forget(vm)
            await vm.process.kill()
            await vm.agent.drained()  # what the guest had sent before it stood
            self._paused[vm.box] = vm.agent
            await self._torn_down(vm)
        return capture

    async def _resume_after(self, vm: V) -> None:
        if vm.process.gone.is_set():
            raise vm.gone()
        await self._go_on(vm)
        vm.agent.release()

    # The guest

    async def exec(self, handle: Handle, command: Command) -> Process:
        return await self._vm(handle).agent.spawn(command)

    async def read(self, handle: Handle, path: str, limit: int) -> bytes:
        return await self._vm(handle).agent.read(path, limit)

    async def write(self, handle: Handle, path: str, data: bytes, mode: int = 0o644) -> None:
        await self._vm(handle).agent.write(path, data, mode)

    async def refresh(self, handle: Handle, hostname: str) -> None:
        await self._vm(handle).agent.refresh(hostname, REFRESH_S)

    async def idle(self, handle: Handle) -> bool:
        try:
            return await self._vm(handle).agent.programs(QUIESCE_S) == 0
        except TimeoutError:
            return False

    async def stats(self, handle: Handle) -> Stats:
        vm = self._vm(handle)
        pss, private, shared = await asyncio.to_thread(memory_of, vm.process.pid)
        disk = sum(path.stat().st_blocks << 9 for path in vm.directory.glob("disk.*"))
        return Stats(pss, private, shared, await self._dirty(vm), disk, cpu_seconds(vm.process.pid))

    # The end

    async def ended(self, handle: Handle) -> str:
        vm = self.vms.get(handle.box)
        if vm is None or vm.generation != handle.generation:
            return "its machine is gone"
        await vm.process.gone.wait()
        return vm.why()

    async def stop(self, handle: Handle) -> None:
        abandoned = self._paused.pop(handle.box, None)
        if abandoned is not None:
            abandoned.fail(Terminal(f"box {handle.box!r} was ended"))
        vm = self.vms.get(handle.box)
        if vm is None or vm.generation != handle.generation:
            return
        self._forget(vm)
        await vm.process.kill()
        vm.agent.fail(vm.gone())
        await self._torn_down(vm)

    def _forget(self, vm: V) -> None:
        if self.vms.get(vm.box) is vm:
            del self.vms[vm.box]
        if vm.watcher is not None:
            vm.watcher.cancel()

    async def _torn_down(self, vm: V) -> None:
        await self._release(vm)
        await self.gate(Step.TORN_DOWN, vm.box)


async def _watch(vm: RunningVm) -> None:
    """A machine that ends by itself: whoever waits for its guest hears so."""
    await vm.process.gone.wait()
    vm.agent.fail(vm.gone())


__all__ = ["QUIESCE_S", "REFRESH_S", "RunningVm", "VmDriver"]
