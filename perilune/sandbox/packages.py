"""Programs from Debian's packages: what is here, and how `setup` brings what is not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from perilune.sandbox.errors import Unavailable

# The first QEMU whose incoming migration reads from a file, and which maps a read-only image privately.
QEMU_VERSION = (8, 2)
# program -> package
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mksquashfs": "squashfs-tools",
    "mke2fs": "e2fsprogs",
    "busybox": "busybox-static",
    "gcc": "gcc",
    "nft": "nftables",
    "ip": "iproute2",
}
DEBOOTSTRAP = {"debootstrap": "debootstrap"}
KERNEL_BUILD = {"strip": "binutils", "make": "make", "flex": "flex", "bison": "bison", "bc": "bc"}
_SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

Progress = Callable[[str], None]


def find(program: str) -> str | None:
    """A program's path, also in the directories of administration."""
    return shutil.which(program) or shutil.which(program, path=_SEARCH)


def require(program: str) -> str:
    """A program's path, or `Unavailable` with the package that has it."""
    path = find(program)
    if path is None:
        package = {**PROGRAMS, **DEBOOTSTRAP, **KERNEL_BUILD}.get(program, program)
        raise Unavailable(f"{program} is not installed (package {package}); `perilune sandbox setup` brings it")
    return path


def qemu_version(program: str) -> tuple[int, ...]:
    """The version of a QEMU program; empty if it does not say."""
    text = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"version (\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else ()


def missing(programs: dict[str, str]) -> list[str]:
    """Packages of programs that are not here; QEMU counts as missing where it is too old."""
    packages = []
    for program, package in programs.items():
        path = find(program)
        if path is None or (program.startswith("qemu-system") and qemu_version(path) < QEMU_VERSION):
            packages.append(package)
    return packages


@dataclass(frozen=True)
class Apt:
    """apt-get with a list of sources of our own beside the system's, which stay as they are."""

    directory: Path

    def install(self, packages: Sequence[str], progress: Progress) -> None:
        """Install packages; QEMU from backports where the release's own is too old."""
        if os.geteuid() != 0:
            raise Unavailable(f"not root: install these packages first: {' '.join(packages)}")
        options = self.options(progress)
        release = ["-t", f"{_codename()}-backports"] if "qemu-system-x86" in packages and self._backports() else []
        progress(f"installing {' '.join(packages)}")
        self._run(["install", "--yes", "--no-install-recommends", *release, *packages], options)

    def download(self, package: str, into: Path, progress: Progress) -> Path:
        """Fetch one package's file without installing it."""
        options = self.options(progress)
        progress(f"downloading {package}")
        into.mkdir(parents=True, exist_ok=True)
        self._run(["download", package], options, cwd=into)
        return max(into.glob(f"{package}_*.deb"), key=lambda path: path.stat().st_mtime)

    def newest(self, pattern: str, progress: Progress) -> str:
        """The highest of the package names that match a regular expression."""
        options = self.options(progress)
        text = subprocess.run(["apt-cache", *options, "pkgnames"], capture_output=True, text=True, check=True).stdout
        names = [name for name in text.split() if re.fullmatch(pattern, name)]
        if not names:
            raise Unavailable(f"no package matches {pattern}")
        return max(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])

    def release(self, progress: Progress) -> tuple[str, str]:
        """The name of the system's Debian release and its mirror."""
        self.options(progress)
        text = (self.directory / "debian.sources").read_text()
        match = re.search(rf"URIs: (\S+)\nSuites: {_codename()}\n", text)
        assert match is not None
        return _codename(), match[1]

    def options(self, progress: Progress) -> list[str]:
        """Arguments for apt; brings the lists up to date once."""
        self.directory.mkdir(parents=True, exist_ok=True)
        sources = self.directory / "debian.sources"
        (self.directory / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        options = ["-o", f"Dir::Etc::sourcelist={sources}", "-o", "Dir::Etc::sourceparts=-"]
        options += ["-o", f"Dir::State::lists={self.directory / 'lists'}", "-o", "APT::Sandbox::User=root"]
        if not sources.exists():
            sources.write_text(_sources())
            progress("reading the lists of packages")
            self._run(["update"], options)
        return options

    def _backports(self) -> bool:
        return f"{_codename()}-backports" in (self.directory / "debian.sources").read_text()

    def _run(self, arguments: Sequence[str], options: Sequence[str], cwd: Path | None = None) -> None:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
        run = subprocess.run(
            ["apt-get", *options, *arguments], capture_output=True, text=True, env=environment, cwd=cwd, check=False
        )
        if run.returncode:
            last = [line for line in (run.stderr + run.stdout).splitlines() if line.startswith("E:")]
            raise Unavailable(f"apt-get {' '.join(arguments)}: {' '.join(last) or run.stderr[-300:]}")


def _codename() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip('"')
    raise Unavailable("/etc/os-release names no Debian release (VERSION_CODENAME)")


def _sources() -> str:
    """The system's own Debian mirrors, and backports from the same one."""
    codename = _codename()
    listing = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE) $(RELEASE) $(COMPONENT)"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    sites = sorted({tuple(line.split()[:2]) for line in listing.splitlines() if line.count(" ") == 2})
    wanted = [(site, release) for site, release in sites if release.split("-")[0] == codename]
    main = [site for site, release in wanted if release == codename]
    if not main:
        raise Unavailable(f"apt has no source for {codename}; `setup` takes its packages from Debian")
    wanted.append((main[0], f"{codename}-backports"))
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    return "\n".join(
        f"Types: deb\nURIs: {site}\nSuites: {release}\nComponents: main\nSigned-By: {key}\n" for site, release in wanted
    )


__all__ = ["DEBOOTSTRAP", "KERNEL_BUILD", "PROGRAMS", "QEMU_VERSION", "Apt", "Progress", "find", "missing", "require"]
