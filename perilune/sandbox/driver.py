"""What a driver is: the few verbs by which everything above it moves one virtual machine.

A driver knows machines, images and files in a directory it is given. It knows no database, no names, no lifetimes:
those are the manager's. All drivers pass one conformance suite (tests/sandbox/test_conformance.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from perilune.sandbox.errors import SandboxError


class Step(StrEnum):
    """The places of a transition at which a test can hold, fail or kill (see `Gate`)."""

    SPAWNED = "spawned"
    LOADED = "loaded"
    READY = "ready"
    QUIESCED = "quiesced"
    STOPPED = "stopped"
    STATE_SAVED = "state-saved"
    DISK_FROZEN = "disk-frozen"
    MEMORY_COPIED = "memory-copied"
    CONTINUED = "continued"
    WRITTEN = "written"
    COMMITTING = "committing"
    COMMITTED = "committed"
    TORN_DOWN = "torn-down"


# Called at every step with the sandbox's id. A test raises in it, waits in it, or ends the process; others pass.
Gate = Callable[[Step, str], Awaitable[None]]


async def open_gate(step: Step, box: str) -> None:
    """The gate of normal operation."""


@dataclass(frozen=True)
class Network:
    """What a guest may reach. The default is nothing at all, not even the host.

    allow: CIDR blocks, addresses, host names and `*.DOMAIN` (every name below it). deny: blocks taken out of that.
    Private, link-local and host addresses are refused whatever `allow` says, unless `private` is true; the host's own
    even then.
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    private: bool = False


@dataclass(frozen=True)
class Machine:
    """The hardware of a guest. A snapshot can be resumed only on the machine that it was taken from.

    memory_mib: guest memory. disk_mib: size of the writable disk. kernel, initrd: what boots. root: read-only root
    file system (squashfs). disk: the formatted, empty writable disk (raw). blank: a qcow2 layer of its size without
    content. acpi: the kernel finds its devices by ACPI, not by its command line. identity: checksum of what a
    captured guest has open: root and disk.
    """

    memory_mib: int
    disk_mib: int
    kernel: Path
    initrd: Path
    root: Path
    disk: Path
    blank: Path
    acpi: bool = False
    identity: str = ""


@dataclass(frozen=True)
class Image:
    """A captured machine as files that never change: what `resume` and `fork` start from.

    memory: RAM image of the machine's size. patches: captured layers to lay over it, in order, where merging would
    cost more (see layers.py). state: device state. disks: writable layers, oldest first.
    clean: False if the guest may have been reading half a request when it was captured.
    """

    memory: Path
    state: Path
    disks: tuple[Path, ...]
    patches: tuple[Path, ...] = ()
    clean: bool = True


@dataclass(frozen=True)
class Handle:
    """One virtual machine of a driver. `generation` is new for every start: no connection outlives its machine."""

    box: str
    generation: int
    directory: Path
    pid: int | None = None


@dataclass(frozen=True)
class Capture:
    """What one capture found; not yet part of any store. All of it is counted from the machine's start or resume.

    memory: layer file (pages.py) with the pages written since then, in the directory that the capture was given, as
    is `state`. disks: frozen writable layers since then, oldest first, in the machine's directory: they stay as they
    are while it runs. pause_s: seconds in which the guest did not run. dirty_bytes: size of the pages captured.
    idle: no program ran in it (see `Driver.idle`); False if the guest did not say so.
    """

    memory: Path
    state: Path
    disks: tuple[Path, ...]
    pause_s: float
    dirty_bytes: int
    clean: bool = True
    idle: bool = False
    steps_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A program to run in the guest.

    argv: program and arguments; one string is a shell command line; nothing is the program that the template is made
    for. cwd, user: the template's if they are empty ("/" and root where it has none). stdin: what the program reads,
    then the end; with `interactive` its stdin stays open for `Process.write`, without either it is empty. timeout_s:
    the whole process tree is killed after it. max_output: bytes kept of each of stdout and stderr; the rest is dropped
    and said so. pty: one terminal of (rows, columns), interactive, instead of three pipes. detach: no time limit; it
    runs until it ends or is killed.
    """

    argv: str | Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    user: str = ""
    stdin: bytes | None = None
    timeout_s: float = 60.0
    max_output: int = 4 << 20
    pty: tuple[int, int] | None = None
    interactive: bool = False
    detach: bool = False


@dataclass(frozen=True)
class Result:
    """How a program ended: its exit code, or 128 + the signal that ended it."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False

    @property
    def text(self) -> str:
        """stdout as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode(errors="replace")


@dataclass(frozen=True)
class Output:
    """A piece of what a running program printed; `stream` is 1 (stdout or terminal) or 2 (stderr)."""

    stream: int
    data: bytes


class Process(Protocol):
    """A program that runs in the guest."""

    @property
    def pid(self) -> int: ...

    def output(self) -> AsyncIterator[Output]:
        """Pieces in the order of arrival, until the program has ended."""

    async def write(self, data: bytes) -> None:
        """Give bytes to its stdin or terminal."""

    async def close_stdin(self) -> None: ...

    async def resize(self, rows: int, columns: int) -> None: ...

    async def kill(self, signal: int = 9) -> None:
        """Signal the whole process tree, daemons included."""

    async def wait(self) -> Result:
        """Wait for its end. What `output` has not taken is in the result, up to `max_output`."""


@dataclass(frozen=True)
class Stats:
    """What a machine costs now, in bytes: proportional, private and shared memory, pages written since its start."""

    pss: int
    private: int
    shared: int
    dirty: int
    disk: int
    cpu_s: float


@dataclass(frozen=True)
class Capabilities:
    """What `doctor` says about a driver. `reason`: why it does not work, or what is missing; empty if all does."""

    driver: str
    works: bool
    accelerator: str
    version: str
    incremental: bool
    network: bool
    reason: str = ""


# Makes a capture durable; called before the machine that it was taken from is ended.
Commit = Callable[[Capture], Awaitable[None]]


class Driver(Protocol):
    """Verbs of one kind of virtual machine. Every method may raise a `SandboxError` of errors.py.

    Captures raise `Recoverable` (the guest runs again) or `Terminal` (it is torn down), never anything else.
    `cancel` safety: a cancelled call leaves the machine running or torn down, never frozen.
    """

    name: str

    async def probe(self) -> Capabilities:
        """What works here; boots once, with a time limit, where only a boot can tell."""

    async def format(self, machine: Machine) -> Mapping[str, str]:
        """The facts a snapshot of this machine depends on (versions, machine, cpu): equal, or it is refused."""

    async def start(self, box: str, machine: Machine, directory: Path, network: Network) -> Handle:
        """Boot from nothing. Returns when the virtual machine runs, not when its guest answers."""

    async def wait_ready(self, handle: Handle, timeout_s: float) -> None:
        """Return when the guest's agent answers; `Terminal` if it does not in time (the machine is torn down)."""

    async def exec(self, handle: Handle, command: Command) -> Process:
        """Start a program in the guest."""

    async def read(self, handle: Handle, path: str, limit: int) -> bytes:
        """A guest file's bytes; `GuestError` if it is larger than `limit`."""

    async def write(self, handle: Handle, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a guest file in one piece: the old one stays until the new one is whole. Parents are made."""

    async def refresh(self, handle: Handle, hostname: str) -> None:
        """The restore hook: real time, fresh entropy, new machine id and host name. After every resume and fork."""

    async def checkpoint(self, handle: Handle, into: Path) -> Capture:
        """Capture into the empty directory `into`; the guest runs on as soon as its pages are copied."""

    async def pause(self, handle: Handle, into: Path, commit: Commit) -> Capture:
        """Capture, call `commit` while the guest stands, then free its processor and memory.

        If the capture or `commit` fails, the guest runs again and `Recoverable` is raised.
        """

    async def resume(
        self, box: str, machine: Machine, image: Image, directory: Path, network: Network, continues: bool = False
    ) -> Handle:
        """Start a captured machine. Returns when it runs; `refresh` comes next.

        continues: the image is what `pause` captured of this very box: its programs' streams go on.
        """

    async def fork(
        self, boxes: Sequence[str], machine: Machine, image: Image, directories: Sequence[Path], network: Network
    ) -> list[Handle | SandboxError]:
        """One running copy for each id, or the reason why that one could not be made; the others go on."""

    async def merge_disks(self, machine: Machine, disks: Sequence[Path], target: Path) -> None:
        """Write one layer that is all of `disks`, oldest first, over the machine's empty disk."""

    async def set_network(self, handle: Handle, network: Network) -> None:
        """Replace what the guest may reach, in one step: there is no moment without rules."""

    async def idle(self, handle: Handle) -> bool:
        """True if no program runs in the guest besides its agent: then nothing changes but the kernel's clocks."""

    async def stats(self, handle: Handle) -> Stats: ...

    async def ended(self, handle: Handle) -> str:
        """Wait until the machine is gone and say why."""

    async def stop(self, handle: Handle) -> None:
        """End the machine and return when its processes are gone. Calling it again is no error."""

    async def reconcile(self, root: Path) -> list[str]:
        """End every machine under `root` that an earlier service left behind; returns their ids."""


__all__ = [
    "Capabilities",
    "Capture",
    "Command",
    "Commit",
    "Driver",
    "Gate",
    "Handle",
    "Image",
    "Machine",
    "Network",
    "Output",
    "Process",
    "Result",
    "Stats",
    "Step",
    "open_gate",
]
