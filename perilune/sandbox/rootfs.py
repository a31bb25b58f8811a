"""Root file systems: busybox, Python by debootstrap, or any directory, packed into squashfs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from perilune.sandbox.assets import DISK_MIB, Assets, Template
from perilune.sandbox.errors import Unavailable
from perilune.sandbox.image_config import ImageConfig
from perilune.sandbox.kernel import cache
from perilune.sandbox.packages import DEBOOTSTRAP, Apt, Progress, missing, require

BUSYBOX_MIB = 128
PYTHON_MIB = 512
_FOLDERS = ("bin", "sbin", "etc", "proc", "sys", "dev", "run", "tmp", "root", "var", "usr/bin", "usr/sbin", "lib")
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"
_GROUP = "root:x:0:\nnogroup:x:65534:\n"
_PYTHON_PACKAGES = ("python3", "iproute2", "procps", "ca-certificates")
# Not needed to run programs, and a third of the size.
_DROP = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "var/cache/apt", "var/lib/apt/lists")


def busybox(assets: Assets, progress: Progress) -> Template:
    """The smallest template: one program with many names."""
    progress("template busybox")
    with tempfile.TemporaryDirectory(prefix="perilune-root-") as place:
        root = Path(place) / "root"
        for folder in _FOLDERS:
            (root / folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(require("busybox"), root / "bin" / "busybox")
        names = subprocess.run([root / "bin" / "busybox", "--list"], capture_output=True, text=True, check=True)
        for name in names.stdout.split():
            if name != "busybox":
                (root / "bin" / name).symlink_to("/bin/busybox")
        _write_identity(root)
        return pack(assets, "busybox", root, BUSYBOX_MIB)


def python(assets: Assets, apt: Apt, progress: Progress) -> Template:
    """Debian's smallest system with Python. It is kept beside the built kernels, for other root directories."""
    release, site = apt.release(progress)
    recipe = " ".join((release, *_PYTHON_PACKAGES, *_DROP))
    kept = cache() / f"python-{hashlib.blake2b(recipe.encode(), digest_size=8).hexdigest()}.squashfs"
    if not kept.exists():
        _debootstrap(kept, release, site, apt, progress)
    directory = assets.root / "templates"
    directory.mkdir(parents=True, exist_ok=True, mode=0o711)
    image = directory / ".python.squashfs"
    shutil.copyfile(kept, image)
    return assets.add_template("python", image, PYTHON_MIB)


def _debootstrap(target: Path, release: str, site: str, apt: Apt, progress: Progress) -> None:
    if os.geteuid() != 0:
        raise Unavailable("template python: debootstrap needs root")
    packages = missing(DEBOOTSTRAP)
    if packages:
        apt.install(packages, progress)
    progress(f"template python: debootstrap {release}")
    with tempfile.TemporaryDirectory(prefix="perilune-root-") as place:
        root = Path(place) / "root"
        include = f"--include={','.join(_PYTHON_PACKAGES)}"
        command = [require("debootstrap"), "--variant=minbase", include, release, str(root), site]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise Unavailable(f"debootstrap: {(run.stderr or run.stdout).strip()[-500:]}")
        for folder in _DROP:
            shutil.rmtree(root / folder, ignore_errors=True)
        for name in ("hostname", "resolv.conf"):  # this host's
            (root / "etc" / name).unlink(missing_ok=True)
        _write_identity(root)
        new = Path(place) / "image"
        _squash(root, new)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(new, target.with_suffix(".new"))
        target.with_suffix(".new").rename(target)


def _write_identity(root: Path) -> None:
    for name, text in (("passwd", _PASSWD), ("group", _GROUP), ("machine-id", ""), ("resolv.conf", "")):
        path = root / "etc" / name
        if not path.exists() or name == "machine-id":
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


def pack(
    assets: Assets,
    name: str,
    root: Path,
    memory_mib: int,
    disk_mib: int = DISK_MIB,
    config: ImageConfig | None = None,
) -> Template:
    """Make a template of any directory that holds a root file system with a shell at /bin/sh."""
    shell = root / "bin" / "sh"
    if not (shell.is_symlink() or shell.exists()):
        raise ValueError(f"{root} is no root file system: it has no /bin/sh")
    directory = assets.root / "templates"
    directory.mkdir(parents=True, exist_ok=True, mode=0o711)
    image = directory / f".{name}.squashfs"
    image.unlink(missing_ok=True)
    _squash(root, image)
    return assets.add_template(name, image, memory_mib, disk_mib, config)


def _squash(root: Path, image: Path) -> None:
    command = [require("mksquashfs"), str(root), str(image), "-comp", "lz4", "-no-progress", "-quiet"]
    if os.geteuid() != 0:
        command.append("-all-root")  # what another user has unpacked belongs to that user here, and to root there
    run = subprocess.run([*command, "-e", "lost+found"], capture_output=True, text=True, check=False)
    if run.returncode:
        raise Unavailable(f"mksquashfs: {run.stderr.strip()[-500:]}")


__all__ = ["busybox", "pack", "python"]
