"""One QEMU process: its connections, its memory, its disk layers."""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import socket
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from perilune.sandbox.dirty import mapping_of, write_memory, written
from perilune.sandbox.errors import SandboxError
from perilune.sandbox.network import Link
from perilune.sandbox.pages import PAGE, Extent, open_layer
from perilune.sandbox.qemu_command import DISK_DEVICE, NIC, layer, node_name
from perilune.sandbox.qmp import Qmp
from perilune.sandbox.vm_driver import RunningVm

_CONSOLE = 1 << 14
_POLL_S = 0.0005


class Console(asyncio.Protocol):
    """The last lines of the guest's console: what a kernel says before it dies."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        while self._size > _CONSOLE and len(self._pieces) > 1:
            self._size -= len(self._pieces.popleft())

    def text(self) -> str:
        """What is kept, as text."""
        return b"".join(self._pieces)[-_CONSOLE:].decode(errors="replace")


@dataclass
class Vm(RunningVm):
    """A machine of QEMU. layers: the number of the disk layer that is written. frozen: those of this process before it.

    written: how much had been written to the disk when the top layer was new. prepared: the next layer is there.
    """

    memory: Path
    uid: int | None
    qmp: Qmp = field(default_factory=Qmp)
    console: Console = field(default_factory=Console)
    layers: int = 0
    frozen: list[Path] = field(default_factory=list)
    written: int = 0
    address: int = 0
    slot: int = 0
    link: Link | None = None
    prepared: bool = False

    async def attach(self, qmp: socket.socket, agent: socket.socket, console: socket.socket) -> None:
        """Take our ends of the three connections; returns when QEMU answers."""
        await self.agent.attach(agent)
        await asyncio.get_running_loop().create_unix_connection(lambda: self.console, sock=console)
        await self.qmp.attach(qmp)
        self.address = mapping_of(self.process.pid, self.memory, self.size)

    async def load(self, state: Path, patches: tuple[Path, ...]) -> None:
        """Lay `patches` over the memory and load the device state; the guest does not run yet."""
        for patch in patches:
            await asyncio.to_thread(self._lay, patch)
        await self.qmp("migrate-incoming", uri=f"file:{state}")
        while (await self.qmp("query-status"))["status"] == "inmigrate":
            await asyncio.sleep(_POLL_S)
        if self.link is not None:
            # The cable was out in the machine that was captured, if that one had no network.
            await self.qmp("set_link", name=NIC, up=True)

    def _lay(self, patch: Path) -> None:
        opened = open_layer(patch)
        if not opened.extents:
            return
        with patch.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
            write_memory(self.process.pid, self.address, opened.extents, data, opened.data_offset)

    def dirty(self) -> list[Extent]:
        """The pages written since the start."""
        return written(self.process.pid, self.address, self.size)

    def dirty_bytes(self) -> int:
        """Their size."""
        return sum(count for _, count in self.dirty()) * PAGE

    async def disk_written(self) -> bool:
        """True if the guest has written to the top layer since this was last noted with `note_disk`."""
        return await self._bytes_written() != self.written

    async def _bytes_written(self) -> int:
        for device in await self.qmp("query-blockstats"):
            if DISK_DEVICE in device.get("qdev", ""):
                stats = device["stats"]
                return int(stats["wr_operations"]) + int(stats["unmap_operations"])
        raise SandboxError(f"box {self.box!r}: QEMU does not know its disk {DISK_DEVICE!r}")

    async def add_layer(self) -> None:
        """Prepare the next layer beside the one in use (the guest runs)."""
        path = self.layer_path(self.layers + 1)
        await asyncio.to_thread(blank_layer, self.machine.blank, path, self.uid)
        await self.qmp("blockdev-add", **layer(path, node_name(self.layers + 1), None))
        self.prepared = True

    def layer_path(self, number: int) -> Path:
        """The file of a layer that this process writes or has written."""
        return self.directory / f"disk.{number}.qcow2"

    async def freeze_layer(self) -> None:
        """Put the prepared layer over the one in use, which never changes again."""
        await self.qmp("blockdev-snapshot", node=node_name(self.layers), overlay=node_name(self.layers + 1))
        self.prepared = False
        self.frozen.append(self.layer_path(self.layers))
        self.layers += 1
        self.written = await self._bytes_written()

    async def drop_layer(self) -> None:
        """The prepared layer was not needed."""
        if not self.prepared:
            return
        self.prepared = False
        await self.qmp("blockdev-del", **{"node-name": node_name(self.layers + 1)})
        self.layer_path(self.layers + 1).unlink(missing_ok=True)

    def why(self) -> str:
        text = self.console.text()
        if "Kernel panic" in text:
            line = next(line for line in text.splitlines() if "Kernel panic" in line)
            return f"the guest's kernel panicked: {line.partition('Kernel panic - not syncing: ')[2].strip()}"
        return "the guest powered off" if self.process.exit_code == 0 else super().why()


def blank_layer(source: Path, target: Path, uid: int | None) -> None:
    """A new empty layer that the machine's user can write."""
    shutil.copyfile(source, target)
    if uid is not None:
        os.chown(target, uid, uid)


__all__ = ["Console", "Vm", "blank_layer"]
