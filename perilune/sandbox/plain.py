"""Files that a machine's own process wrote: it may have been taken over, and put anything in their place."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from perilune.sandbox.errors import SandboxError

STATE_MAX = 16 << 20


def read_plain(path: Path, limit: int) -> bytes:
    """The first `limit` bytes of a plain file; `SandboxError` for anything else, `OSError` if it is not there."""
    # No link is followed, and a pipe is not waited for.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SandboxError(f"{path.name} is no plain file")
        return file.read(limit)


def take_state(source: Path, target: Path) -> None:
    """Copy a device state, which is a plain file of bounded size."""
    data = read_plain(source, STATE_MAX + 1)
    if len(data) > STATE_MAX:
        raise SandboxError(f"{source.name} has more than {STATE_MAX} bytes; a device state has not")
    target.write_bytes(data)


__all__ = ["STATE_MAX", "read_plain", "take_state"]
