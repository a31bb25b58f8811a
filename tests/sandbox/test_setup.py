"""Doctor, setup's parts, and the SDK without asyncio."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from perilune.sandbox import Assets, Manager, NotFound, SyncSandbox, Unavailable, state_root
from perilune.sandbox.assets import Kernel
from perilune.sandbox.counter import counter_khz
from perilune.sandbox.cpio import initrd
from perilune.sandbox.doctor import choose_accelerator, examine, probe_boot
from perilune.sandbox.fake import FakeDriver
from perilune.sandbox.packages import PROGRAMS, QEMU_VERSION, find, missing, qemu_version
from perilune.sandbox.rootfs import pack
from perilune.sandbox.setup import setup
from perilune.sandbox.sync import run as run_in_loop
from tests.sandbox.worlds import run


def test_doctor(qemu_assets: Assets) -> None:
    """Every check has a name and says something; emulation boots; what cannot work here has a reason."""
    checks = {check.name: check for check in run(examine(qemu_assets))}
    assert checks["qemu"].works
    assert checks["assets"].works
    assert checks["qemu with tcg"].works, checks["qemu with tcg"].detail
    assert all(check.detail for check in checks.values())
    assert list((qemu_assets.root / "boxes").iterdir()) == []
    if not checks["qemu with kvm"].works:
        assert not checks["firecracker"].works
        assert run(choose_accelerator(qemu_assets)) == "tcg"


def test_doctor_without_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed: each line says what would help, and nothing is made."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("perilune.sandbox.packages._SEARCH", str(tmp_path))
    root = tmp_path / "root"
    checks = {check.name: check for check in run(examine(Assets(root)))}
    assert not checks["qemu"].works
    assert "setup" in checks["qemu"].detail
    assert not checks["assets"].works
    assert "qemu with tcg" not in checks
    assert set(missing(PROGRAMS)) == set(PROGRAMS.values())
    with pytest.raises(Unavailable, match="setup"):
        Assets(root).kernel()
    with pytest.raises(NotFound, match="none yet"):
        Assets(root).template("busybox")


def test_a_probe_of_a_kernel_that_does_not_boot(qemu_assets: Assets) -> None:
    """Said within its time limit, with the process's own words."""
    assets = Assets(Path("/tmp") / f"perilune-test-{os.getpid()}")
    assets.directory.mkdir(parents=True, mode=0o711)
    try:
        for path in qemu_assets.directory.iterdir():
            (assets.directory / path.name).symlink_to(path)
        (assets.root / "templates").symlink_to(qemu_assets.root / "templates")
        (assets.directory / "kernel").unlink()
        (assets.directory / "kernel").write_bytes(b"\x7fELF but no kernel")
        check = run(probe_boot(assets, "tcg"))
        assert not check.works
        # It ends before or after it was asked for the first time, which is two sentences.
        assert "could not be started" in check.detail or "its process ended with 1" in check.detail
    finally:
        shutil.rmtree(assets.root)


def test_setup_refuses_what_it_cannot_build(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="busybox, python"):
        setup(Assets(tmp_path), print, templates=("debian",))
    with pytest.raises(ValueError, match="no /bin/sh"):
        pack(Assets(tmp_path), "empty", tmp_path, 128)
    with pytest.raises(ValueError, match="letters"):
        Assets(tmp_path).add_template("../evil", tmp_path, 128)


def test_sizes_are_checked(fake_root: Assets) -> None:
    template = fake_root.template("busybox")
    with pytest.raises(ValueError, match="memory_mib is 8"):
        fake_root.machine(template, memory_mib=8)
    with pytest.raises(ValueError, match="disk_mib is 1"):
        fake_root.machine(template, disk_mib=1)
    kernel = Kernel("stock", "6.12", True, 256)
    (fake_root.directory / "kernel.json").write_text(json.dumps(kernel.__dict__))
    assert fake_root.machine(template).memory_mib == 256
    assert fake_root.machine(template).acpi


def test_versions() -> None:
    """QEMU's is read as numbers; one that is too old counts as missing."""
    program = find("qemu-system-x86_64")
    if program is None:
        pytest.skip("QEMU is not installed")
    assert len(qemu_version(program)) == 3
    assert ("qemu-system-x86" in missing({"qemu-system-x86_64": "qemu-system-x86"})) == (
        qemu_version(program) < QEMU_VERSION
    )


def test_an_initrd_is_a_cpio_archive(tmp_path: Path) -> None:
    """Names, sizes and padding, read back by the format's own rules."""
    agent = tmp_path / "agent"
    agent.write_bytes(b"program")
    data = initrd(agent, {"b": b"xyz", "a": b""})
    found = {}
    at = 0
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name = data[at + 110 : at + 110 + fields[11] - 1].decode()
        body = -(-(at + 110 + fields[11]) // 4) * 4
        found[name] = data[body : body + fields[6]]
        at = -(-(body + fields[6]) // 4) * 4
        if name == "TRAILER!!!":
            break
    assert at == len(data)
    assert found["init"] == b"program"
    # Modules are loaded in the order that was given, not that of their names.
    assert [name for name in found if name.startswith("modules/")] == ["modules/00-b.ko", "modules/01-a.ko"]


def test_the_counter_is_steady() -> None:
    """Two measurements agree to a part in ten thousand."""
    if not find("qemu-system-x86_64"):
        pytest.skip("an x86 processor's counter")
    first = counter_khz.__wrapped__()
    assert abs(counter_khz.__wrapped__() - first) < first / 10_000


def test_where_things_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PERILUNE_SANDBOX", str(tmp_path))
    assert state_root() == tmp_path
    monkeypatch.delenv("PERILUNE_SANDBOX")
    assert state_root().name == "sandbox"


def test_without_asyncio(fake_root: Assets) -> None:
    """The same calls, blocking, from a thread without a loop."""
    manager = run_in_loop(Manager.open(fake_root, FakeDriver()))
    try:
        with SyncSandbox.create(manager=manager) as box:
            assert box.exec("echo hi").text == "hi\n"
            box.write("/f", "1")
            snapshot = box.checkpoint()
            box.pause()
            box.resume()
            (kid,) = box.fork(1)
            assert kid.read("/f") == b"1"
            kid.kill()
            box.rollback(snapshot)
            box.keep_alive(10)
            assert box.stats().pss >= 0
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
    finally:
        run_in_loop(manager.close())
