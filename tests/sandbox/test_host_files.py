"""Files and processes of the host that somebody else can change, cut, fill or leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perilune.sandbox import Assets, BadSnapshot, Exhausted, Network, SandboxError
from perilune.sandbox import firecracker as firecracker_driver
from perilune.sandbox.firecracker import FirecrackerDriver
from perilune.sandbox.layers import Layers
from perilune.sandbox.packages import find
from perilune.sandbox.pages import PAGE, lay_over, open_layer, write_layer
from perilune.sandbox.plain import STATE_MAX, read_plain, take_state
from perilune.sandbox.qmp import Qmp
from perilune.sandbox.sparse import copy_sparse, fill_holes
from perilune.sandbox.spawn import Spawned, end_orphans
from tests.sandbox.worlds import run

# What a machine's own process may have put in the place of its files


def test_only_plain_files_of_a_machine_are_read(tmp_path: Path) -> None:
    """No link is followed, no pipe waited for, no more read than was asked for."""
    secret, link, pipe, log = (tmp_path / name for name in ("secret", "link", "pipe", "log"))
    secret.write_text("secret")
    link.symlink_to(secret)
    os.mkfifo(pipe)
    for path in (link, pipe, tmp_path):
        with pytest.raises((SandboxError, OSError)):
            read_plain(path, 10)
        with pytest.raises(OSError, match=r"link|plain|directory"):
            copy_sparse(path, tmp_path / f"copy-{path.name}")
    log.write_bytes(b"0123456789abcdef")
    assert read_plain(log, 10) == b"0123456789"
    with log.open("ab") as file:
        file.truncate(STATE_MAX + 1)
    with pytest.raises(SandboxError, match="has not"):
        take_state(log, tmp_path / "taken")
    assert not (tmp_path / "taken").exists()


def test_a_file_that_is_cut_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, and not a copy that never ends."""
    source = tmp_path / "source"
    write_layer(source, 16 * PAGE, [(0, 8)], [bytes([7]) * PAGE * 8])
    layer = open_layer(source)
    copy, cut = os.copy_file_range, []

    def cutting(*given: Any) -> int:
        if not cut:
            os.truncate(source, 2 * PAGE)
        cut.append(given)
        assert len(cut) < 100, "it goes on for ever"
        return copy(*given)

    monkeypatch.setattr(os, "copy_file_range", cutting)
    with pytest.raises(OSError, match="cut while it was copied"):
        copy_sparse(source, tmp_path / "copy")
    with (tmp_path / "image").open("wb") as image, pytest.raises(BadSnapshot, match="cut while it was read"):
        lay_over(layer, image.fileno())


# Memory that is mapped from a file system in memory


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """24 MiB."""
    path = tmp_path / "tmpfs"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a file system of its own needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


TOUCH = """
import mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=3) as memory:
    for at in range(0, len(memory), 4096):
        memory[at] = 1
"""


def fill(place: Path) -> None:
    with (place / "filling").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    assert os.statvfs(place).f_bavail == 0


def test_a_machine_does_not_die_of_a_full_tmpfs(tmpfs: Path, tmp_path: Path) -> None:
    """Reading a hole of a file takes room there: an image has all of its room before it is mapped, or is refused.

    A process that maps the image privately and writes every page is what QEMU is; without the room it dies of SIGBUS.
    """
    size = 16 << 20
    layers = Layers(tmpfs, 1 << 30)
    with layers.staged("one") as staging:
        write_layer(staging / "memory", size, [(3, 4)], [bytes([7]) * PAGE * 4])
        chain, _ = layers.extend(staging / "memory", (), (), staging)
    memory = layers.memory(chain, size, 1)
    holes = tmpfs / "holes"
    holes.touch()
    os.truncate(holes, size)
    fill(tmpfs)
    mapped = [subprocess.run([sys.executable, "-c", TOUCH, path], check=False) for path in (memory.image, holes)]
    assert [done.returncode for done in mapped] == [0, -signal.SIGBUS]
    # The image of another size has no room any more.
    with pytest.raises(Exhausted, match="no room for a memory image of 12 MiB"):
        layers.memory(chain, 12 << 20, 1)
    assert [path.name for path in (tmpfs / "images").iterdir() if ".new" in path.name] == []
    on_disk = tmp_path / "on-disk"
    with on_disk.open("wb") as file:
        file.truncate(size)
        fill_holes(file.fileno(), size)
    if os.statvfs(on_disk).f_fsid != os.statvfs(tmpfs).f_fsid and find("findmnt"):
        kind = subprocess.run(["findmnt", "-nro", "FSTYPE", "-T", on_disk], capture_output=True, text=True, check=True)
        assert kind.stdout.strip() == "tmpfs" or on_disk.stat().st_blocks == 0


# Processes


def test_orphans_are_ended_and_nobody_else(tmp_path: Path) -> None:
    """By their files under our root, however many there are; not by a name alone, nor under another root."""
    wait = "import time, sys; print('up', flush=True); time.sleep(60)"

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", wait, "-name", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    ours = [start("sandbox", f"{tmp_path}/boxes/b{i}/disk.0.qcow2") for i in range(3)]
    others = [start("sandbox", f"{tmp_path}/other/b/disk.0"), start("box", f"{tmp_path}/boxes/b/disk.0")]
    try:
        assert end_orphans(tmp_path / "boxes") == ["b0", "b1", "b2"]
        assert [process.wait(10) for process in ours] == [-9] * 3
        assert [process.poll() for process in others] == [None] * 2
        assert end_orphans(tmp_path / "boxes") == []
    finally:
        for process in (*ours, *others):
            process.kill()
            process.communicate()


def test_a_process_that_cannot_be_waited_for_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors just after it was started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")

    def none_left(pid: int) -> int:
        raise OSError(24, "Too many open files")

    async def test() -> None:
        before = children.read_text().split()
        monkeypatch.setattr(os, "pidfd_open", none_left)
        with pytest.raises(OSError, match="Too many open files"):
            Spawned(["/bin/sleep", "60"], tmp_path / "log", ())
        assert children.read_text().split() == before

    run(test())


def test_copies_of_firecracker_have_users_of_their_own(
    fake_root: Assets, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are started at once; one that cannot be started gives its number back."""

    async def test() -> None:
        driver = FirecrackerDriver(fake_root.confine, Path(sys.executable))
        driver._version = "1.12.1"
        machine = fake_root.machine(fake_root.template("busybox"))
        seen: list[set[int]] = []

        def refuse(*_: object, **__: object) -> None:
            seen.append(set(driver._slots))
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(firecracker_driver, "Spawned", refuse)
        starts = [driver.start(f"b{i}", machine, place / f"b{i}", Network()) for i in range(4)]
        results = await asyncio.gather(*starts, return_exceptions=True)
        assert all(isinstance(result, SandboxError) and "Too many open" in str(result) for result in results)
        assert seen[0] == {0, 1, 2, 3}
        assert driver._slots == set()

    run(test())


def test_a_command_whose_caller_has_gone(tmp_path: Path) -> None:
    """Its answer is its own: the next command waits for it and gets the next one."""

    async def test() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=theirs)

        def say(**message: object) -> None:
            writer.write(json.dumps(message).encode() + b"\n")

        qmp = Qmp()
        say(QMP={})
        say(**{"return": {}})
        await qmp.attach(ours)
        await reader.readline()
        first = asyncio.create_task(qmp("query-status"))
        await reader.readline()
        first.cancel()
        second = asyncio.create_task(qmp("cont"))
        await asyncio.sleep(0)
        say(**{"return": "of the first"})
        assert json.loads(await reader.readline())["execute"] == "cont"
        say(**{"return": "of the second"})
        assert await second == "of the second"
        assert first.cancelled()
        qmp.close()
        writer.close()

    run(test())
