"""The driver for hosts with real KVM: Firecracker, diff snapshots, memory restored from a private map of its image.

Disks are raw files: each capture of a written disk is a copy of it (blocks are shared where the file system can).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perilune.sandbox.agent import Agent
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
from perilune.sandbox.errors import SandboxError, Terminal, Unavailable
from perilune.sandbox.firecracker_api import Api
from perilune.sandbox.firecracker_requests import boot_requests, load_request, vsock
from perilune.sandbox.merge import Pages, places, write_pages
from perilune.sandbox.pages import PAGE, lay_over, open_layer, write_layer
from perilune.sandbox.plain import take_state
from perilune.sandbox.sparse import copy_sparse
from perilune.sandbox.spawn import FIRST_UID, Confinement, Spawned, confined, end_orphans, memory_of
from perilune.sandbox.vm_driver import QUIESCE_S, REFRESH_S, RunningVm, VmDriver

_OVERHEAD = 256 << 20
_CONNECT_S = 0.05
_ANSWER_S = 0.2  # the first wait for the agent's answer; each further one is twice as long


@dataclass
class _Vm(RunningVm):
    """A machine of Firecracker. written: pages of its captures so far. whole: the next capture is of all its memory."""

    api: Api
    slot: int
    frozen: list[Path] = field(default_factory=list)
    written: Pages = field(default_factory=dict)
    captures: int = 0
    whole: bool = False


class FirecrackerDriver(VmDriver[_Vm]):
    """See `Driver`. binary: Firecracker's path; confine: the compiled host/confine.c."""

    name = "firecracker"

    def __init__(self, confine: Path, binary: Path, gate: Gate = open_gate) -> None:
        super().__init__(gate)
        if not binary.exists():
            raise Unavailable(f"{binary} is not there; set FIRECRACKER, or `perilune sandbox setup --firecracker`")
        self.confine = confine
        self.binary = binary
        self._slots: set[int] = set()
        self._generation = 0
        self._version = ""

    async def probe(self) -> Capabilities:
        reason = "" if os.access("/dev/kvm", os.R_OK | os.W_OK) else "/dev/kvm cannot be opened"
        version = await self.version()
        return Capabilities("firecracker", not reason, "kvm", version, incremental=True, network=False, reason=reason)

    async def version(self) -> str:
        """Firecracker's version, as it says it."""
        if not self._version:
            process = await asyncio.create_subprocess_exec(
                str(self.binary), "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
            )
            text = (await process.communicate())[0].decode()
            self._version = text.split("\n")[0].removeprefix("Firecracker v")
        return self._version

    async def format(self, machine: Machine) -> Mapping[str, str]:
        processor = next(
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
        return {
            "driver": "firecracker",
            "version": await self.version(),
            "cpu": processor,
            "memory_mib": str(machine.memory_mib),
            "disk_mib": str(machine.disk_mib),
            "files": machine.identity,
        }

    # Starting

    async def start(self, box: str, machine: Machine, directory: Path, network: Network) -> Handle:
        if machine.acpi:
            raise Unavailable("Firecracker needs the tiny kernel: `perilune sandbox setup --kernel tiny`")
        vm = await self._spawn(box, machine, directory, network, None, Agent(box))
        vm.whole = True
        try:
            for path, body in boot_requests(machine):
                await vm.api("PUT", path, body)
        except BaseException as error:
            await asyncio.shield(self._failed(vm, error, "started"))
            raise
        return self._handle(vm)

    async def wait_ready(self, handle: Handle, timeout_s: float) -> None:
        vm = self._vm(handle)
        try:
            await self.gate(Step.READY, handle.box)
            await self._connect(vm, timeout_s, new=True, clean=True)
        except Exception as error:
            await self.stop(handle)
            raise error if isinstance(error, Terminal) else Terminal(str(error)) from error

    async def resume(
        self, box: str, machine: Machine, image: Image, directory: Path, network: Network, continues: bool = False
    ) -> Handle:
        kept = self._paused.pop(box, None) if continues else None
        vm = await self._spawn(box, machine, directory, network, image, kept or Agent(box))
        try:
            memory = image.memory
            if image.patches:
                memory = await asyncio.to_thread(_patched, image, directory / "memory")
            await vm.api("PUT", "/snapshot/load", load_request(self._version, image.state, memory))
            await self.gate(Step.LOADED, box)
            await vm.api("PATCH", "/vm", {"state": "Resumed"})
            await self._connect(vm, REFRESH_S, new=kept is None, clean=image.clean)
            vm.agent.release()
        except BaseException as error:
            await asyncio.shield(self._failed(vm, error, "started"))
            raise
        return self._handle(vm)

    async def _spawn(
        self, box: str, machine: Machine, directory: Path, network: Network, image: Image | None, agent: Agent
    ) -> _Vm:
        if box in self.vms:
            raise SandboxError(f"box {box!r} runs already")
        if network.allow:
            raise Unavailable("the firecracker driver has no networks; use qemu")
        await self.version()
        slot = next(number for number in range(1 << 16) if number not in self._slots)
        self._slots.add(slot)  # before anything is waited for: copies that are made at once have users of their own
        try:
            process = await self._launch(slot, machine, directory, image)
        except BaseException as error:
            self._slots.discard(slot)
            if isinstance(error, OSError):
                raise SandboxError(f"box {box!r} could not be started: {error}") from error
            raise
        self._generation += 1
        vm = _Vm(box, self._generation, machine, directory, process, agent, Api(directory / "api.sock"), slot)
        self._add(vm)
        try:
            await self.gate(Step.SPAWNED, box)
            await vm.api.started(process.gone)
        except BaseException as error:
            await asyncio.shield(self._failed(vm, error, "started"))
            raise
        return vm

    async def _launch(self, slot: int, machine: Machine, directory: Path, image: Image | None) -> Spawned:
        directory.mkdir(mode=0o700, exist_ok=True)
        # Paths of a snapshot are those of its machine: relative ones, in a directory of its own.
        disk = image.disks[-1] if image is not None and image.disks else machine.disk
        await asyncio.to_thread(copy_sparse, disk, directory / "disk.raw")
        (directory / "root.squashfs").symlink_to(machine.root)
        uid = FIRST_UID + slot if os.geteuid() == 0 and os.stat("/dev/kvm").st_mode & 0o006 == 0o006 else None
        if uid is not None:
            for path in (directory, directory / "disk.raw"):
                os.chown(path, uid, uid)
        limits = Confinement(
            uid,
            file_size=(machine.memory_mib << 20) + (machine.disk_mib << 20) + _OVERHEAD,
            address_space=(machine.memory_mib << 20) + _OVERHEAD,
            readable=(
                self.binary,
                machine.kernel,
                machine.initrd,
                machine.root,
                *(() if image is None else (image.memory, image.state)),
            ),
            writable=(directory, Path("/dev/kvm")),
        )
        command = [str(self.binary), "--api-sock", "api.sock", "--id", "sandbox"]
        return Spawned(confined(self.confine, command, limits), directory / "log", (), cwd=directory)

    async def _connect(self, vm: _Vm, timeout_s: float, new: bool, clean: bool) -> None:
        """Reach the agent through the vsock; a connection that the reset after a snapshot meets is made again.

        The guest may accept one and read its first bytes before it hears of the reset; then nobody answers.
        """
        answer_s = _ANSWER_S
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    connection = await vsock(vm.directory / "v.sock")
                    if connection is not None:
                        await vm.agent.attach(connection, fresh=True)
                        with contextlib.suppress(Terminal):
                            return await vm.agent.hello(answer_s, new=new, clean=clean)
                        await vm.agent.detach()
                        answer_s *= 2
                    if vm.process.gone.is_set():
                        raise vm.gone()
                    await asyncio.sleep(_CONNECT_S)
        except TimeoutError:
            raise Terminal(f"box {vm.box!r}: no answer from its guest within {timeout_s:g} s") from None

    # Captures

    async def _capture(self, vm: _Vm, into: Path, keep: bool) -> Capture:
        programs = await vm.agent.quiesce(QUIESCE_S)
        await vm.agent.detach()  # a snapshot resets every connection of its machine: none may be open
        await self.gate(Step.QUIESCED, vm.box)
        stopped = time.perf_counter()
        await vm.api("PATCH", "/vm", {"state": "Paused"})
        await self.gate(Step.STOPPED, vm.box)
        vm.captures += 1
        memory, state = vm.directory / f"memory.{vm.captures}", vm.directory / "state"
        kind = "Full" if vm.whole else "Diff"
        body = {"snapshot_type": kind, "snapshot_path": state.name, "mem_file_path": memory.name}
        await vm.api("PUT", "/snapshot/create", body)
        await self.gate(Step.STATE_SAVED, vm.box)
        frozen = vm.directory / f"disk.{vm.captures}"
        await asyncio.to_thread(copy_sparse, vm.directory / "disk.raw", frozen)
        vm.frozen.append(frozen)
        await self.gate(Step.DISK_FROZEN, vm.box)
        await self.gate(Step.MEMORY_COPIED, vm.box)
        if keep:
            await vm.api("PATCH", "/vm", {"state": "Resumed"})
        pause_s = time.perf_counter() - stopped
        if keep:
            await self._reconnect(vm)
            await self.gate(Step.CONTINUED, vm.box)
        await asyncio.to_thread(self._write, vm, into)
        await asyncio.to_thread(take_state, state, into / "state")
        await self.gate(Step.WRITTEN, vm.box)
        size = len(vm.written) * PAGE
        clean, idle = programs is not None, programs == 0
        return Capture(into / "memory", into / "state", tuple(vm.frozen), pause_s, size, clean, idle)

    def _write(self, vm: _Vm, into: Path) -> None:
        self._absorb(vm)
        write_pages(into / "memory", vm.written, vm.size)

    def _absorb(self, vm: _Vm) -> None:
        """Firecracker's file has what was written since its last one; a capture has what was since the start.

        Also after a capture that failed: no later file has those pages again.
        """
        for memory in sorted(vm.directory.glob("memory.*"), key=lambda path: int(path.suffix[1:])):
            layer = vm.directory / f"pages-{memory.suffix[1:]}"
            with memory.open("rb") as file:
                extents = _extents(file.fileno(), vm.size)
                pieces = (os.pread(file.fileno(), count * PAGE, first * PAGE) for first, count in extents)
                write_layer(layer, vm.size, extents, pieces)
            memory.unlink()
            vm.written |= places(open_layer(layer))
            vm.whole = False

    async def _go_on(self, vm: _Vm) -> None:
        await vm.api("PATCH", "/vm", {"state": "Resumed"})
        await asyncio.to_thread(self._absorb, vm)
        await self._reconnect(vm)

    async def _reconnect(self, vm: _Vm) -> None:
        await vm.agent.detach()
        await self._connect(vm, REFRESH_S, new=False, clean=True)
        vm.agent.release()

    async def merge_disks(self, machine: Machine, disks: Sequence[Path], target: Path) -> None:
        await asyncio.to_thread(copy_sparse, disks[-1], target)

    async def set_network(self, handle: Handle, network: Network) -> None:
        if network.allow:
            raise Unavailable("the firecracker driver has no networks; use qemu")

    async def _release(self, vm: _Vm) -> None:
        self._slots.discard(vm.slot)

    async def _dirty(self, vm: _Vm) -> int:
        return (await asyncio.to_thread(memory_of, vm.process.pid))[1]

    async def reconcile(self, root: Path) -> list[str]:
        return await asyncio.to_thread(end_orphans, root)


def _extents(fd: int, size: int) -> list[tuple[int, int]]:
    """Pages of a sparse file that are not holes."""
    extents = []
    at = 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break
        end = min(os.lseek(fd, at, os.SEEK_HOLE), size)
        first = at // PAGE
        extents.append((first, -(-end // PAGE) - first))
        at = end
    return extents


def _patched(image: Image, target: Path) -> Path:
    copy_sparse(image.memory, target)
    with target.open("rb+") as file:
        for patch in image.patches:
            lay_over(open_layer(patch), file.fileno())
    return target


__all__ = ["FirecrackerDriver"]
