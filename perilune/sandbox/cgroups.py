"""Control groups: what one machine's process may use of memory and tasks, where this host lets us set it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_BASE = Path("/sys/fs/cgroup")
_GROUP = "perilune"
# QEMU's threads: one processor, its loop, disk workers.
TASKS = 128


@dataclass(frozen=True)
class Cgroups:
    """Where groups are made. unified: version 2. folders: one, or with version 1 one for each controller."""

    unified: bool
    memory: Path | None
    pids: Path | None

    @classmethod
    def find(cls) -> Cgroups | None:
        """What can be used here, or None."""
        if (_BASE / "cgroup.controllers").exists():
            group = _BASE / _GROUP
            with contextlib.suppress(OSError):
                group.mkdir(exist_ok=True)
                for path in (_BASE, group):
                    (path / "cgroup.subtree_control").write_text("+memory +pids")
                return cls(True, group, group)
            return None
        found = {}
        for name in ("memory", "pids"):
            group = _BASE / name / _GROUP
            with contextlib.suppress(OSError):
                group.mkdir(exist_ok=True)
                if os.access(group, os.W_OK):
                    found[name] = group
        return cls(False, found.get("memory"), found.get("pids")) if found else None

    @classmethod
    def describe(cls) -> str:
        """For doctor."""
        found = cls.find()
        if found is None:
            return "cannot be made here: a machine's memory is bounded by its size and by rlimits only"
        names = [name for name in ("memory", "pids") if getattr(found, name) is not None]
        return f"version {2 if found.unified else 1}: {' and '.join(names)} of each machine are limited"

    def add(self, box: str, pid: int, memory: int) -> None:
        """Put a process into a group of its own. memory: bytes."""
        limits: list[tuple[Path, str, int]] = []
        if self.memory is not None:
            name = "memory.max" if self.unified else "memory.limit_in_bytes"
            limits.append((self.memory / box, name, memory))
        if self.pids is not None:
            limits.append((self.pids / box, "pids.max", TASKS))
        for folder, name, value in limits:
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(str(value))
        for folder in {folder for folder, _, _ in limits}:
            (folder / "cgroup.procs").write_text(str(pid))

    def remove(self, box: str) -> None:
        """After the process has ended."""
        for group in {self.memory, self.pids} - {None}:
            assert group is not None
            with contextlib.suppress(OSError):
                (group / box).rmdir()


__all__ = ["Cgroups"]
