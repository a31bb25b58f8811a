"""The Firecracker driver's requests against the real program; nothing here waits for a guest to boot."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from perilune.sandbox import Assets, Network, SandboxError, Terminal, Unavailable
from perilune.sandbox.agent import Agent
from perilune.sandbox.driver import Image
from perilune.sandbox.firecracker import FirecrackerDriver, _Vm
from perilune.sandbox.firecracker_api import Api, find_binary
from perilune.sandbox.firecracker_requests import boot_requests, load_request
from perilune.sandbox.spawn import Spawned
from perilune.sandbox.wire import Frame, Parser, frame
from tests.sandbox.worlds import run


def test_every_request_of_a_boot_is_accepted(firecracker: Path, qemu_assets: Assets, place: Path) -> None:
    """The configuration is what was sent; only the start itself is left out."""
    machine = qemu_assets.machine(qemu_assets.template("busybox"), memory_mib=256, disk_mib=64)
    (place / "root.squashfs").symlink_to(machine.root)
    (place / "disk.raw").write_bytes(bytes(1 << 20))

    async def test() -> None:
        process = Spawned([str(firecracker), "--api-sock", "api.sock"], place / "log", (), cwd=place)
        try:
            api = Api(place / "api.sock")
            await api.started(process.gone)
            for path, body in boot_requests(machine)[:-1]:
                await api("PUT", path, body)
            config = await api("GET", "/vm/config")
            assert config["machine-config"]["mem_size_mib"] == 256
            assert config["machine-config"]["track_dirty_pages"] is True
            assert [drive["drive_id"] for drive in config["drives"]] == ["root", "disk"]
            assert config["vsock"]["uds_path"] == "v.sock"
            with pytest.raises(SandboxError, match="snapshot/load"):
                await api("PUT", "/snapshot/load", load_request("1.12.1", place / "none", place / "none"))
            with pytest.raises(SandboxError, match="no-such"):
                await api("GET", "/no-such")
        finally:
            await process.kill()
        with pytest.raises(SandboxError, match="socket"):
            await api("GET", "/version")

    run(test())


def test_the_driver_without_a_guest(firecracker: Path, qemu_assets: Assets, place: Path) -> None:
    """Version and format; a guest that does not answer in time; a snapshot that is none: said in time, nothing left."""
    if qemu_assets.kernel().name != "tiny":
        pytest.skip("needs the tiny kernel")

    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    before = children()

    async def test() -> None:
        driver = FirecrackerDriver(qemu_assets.confine, firecracker)
        machine = qemu_assets.machine(qemu_assets.template("busybox"), disk_mib=64)
        assert (await driver.format(machine))["version"] == "1.12.1"
        started = time.monotonic()

        async def boot() -> None:
            handle = await driver.start("box", machine, place / "box", Network())
            await driver.wait_ready(handle, 0.3)

        with pytest.raises(Terminal):
            await boot()
        (place / "state").write_bytes(b"no snapshot")
        (place / "memory").write_bytes(bytes(4096))
        image = Image(place / "memory", place / "state", ())
        with pytest.raises(Terminal, match="snapshot"):
            await driver.resume("other", machine, image, place / "other", Network())
        assert time.monotonic() - started < 20
        assert driver.vms == {}
        with pytest.raises(Unavailable, match="no networks"):
            await driver.start("box", machine, place / "third", Network(allow=("1.1.1.1",)))
        assert children() <= before

    run(test())


def test_connections_that_a_reset_meets_are_made_again(fake_root: Assets, place: Path) -> None:
    """One is closed before it is accepted, one accepted and never heard of again, one ended after its first bytes."""
    directory = place / "box"
    directory.mkdir()
    seen: list[bytes] = []

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(seen)
        seen.append(await reader.readline())
        if number > 0:
            writer.write(b"OK 1073741824\n")
            kind, stream, body = next(iter(Parser().feed(await reader.readexactly(36))))
            assert (kind, stream) == (Frame.HELLO, 0)
            if number == 1:
                await reader.read()  # until the host gives up
            if number == 3:
                writer.write(frame(Frame.HELLO, 0, body))
                await reader.read()
        writer.close()

    async def test() -> None:
        driver = FirecrackerDriver(fake_root.confine, Path(sys.executable))
        machine = fake_root.machine(fake_root.template("busybox"))
        process = Spawned(["/bin/sleep", "60"], place / "log", ())
        agent = Agent("box")
        vm = _Vm("box", 1, machine, directory, process, agent, Api(directory / "api.sock"), 0)
        try:
            with pytest.raises(Terminal, match=r"within 0\.3 s"):  # nobody is there yet
                await driver._connect(vm, 0.3, new=False, clean=True)
            async with await asyncio.start_unix_server(guest, directory / "v.sock"):
                started = time.monotonic()
                await driver._connect(vm, 20.0, new=False, clean=True)
                assert seen == [b"CONNECT 5000\n"] * 4
                assert time.monotonic() - started < 10
                await agent.detach()
        finally:
            await process.kill()

    run(test())


def test_names_by_version() -> None:
    """The flag of tracked pages changed its name."""
    assert "enable_diff_snapshots" in load_request("1.12.1", Path("s"), Path("m"))
    assert "track_dirty_pages" in load_request("1.13.0", Path("s"), Path("m"))


def test_a_binary_of_another_checksum_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIRECRACKER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert find_binary(tmp_path) is None
    (tmp_path / "firecracker").write_bytes(b"something else")
    assert find_binary(tmp_path) is None
    with pytest.raises(Unavailable, match="FIRECRACKER"):
        FirecrackerDriver(tmp_path, tmp_path / "none")
