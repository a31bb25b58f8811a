"""Starting a virtual machine's process: unprivileged, in namespaces of its own, under limits, never outliving us."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Above what distributions give to people and services; one user for each machine that runs.
FIRST_UID = 610_000
# What a dynamically linked program opens before it is our turn.
_PROGRAM_FILES = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom")

# Nothing of ours, and one heap for all threads.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Confinement:
    """What one process may do. uid: None keeps the caller's (who is not root then). Sizes in bytes.

    readable, writable: files and directories; nothing else can be opened. network: path of a network namespace to
    enter instead of a new empty one.
    """

    uid: int | None
    file_size: int
    address_space: int
    readable: tuple[Path, ...]
    writable: tuple[Path, ...]
    network: str = "-"
    open_files: int = 256


def confined(program: Path, command: Sequence[str], limits: Confinement) -> list[str]:
    """`command` behind host/confine.c, which sets the limits and becomes it. program: confine, compiled by setup."""
    numbers = (-1 if limits.uid is None else limits.uid, limits.file_size, limits.address_space, limits.open_files)
    arguments = [str(program), *map(str, numbers), limits.network]
    for path in (*map(Path, _PROGRAM_FILES), *limits.readable):
        if path.exists():
            arguments += ["-r", str(path)]
    for path in (Path(os.devnull), *limits.writable):
        arguments += ["-w", str(path)]
    return [*arguments, "--", *command]


class Spawned:
    """A child process that is waited for without threads: `gone` is set as soon as it has ended.

    libraries: where its dynamic linker looks first.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        fds: Sequence[int],
        cwd: Path = Path("/"),
        libraries: Path | None = None,
    ) -> None:
        env = ENVIRONMENT if libraries is None else {**ENVIRONMENT, "LD_LIBRARY_PATH": str(libraries)}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=fds, cwd=cwd, env=env
            )
        self.pid = self._process.pid
        self.gone = asyncio.Event()
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # out of descriptors: a process that nobody can wait for must not be left
            self._process.kill()
            self._process.wait()
            raise
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        self._process.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.gone.set()

    @property
    def exit_code(self) -> int | None:
        """As subprocess has it: negative for a signal, None while it runs."""
        return self._process.returncode

    async def kill(self) -> None:
        """End it and return when it is gone."""
        if not self.gone.is_set():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            await self.gone.wait()


def end_orphans(root: Path) -> list[str]:
    """Kill every process whose command line names a directory under `root`, and wait; returns the directories' names.

    Only processes that look like ours do: a virtual machine started with `-name sandbox`.
    """
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # Opened first: what is read then is of the process that is killed, not of an earlier one of its number.
            pidfd = os.pidfd_open(int(entry.name))
            try:
                box = _box_of(entry, root)
                if box is not None:
                    found.add(box)
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    waiting = select.poll()
                    waiting.register(pidfd, select.POLLIN)
                    waiting.poll(10_000)
            finally:
                os.close(pidfd)
    return sorted(found)


def _box_of(process: Path, root: Path) -> str | None:
    arguments = (process / "cmdline").read_bytes().split(b"\0")
    if b"sandbox" not in arguments:
        return None
    # QEMU has its disk among its arguments, Firecracker runs in its directory.
    text = b" ".join(arguments) + b" " + os.fsencode(os.readlink(process / "cwd")) + b"/disk."
    match = re.search(re.escape(os.fsencode(root)) + rb"/([^/ ]+)/disk\.", text)
    return match[1].decode() if match else None


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> tuple[int, int, int]:
    """(proportional, private, shared) bytes of a process."""
    values = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) << 10
    private = values["Private_Clean"] + values["Private_Dirty"]
    return values["Pss"], private, values["Shared_Clean"] + values["Shared_Dirty"]


__all__ = ["FIRST_UID", "Confinement", "Spawned", "confined", "cpu_seconds", "end_orphans", "memory_of"]
