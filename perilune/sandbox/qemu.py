"""The primary driver: QEMU's microvm machine, with KVM where it truly works and emulation everywhere else.

The guest's memory is a private map of an image that never changes: the pages it wrote are the process's own and are
found by PAGEMAP_SCAN, so a capture writes only those, and machines of one image share all the others.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from perilune.sandbox.agent import Agent
from perilune.sandbox.counter import counter_khz
from perilune.sandbox.dirty import read_memory
from perilune.sandbox.driver import (
    Capabilities,
    Capture,
    Gate,
    Handle,
    Image,
    Machine,
    Network,
    Step,
    open_gate,
)
from perilune.sandbox.errors import Exhausted, SandboxError, Terminal, Unavailable
from perilune.sandbox.network import GATEWAY, GUEST, check
from perilune.sandbox.pages import PAGE, write_layer
from perilune.sandbox.plain import take_state
from perilune.sandbox.qemu_command import cpu, machine_type
from perilune.sandbox.qemu_launch import Launcher, Start
from perilune.sandbox.qemu_vm import Vm
from perilune.sandbox.sparse import fill_holes
from perilune.sandbox.vm_driver import QUIESCE_S, REFRESH_S, VmDriver

T = TypeVar("T")

BINARY = "qemu-system-x86_64"


class QemuDriver(VmDriver[Vm]):
    """See `Driver`. confine: the compiled host/confine.c. accel: "tcg" or "kvm" (`doctor` finds out which)."""

    name = "qemu"

    def __init__(self, confine: Path, accel: str = "tcg", gate: Gate = open_gate) -> None:
        super().__init__(gate)
        path = shutil.which(BINARY)
        if path is None:
            raise Unavailable(f"{BINARY} is not installed; `perilune sandbox setup` brings it")
        if accel not in ("tcg", "kvm"):
            raise SandboxError(f"accel is {accel!r}; it must be 'tcg' or 'kvm'")
        self.accel = accel
        self.binary = path
        self._launcher = Launcher(path, accel, confine)
        self._version = ""

    async def version(self) -> str:
        """QEMU's version, as it says it."""
        if not self._version:
            run = await asyncio.to_thread(subprocess.run, [self.binary, "--version"], capture_output=True, text=True)
            self._version = run.stdout.split("\n")[0].partition("version ")[2]
        return self._version

    async def probe(self) -> Capabilities:
        return Capabilities("qemu", True, self.accel, await self.version(), incremental=True, network=os.geteuid() == 0)

    async def format(self, machine: Machine) -> Mapping[str, str]:
        facts = {"counter_mhz": str(round(counter_khz() / 1000))} if self.accel == "tcg" else {}
        return {
            **facts,
            "driver": "qemu",
            "version": await self.version(),
            "machine": machine_type(machine),
            "accelerator": self.accel,
            "cpu": cpu(self.accel),
            "memory_mib": str(machine.memory_mib),
            "disk_mib": str(machine.disk_mib),
            "files": machine.identity,
        }

    # Starting

    async def start(self, box: str, machine: Machine, directory: Path, network: Network) -> Handle:
        zeros = await asyncio.to_thread(_zeros, machine)
        vm = await self._spawn(Start(box, machine, zeros, (), directory, None, network))
        return self._handle(vm)

    async def wait_ready(self, handle: Handle, timeout_s: float) -> None:
        vm = self._vm(handle)
        try:
            await self.gate(Step.READY, handle.box)
            await _or_gone(vm, vm.agent.hello(timeout_s, new=True))
        except Exception as error:
            await self.stop(handle)
            raise error if isinstance(error, Terminal) else Terminal(str(error)) from error

    async def resume(
        self, box: str, machine: Machine, image: Image, directory: Path, network: Network, continues: bool = False
    ) -> Handle:
        agent = self._paused.pop(box, None) if continues else None
        start = Start(box, machine, image.memory, image.disks, directory, image.state, network)
        vm = await self._spawn(start, agent)
        handle = self._handle(vm)
        try:
            await _or_gone(vm, vm.load(image.state, image.patches))
            await self.gate(Step.LOADED, box)
            await vm.qmp("cont")
            await _or_gone(vm, vm.agent.hello(REFRESH_S, new=agent is None, clean=image.clean))
            vm.agent.release()
        except BaseException as error:
            await asyncio.shield(self._failed(vm, error, "resumed"))
            raise
        return handle

    async def _spawn(self, start: Start, agent: Agent | None = None) -> Vm:
        if start.box in self.vms:
            raise SandboxError(f"box {start.box!r} runs already")
        try:
            vm, ours = self._launcher.launch(start, agent or Agent(start.box))
        except OSError as error:  # out of descriptors, processes or room
            raise SandboxError(f"box {start.box!r} could not be started: {error}") from error
        self._add(vm)
        try:
            await self.gate(Step.SPAWNED, start.box)
            await _or_gone(vm, vm.attach(*ours))
        except BaseException as error:
            await asyncio.shield(self._failed(vm, error, "started"))
            raise
        return vm

    # Captures

    async def _capture(self, vm: Vm, into: Path, keep: bool) -> Capture:
        steps: dict[str, float] = {}
        began = time.perf_counter()

        async def passed(step: Step) -> None:
            steps[step.value] = time.perf_counter() - began
            await self.gate(step, vm.box)

        writes = await vm.disk_written()
        if writes:
            await vm.add_layer()
        programs = await vm.agent.quiesce(QUIESCE_S)
        await passed(Step.QUIESCED)
        stopped = time.perf_counter()
        await vm.qmp("stop")
        await passed(Step.STOPPED)
        await vm.qmp("xen-save-devices-state", filename=str(vm.directory / "state"), live=False)
        await passed(Step.STATE_SAVED)
        if writes or await vm.disk_written():
            if not vm.prepared:
                await vm.add_layer()
            await vm.freeze_layer()
        await passed(Step.DISK_FROZEN)
        extents = vm.dirty()
        data = await asyncio.to_thread(read_memory, vm.process.pid, vm.address, extents)
        await passed(Step.MEMORY_COPIED)
        if keep:
            await vm.qmp("cont")
            vm.agent.release()
            await passed(Step.CONTINUED)
        pause_s = time.perf_counter() - stopped
        await asyncio.to_thread(write_layer, into / "memory", vm.size, extents, [data])
        await asyncio.to_thread(take_state, vm.directory / "state", into / "state")
        await passed(Step.WRITTEN)
        dirty = sum(count for _, count in extents) * PAGE
        clean, idle = programs is not None, programs == 0
        return Capture(into / "memory", into / "state", tuple(vm.frozen), pause_s, dirty, clean, idle, steps)

    async def merge_disks(self, machine: Machine, disks: Sequence[Path], target: Path) -> None:
        await asyncio.to_thread(self._launcher.merge, machine, disks, target)

    # The guest

    async def refresh(self, handle: Handle, hostname: str) -> None:
        await super().refresh(handle, hostname)
        vm = self._vm(handle)
        if vm.link is not None:
            await vm.agent.address(GUEST, GATEWAY, REFRESH_S)

    async def set_network(self, handle: Handle, network: Network) -> None:
        vm = self._vm(handle)
        check(network)
        if vm.link is None:
            if network.allow:
                raise Unavailable(f"box {vm.box!r} was started without a network: pause it, set it, resume it")
            return
        await asyncio.to_thread(vm.link.set, network)

    # The end

    async def _go_on(self, vm: Vm) -> None:
        await vm.qmp("cont")
        vm.agent.release()
        await vm.drop_layer()

    async def _release(self, vm: Vm) -> None:
        vm.qmp.close()
        await asyncio.to_thread(self._launcher.release, vm)

    async def _dirty(self, vm: Vm) -> int:
        return vm.dirty_bytes()

    async def reconcile(self, root: Path) -> list[str]:
        return await asyncio.to_thread(self._launcher.reconcile, root)


async def _or_gone(vm: Vm, work: Awaitable[T]) -> T:
    """The result of work that would never end if the machine did."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(vm.process.gone.wait())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise vm.gone()
    finally:
        task.cancel()
        gone.cancel()


def _zeros(machine: Machine) -> Path:
    """The memory of a machine that has not booted: a file without a single block, but on tmpfs (`fill_holes`)."""
    path = machine.blank.with_name(f"zeros-{machine.memory_mib}.ram")
    if not path.exists():
        new = path.with_suffix(f".new{threading.get_ident()}")
        try:
            with new.open("wb") as file:
                file.truncate(machine.memory_mib << 20)
                fill_holes(file.fileno(), machine.memory_mib << 20)
            new.chmod(0o444)
            new.rename(path)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise Exhausted(f"no room for a memory image of {machine.memory_mib} MiB: {error}") from error
    return path


__all__ = ["QemuDriver"]
