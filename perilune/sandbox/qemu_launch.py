"""From a machine's description to a confined QEMU process with our ends of its connections."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from perilune.sandbox.agent import Agent
from perilune.sandbox.cgroups import Cgroups
from perilune.sandbox.driver import Machine, Network
from perilune.sandbox.errors import SandboxError, Unavailable
from perilune.sandbox.network import Link, sweep
from perilune.sandbox.packages import require
from perilune.sandbox.qemu_command import Sockets, command, layer, layers
from perilune.sandbox.qemu_vm import Vm, blank_layer
from perilune.sandbox.sparse import copy_sparse
from perilune.sandbox.spawn import FIRST_UID, Confinement, Spawned, confined, end_orphans

SLOTS = 20_000
_FILE_SLACK = 16 << 20
_OVERHEAD = 2 << 30  # address space of QEMU itself: its translated code and its libraries
_RESIDENT = 512 << 20  # what it may really use of that


@dataclass(frozen=True)
class Start:
    """What one process starts from. disks: frozen layers, oldest first. state: None for a first boot."""

    box: str
    machine: Machine
    memory: Path
    disks: Sequence[Path]
    directory: Path
    state: Path | None
    network: Network


@dataclass
class Launcher:
    """Starts processes and takes back what they held. A slot is a number that no two machines have at once."""

    binary: str
    accel: str
    confine: Path
    cgroups: Cgroups | None = field(default_factory=Cgroups.find)
    _slots: set[int] = field(default_factory=set)
    _generation: int = 0

    def launch(self, start: Start, agent: Agent) -> tuple[Vm, list[socket.socket]]:
        """The machine, not yet attached, and our ends: monitor, agent, console."""
        slot = next(number for number in range(SLOTS) if number not in self._slots)
        self._slots.add(slot)
        with ExitStack() as undo, ExitStack() as theirs:
            undo.callback(self._slots.discard, slot)
            uid = FIRST_UID + slot if os.geteuid() == 0 else None
            start.directory.mkdir(mode=0o700, exist_ok=True)
            if uid is not None:
                _check_reachable(start.directory)
                _check_reachable(start.machine.root)
                os.chown(start.directory, uid, uid)
            link = Link(start.box, slot) if start.network.allow else None
            tap = None
            if link is not None:
                tap = link.open(start.network)
                theirs.callback(os.close, tap)
                undo.callback(link.close)
            ours: list[socket.socket] = []
            fds: list[int] = []
            for _ in range(3):
                mine, other = socket.socketpair()
                mine.setblocking(False)
                undo.callback(mine.close)
                theirs.callback(other.close)
                ours.append(mine)
                fds.append(other.fileno())
            kvm = None
            if self.accel == "kvm":
                kvm = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
                theirs.callback(os.close, kvm)
            sockets = Sockets(fds[0], fds[1], fds[2], tap, kvm)
            top = start.directory / f"disk.{len(start.disks)}.qcow2"
            blank_layer(start.machine.blank, top, uid)
            line = command(
                *(self.binary, self.accel, start.machine, start.memory, start.disks, top, sockets),
                load=start.state is not None,
            )
            inherited = [*fds, *(fd for fd in (tap, kvm) if fd is not None)]
            process = Spawned(
                confined(self.confine, line, self._limits(start, uid)),
                *(start.directory / "log", inherited),
                libraries=self._libraries,
            )
            if self.cgroups is not None:
                with contextlib.suppress(OSError):  # it may have ended already; then its log says why
                    self.cgroups.add(start.box, process.pid, (start.machine.memory_mib << 20) + _RESIDENT)
            self._generation += 1
            vm = Vm(
                *(start.box, self._generation, start.machine, start.directory, process, agent, start.memory, uid),
                layers=len(start.disks),
                slot=slot,
                link=link,
            )
            undo.pop_all()
        return vm, ours

    @property
    def _libraries(self) -> Path:
        """Ours that stand in for QEMU's (host/capstone.c), beside `confine`."""
        return self.confine.parent / "lib"

    def _limits(self, start: Start, uid: int | None) -> Confinement:
        machine = start.machine
        readable = [
            self._libraries,
            machine.kernel,
            machine.initrd,
            machine.root,
            machine.disk,
            start.memory,
            *start.disks,
        ]
        if start.state is not None:
            readable.append(start.state)
        return Confinement(
            uid,
            file_size=(machine.disk_mib << 21) + _FILE_SLACK,
            address_space=(machine.memory_mib << 20) + _OVERHEAD,
            readable=tuple(readable),
            writable=(start.directory,),
        )

    def merge(self, machine: Machine, disks: Sequence[Path], target: Path) -> None:
        """One layer of many, by qemu-img; confined like a machine, since a guest's bytes are what it reads."""
        uid = FIRST_UID + SLOTS if os.geteuid() == 0 else None
        place = target.with_suffix(".place")
        place.mkdir(mode=0o700)
        result = place / "layer"
        copy_sparse(disks[-1], result)
        if uid is not None:
            for parent in (place.parent, place):
                parent.chmod(0o711)
            os.chown(place, uid, uid)
            os.chown(result, uid, uid)
        # The newest layer gets all that lies between it and the empty disk.
        node = layer(result, "merged", layers(machine.disk, disks[:-1], writable=False))
        line = [require("qemu-img"), "rebase", "-b", str(machine.disk), "-F", "raw", f"json:{json.dumps(node)}"]
        limits = Confinement(
            uid,
            file_size=(machine.disk_mib << 21) + _FILE_SLACK,
            address_space=_OVERHEAD,
            readable=(machine.disk, *disks),
            writable=(place,),
        )
        run = subprocess.run(confined(self.confine, line, limits), capture_output=True, text=True, check=False, cwd="/")
        if run.returncode:
            raise SandboxError(f"qemu-img: {run.stderr.strip()[-300:]}")
        result.rename(target)

    def release(self, vm: Vm) -> None:
        """After its process has ended: its user, group and network are free again."""
        self._slots.discard(vm.slot)
        if vm.link is not None:
            vm.link.close()
        if self.cgroups is not None:
            self.cgroups.remove(vm.box)

    def reconcile(self, root: Path) -> list[str]:
        """End what an earlier service left under `root`: processes, then namespaces and groups."""
        ended = end_orphans(root)
        left = [path.name for path in root.iterdir()]
        sweep(left)
        if self.cgroups is not None:
            for box in left:
                self.cgroups.remove(box)
        return ended


def _check_reachable(path: Path) -> None:
    for parent in path.parents:
        if not parent.stat().st_mode & 0o001:
            raise Unavailable(
                f"{parent} cannot be passed by other users: machines run as users of their own; "
                "choose another root directory ($PERILUNE_SANDBOX), or `chmod o+x` it"
            )


__all__ = ["Launcher", "Start"]
