"""What machines are made of, and where it lies: helper programs, kernel, disks, root file systems.

ROOT/assets/confine, lib, initrd, kernel, kernel.json, disk-MIB.raw, blank-MIB.qcow2
ROOT/templates/NAME.json, DIGEST.squashfs
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

from perilune.sandbox.driver import Machine
from perilune.sandbox.errors import NotFound, Unavailable
from perilune.sandbox.image_config import ImageConfig
from perilune.sandbox.packages import require

SOURCES = Path(__file__).parent
DISK_MIB = 1024


@dataclass(frozen=True)
class Template:
    """A root file system, the machine that it asks for, and the defaults of its programs.

    digest: its checksum, and the name of its file.
    """

    name: str
    digest: str
    memory_mib: int
    disk_mib: int = DISK_MIB
    image: ImageConfig = field(default_factory=ImageConfig)

    @classmethod
    def load(cls, path: Path) -> Template:
        """From the file of its name."""
        stored = json.loads(path.read_text())
        return cls(**{**stored, "image": ImageConfig.of(stored.get("image", {}))})

    def save(self, path: Path) -> None:
        """In one step."""
        new = path.with_name(f".{self.name}.new")
        new.write_text(json.dumps({**asdict(self), "image": self.image.plain()}))
        new.rename(path)


@dataclass(frozen=True)
class Kernel:
    """Which kernel is installed. name: "tiny" (built from source) or "stock" (Debian's). acpi: see `Machine`.

    initrd: checksum of what boots with it, our agent: with another one templates are booted anew.
    """

    name: str
    version: str
    acpi: bool
    least_memory_mib: int
    initrd: str = ""


def state_root() -> Path:
    """Where everything lies unless another place is given: $PERILUNE_SANDBOX, or a directory of the user's."""
    given = os.environ.get("PERILUNE_SANDBOX")
    if given:
        return Path(given)
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path("/var/lib/perilune/sandbox") if os.geteuid() == 0 else Path(home) / "perilune" / "sandbox"


@dataclass(frozen=True)
class Assets:
    """The files of one root directory."""

    root: Path

    @property
    def directory(self) -> Path:
        return self.root / "assets"

    @property
    def confine(self) -> Path:
        return self.directory / "confine"

    def kernel(self) -> Kernel:
        """The installed kernel; `Unavailable` before `setup`."""
        path = self.directory / "kernel.json"
        if not path.exists():
            raise Unavailable(f"{self.root} has no kernel yet: run `perilune sandbox setup`")
        return Kernel(**json.loads(path.read_text()))

    def templates(self) -> list[Template]:
        """What `create` can start from, by name."""
        return [Template.load(path) for path in sorted((self.root / "templates").glob("*.json"))]

    def template(self, name: str) -> Template:
        """A template by name."""
        known = {template.name: template for template in self.templates()}
        if name not in known:
            names = ", ".join(known) or "none yet: run `perilune sandbox setup`"
            raise NotFound(f"no template {name!r}; there are: {names}")
        return known[name]

    def add_template(
        self, name: str, image: Path, memory_mib: int, disk_mib: int = DISK_MIB, config: ImageConfig | None = None
    ) -> Template:
        """Take a squashfs file in (it is moved) under a name; an older one of that name stays for its snapshots."""
        if not name or not all(character.isalnum() or character in "-_." for character in name) or name[0] == ".":
            raise ValueError(f"a template's name is {name!r}; it must be of letters, digits, '-', '_' and '.'")
        directory = self.root / "templates"
        directory.mkdir(parents=True, exist_ok=True, mode=0o711)
        with image.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        image.chmod(0o444)
        image.rename(directory / f"{digest}.squashfs")
        template = Template(name, digest, memory_mib, disk_mib, config or ImageConfig())
        template.save(directory / f"{name}.json")
        return template

    def machine(self, template: Template, memory_mib: int | None = None, disk_mib: int | None = None) -> Machine:
        """The machine of a template, with its own size of memory and disk or others."""
        kernel = self.kernel()
        memory = max(memory_mib or template.memory_mib, kernel.least_memory_mib if memory_mib is None else 0)
        if memory < kernel.least_memory_mib or memory > 1 << 20:
            raise ValueError(
                f"memory_mib is {memory}; the {kernel.name} kernel needs {kernel.least_memory_mib} or more"
            )
        disk = self.disk(disk_mib or template.disk_mib)
        root = self.root / "templates" / f"{template.digest}.squashfs"
        identity = f"{template.digest} {kernel.name} {disk.with_suffix('.id').read_text()}"
        return Machine(
            memory_mib=memory,
            disk_mib=disk_mib or template.disk_mib,
            kernel=self.directory / "kernel",
            initrd=self.directory / "initrd",
            root=root,
            disk=disk,
            blank=disk.with_name(f"blank-{disk_mib or template.disk_mib}.qcow2"),
            acpi=kernel.acpi,
            identity=hashlib.blake2b(identity.encode(), digest_size=16).hexdigest(),
        )

    def disk(self, mib: int) -> Path:
        """An empty ext4 disk of a size, and beside it the empty layer of that size; made once."""
        if not 16 <= mib <= 1 << 20:
            raise ValueError(f"disk_mib is {mib}; it must be between 16 and {1 << 20}")
        path = self.directory / f"disk-{mib}.raw"
        if not path.exists():
            new = path.with_suffix(".new")
            with new.open("wb") as file:
                file.truncate(mib << 20)
            # No journal: disk and memory are captured in one instant, there is no recovery that could need it.
            _run(require("mke2fs"), "-q", "-F", "-t", "ext4", "-m", "0", "-O", "^has_journal", str(new))
            blank = path.with_name(f"blank-{mib}.qcow2")
            _run(require("qemu-img"), "create", "-q", "-f", "qcow2", str(blank), f"{mib}M")
            path.with_suffix(".id").write_text(os.urandom(8).hex())
            new.chmod(0o444)
            new.rename(path)
        return path

    def compile(self) -> None:
        """Build the guest agent, the host's `confine` and what stands in for a library of QEMU's from source."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o711)
        libraries = self.directory / "lib"
        libraries.mkdir(exist_ok=True, mode=0o711)
        flags = ["-static", "-Os", "-s", "-Wall", "-Wextra", "-Wno-unused-result"]
        guest = sorted(str(path) for path in (SOURCES / "guest").glob("*.c"))
        _run(require("gcc"), *flags, "-o", str(self.directory / "agent"), *guest)
        _run(require("gcc"), *flags, "-o", str(self.confine), str(SOURCES / "host" / "confine.c"))
        name = "libcapstone.so.4"
        flags = ["-shared", "-fPIC", "-nostdlib", "-Os", "-s", "-Wall", "-Wextra", f"-Wl,-soname,{name}"]
        _run(require("gcc"), *flags, "-o", str(libraries / name), str(SOURCES / "host" / "capstone.c"))


def _run(*command: str) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise Unavailable(f"{Path(command[0]).name}: {(run.stderr or run.stdout).strip()[-500:]}")


__all__ = ["DISK_MIB", "Assets", "Kernel", "Template", "state_root"]
