"""The guest's kernel: a tiny one built from Debian's source in minutes, or Debian's own in seconds."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import subprocess
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from perilune.sandbox.assets import SOURCES, Assets, Kernel
from perilune.sandbox.cpio import initrd
from perilune.sandbox.errors import Unavailable
from perilune.sandbox.packages import KERNEL_BUILD, Apt, Progress, missing, require

CONFIG = SOURCES / "guest" / "kernel.config"
TINY_SOURCE = "linux-source-6.1"
STOCK = r"linux-image-6\.12\.[0-9.]+\+deb\d+-cloud-amd64"
# In the order of loading; everything else that a guest needs is built into Debian's kernel for clouds.
STOCK_MODULES = (
    *("virtio_mmio", "virtio_blk", "squashfs", "overlay"),
    *("failover", "net_failover", "virtio_net", "virtio-rng"),
)


def cache() -> Path:
    """Where built kernels are kept for every root directory of this user."""
    given = os.environ.get("XDG_CACHE_HOME") or ("/var/cache" if os.geteuid() == 0 else Path.home() / ".cache")
    return Path(given) / "perilune" / "sandbox"


def cached_tiny() -> Path | None:
    """The tiny kernel of the present configuration, if it was built before."""
    path = _tiny_path()
    return path if path.exists() else None


def _tiny_path() -> Path:
    key = hashlib.blake2b(CONFIG.read_bytes() + TINY_SOURCE.encode(), digest_size=8).hexdigest()
    return cache() / f"vmlinux-{key}"


def install(assets: Assets, name: str, apt: Apt, progress: Progress) -> Kernel:
    """Put a kernel and the initial RAM disk that goes with it into the assets."""
    modules: dict[str, bytes]
    if name == "tiny":
        image, modules = cached_tiny() or _build_tiny(apt, progress), {}
        kernel = Kernel("tiny", TINY_SOURCE, acpi=False, least_memory_mib=64)
    elif name == "stock":
        image, modules, version = _stock(apt, progress)
        kernel = Kernel("stock", version, acpi=True, least_memory_mib=256)
    else:
        raise ValueError(f"kernel is {name!r}; it must be 'tiny' or 'stock'")
    new = assets.directory / "kernel.new"
    shutil.copyfile(image, new)
    new.chmod(0o444)
    archive = initrd(assets.directory / "agent", modules)
    kernel = replace(kernel, initrd=hashlib.blake2b(archive, digest_size=8).hexdigest())
    (assets.directory / "initrd").write_bytes(archive)
    new.rename(assets.directory / "kernel")
    (assets.directory / "kernel.json").write_text(json.dumps(asdict(kernel)))
    return kernel


def _build_tiny(apt: Apt, progress: Progress) -> Path:
    source = Path("/usr/src") / f"{TINY_SOURCE}.tar.xz"
    packages = missing(KERNEL_BUILD)
    if not source.exists():
        packages.append(TINY_SOURCE)
    if not Path("/usr/include/gelf.h").exists():
        packages.append("libelf-dev")
    if packages:
        apt.install(packages, progress)
    with tempfile.TemporaryDirectory(prefix="perilune-kernel-") as place:
        progress("unpacking the kernel's source")
        _run(["tar", "-xf", str(source)], Path(place))
        tree = Path(place) / TINY_SOURCE
        _run(["make", "-s", "tinyconfig"], tree)
        _run(["scripts/kconfig/merge_config.sh", "-m", ".config", str(CONFIG)], tree)
        _run(["make", "-s", "olddefconfig"], tree)
        jobs = str(os.cpu_count() or 1)
        progress(f"building the kernel with {jobs} jobs; this takes about four minutes on two cores, once")
        _run(["make", "-s", f"-j{jobs}", "vmlinux"], tree)
        target = _tiny_path()
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_suffix(".new")
        _run([require("strip"), "-s", "-o", str(new), "vmlinux"], tree)
        new.rename(target)
    return target


def _stock(apt: Apt, progress: Progress) -> tuple[Path, dict[str, bytes], str]:
    place = cache() / "stock"
    packages = sorted(place.glob("linux-image-*.deb"))
    package = packages[-1] if packages else apt.download(apt.newest(STOCK, progress), place, progress)
    tree = place / package.stem
    if not (tree / "complete").exists():
        progress(f"unpacking {package.name}")
        _run(["dpkg-deb", "-x", str(package), str(tree)], place)
        (tree / "complete").touch()
    image = next((tree / "boot").glob("vmlinuz-*"))
    modules = {}
    for name in STOCK_MODULES:
        found = [*tree.rglob(f"{name}.ko.xz"), *tree.rglob(f"{name}.ko")]
        if not found:
            raise Unavailable(f"{package.name} has no module {name}")
        data = found[0].read_bytes()
        modules[name] = lzma.decompress(data) if found[0].suffix == ".xz" else data
    return image, modules, image.name.partition("-")[2]


def _run(command: list[str], cwd: Path) -> None:
    run = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if run.returncode:
        raise Unavailable(f"{' '.join(command[:3])}: {(run.stderr or run.stdout).strip()[-500:]}")


__all__ = ["cached_tiny", "install"]
