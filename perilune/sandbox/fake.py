"""A driver whose machines are objects in memory: for tests of all that stands above drivers, and of races.

Faults and barriers come from the gate (`perilune.sandbox.gates.Gates`), at the same steps as in real drivers.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perilune.sandbox.capture import captured
from perilune.sandbox.driver import (
    Capabilities,
    Capture,
    Command,
    Commit,
    Gate,
    Handle,
    Image,
    Machine,
    Network,
    Output,
    Result,
    Stats,
    Step,
    open_gate,
)
from perilune.sandbox.errors import GuestError, SandboxError, Terminal
from perilune.sandbox.fake_guest import Guest
from perilune.sandbox.output import Collector
from perilune.sandbox.pages import PAGE, open_layer, write_layer

_LENGTH = 8


class FakeProcess:
    """A program of a fake guest: an asyncio task."""

    def __init__(self, guest: Guest, command: Command, pid: int) -> None:
        self.pid = pid
        self._script = command.argv if isinstance(command.argv, str) else " ".join(command.argv)
        self._collector = Collector(command.max_output, self._given)
        self._behind = 0
        self._stdin = bytearray(command.stdin or b"")
        self._closed = asyncio.Event()
        self._signal = 0
        self._timed_out = False
        if not (command.interactive or command.pty):
            self._closed.set()
        self._task = asyncio.create_task(self._run(guest, command))
        self._task.add_done_callback(lambda _: self._collector.end())  # also where it was killed before it began

    async def _run(self, guest: Guest, command: Command) -> int:
        if command.detach:
            guest.detached.append(self._script)
        try:
            async with asyncio.timeout(None if command.detach else command.timeout_s):
                await self._closed.wait()
                return await guest.shell(self._script, bytes(self._stdin), self._print)
        except TimeoutError:
            self._timed_out = True
            return 137
        except asyncio.CancelledError:
            return 128 + (self._signal or 9)
        finally:
            if command.detach and self._script in guest.detached:
                guest.detached.remove(self._script)

    def _given(self, taken: int) -> None:
        self._behind -= taken

    async def _print(self, stream: int, data: bytes) -> None:
        self._behind += len(data)
        self._collector.put(stream, data)
        while self._behind > 1 << 20:
            await asyncio.sleep(0.001)

    def output(self) -> AsyncIterator[Output]:
        return self._collector.pieces()

    async def write(self, data: bytes) -> None:
        self._stdin += data

    async def close_stdin(self) -> None:
        self._closed.set()

    async def resize(self, rows: int, columns: int) -> None:
        pass

    async def kill(self, signal: int = 9) -> None:
        self._signal = signal
        self._task.cancel()

    async def wait(self) -> Result:
        stdout, stderr = await self._collector.rest()
        code = 128 + self._signal if self._task.cancelled() else self._task.result()
        return Result(code, stdout, stderr, self._timed_out, self._collector.truncated)


@dataclass
class _Vm:
    guest: Guest
    machine: Machine
    running: bool = True
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""
    processes: list[FakeProcess] = field(default_factory=list)


def _idle(vm: _Vm) -> bool:
    return all(process._task.done() for process in vm.processes)


class FakeDriver:
    """See `Driver`. `vms` holds what runs, by sandbox id, for tests to look at and to break."""

    name = "fake"

    def __init__(self, gate: Gate = open_gate) -> None:
        self.gate = gate
        self.vms: dict[str, _Vm] = {}
        self._generation = 0

    async def probe(self) -> Capabilities:
        return Capabilities("fake", True, "none", "1", incremental=True, network=False)

    async def format(self, machine: Machine) -> Mapping[str, str]:
        return {"driver": "fake", "version": "1", "memory_mib": str(machine.memory_mib)}

    async def start(self, box: str, machine: Machine, directory: Path, network: Network) -> Handle:
        await self.gate(Step.SPAWNED, box)
        return self._add(box, _Vm(Guest("fake", seed=secrets.randbits(63)), machine), directory)

    def _add(self, box: str, vm: _Vm, directory: Path) -> Handle:
        if box in self.vms:
            raise SandboxError(f"box {box!r} runs already")
        self.vms[box] = vm
        self._generation += 1
        return Handle(box, self._generation, directory)

    def _vm(self, handle: Handle) -> _Vm:
        vm = self.vms.get(handle.box)
        if vm is None:
            raise Terminal(f"box {handle.box!r}: its machine is gone")
        return vm

    async def wait_ready(self, handle: Handle, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.gate(Step.READY, handle.box)
        except TimeoutError:
            await self.stop(handle)
            raise Terminal(f"box {handle.box!r}: no answer from its guest within {timeout_s:g} s") from None

    async def exec(self, handle: Handle, command: Command) -> FakeProcess:
        vm = self._vm(handle)
        process = FakeProcess(vm.guest, command, 100 + len(vm.processes))
        vm.processes.append(process)
        return process

    async def read(self, handle: Handle, path: str, limit: int) -> bytes:
        data = self._vm(handle).guest.files.get(path)
        if data is None:
            raise GuestError(f"{path}: No such file or directory")
        if len(data) > limit:
            raise GuestError(f"{path}: {len(data)} bytes, at most {limit} are read")
        return data

    async def write(self, handle: Handle, path: str, data: bytes, mode: int = 0o644) -> None:
        self._vm(handle).guest.files[path] = bytes(data)

    async def refresh(self, handle: Handle, hostname: str) -> None:
        guest = self._vm(handle).guest
        guest.hostname, guest.clock, guest.seed = hostname, 0.0, secrets.randbits(63)

    async def checkpoint(self, handle: Handle, into: Path) -> Capture:
        return await captured(
            lambda: self._capture(handle, into, keep=True), lambda: self._go_on(handle), lambda: self.stop(handle)
        )

    async def pause(self, handle: Handle, into: Path, commit: Commit) -> Capture:
        async def body() -> Capture:
            capture = await self._capture(handle, into, keep=False)
            await commit(capture)
            return capture

        capture = await captured(body, lambda: self._go_on(handle), lambda: self.stop(handle))
        await self.stop(handle)
        return capture

    async def _capture(self, handle: Handle, into: Path, keep: bool) -> Capture:
        box, vm = handle.box, self._vm(handle)
        idle = _idle(vm)
        await self.gate(Step.QUIESCED, box)
        started = time.perf_counter()
        vm.running = False
        await self.gate(Step.STOPPED, box)
        data = json.dumps(vm.guest.state()).encode()
        (into / "state").write_bytes(b"fake")
        await self.gate(Step.STATE_SAVED, box)
        await self.gate(Step.DISK_FROZEN, box)
        memory = (len(data).to_bytes(_LENGTH, "little") + data).ljust(-(-(len(data) + _LENGTH) // PAGE) * PAGE, b"\0")
        await self.gate(Step.MEMORY_COPIED, box)
        if keep:
            vm.running = True
            await self.gate(Step.CONTINUED, box)
        pause_s = time.perf_counter() - started
        size = vm.machine.memory_mib << 20
        write_layer(into / "memory", size, [(0, len(memory) // PAGE)], [memory])
        await self.gate(Step.WRITTEN, box)
        return Capture(into / "memory", into / "state", (), pause_s, len(memory), idle=idle)

    async def _go_on(self, handle: Handle) -> None:
        self._vm(handle).running = True

    async def resume(
        self, box: str, machine: Machine, image: Image, directory: Path, network: Network, continues: bool = False
    ) -> Handle:
        await self.gate(Step.SPAWNED, box)
        with image.memory.open("rb") as file:
            memory = bytearray(file.read(1 << 20))
        for patch in image.patches:
            layer = open_layer(patch)
            content = patch.read_bytes()
            for place, offset, length in layer.places():
                memory[place : place + length] = content[offset : offset + length]
        length = int.from_bytes(memory[:_LENGTH], "little")
        vm = _Vm(Guest.restored(json.loads(bytes(memory[_LENGTH : _LENGTH + length]))), machine)
        scripts, vm.guest.detached = vm.guest.detached, []
        handle = self._add(box, vm, directory)
        for script in scripts:
            await self.exec(handle, Command(script, detach=True))
        try:
            await self.gate(Step.LOADED, box)
        except BaseException:
            await self.stop(handle)
            raise
        return handle

    async def fork(
        self, boxes: Sequence[str], machine: Machine, image: Image, directories: Sequence[Path], network: Network
    ) -> list[Handle | SandboxError]:
        results: list[Handle | SandboxError] = []
        for box, directory in zip(boxes, directories, strict=True):
            try:
                results.append(await self.resume(box, machine, image, directory, network))
            except SandboxError as error:
                results.append(error)
        return results

    async def merge_disks(self, machine: Machine, disks: Sequence[Path], target: Path) -> None:
        target.write_bytes(b"".join(path.read_bytes() for path in disks))

    async def set_network(self, handle: Handle, network: Network) -> None:
        self._vm(handle)

    async def idle(self, handle: Handle) -> bool:
        return _idle(self._vm(handle))

    async def stats(self, handle: Handle) -> Stats:
        size = sum(map(len, self._vm(handle).guest.files.values()))
        return Stats(pss=size, private=size, shared=0, dirty=size, disk=0, cpu_s=0.0)

    async def ended(self, handle: Handle) -> str:
        vm = self.vms.get(handle.box)
        if vm is None:
            return "its machine is gone"
        await vm.gone.wait()
        return vm.why

    def crash(self, box: str, why: str = "the guest's kernel panicked") -> None:
        """What a test does to a machine: it ends by itself."""
        vm = self.vms.pop(box)
        vm.why = why
        vm.gone.set()

    async def stop(self, handle: Handle) -> None:
        vm = self.vms.pop(handle.box, None)
        if vm is None:
            return
        for process in vm.processes:
            process._task.cancel()
        vm.why = "stopped"
        vm.gone.set()
        await self.gate(Step.TORN_DOWN, handle.box)

    async def reconcile(self, root: Path) -> list[str]:
        return []


__all__ = ["FakeDriver", "FakeProcess"]
