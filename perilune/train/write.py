"""Writing files so that a full disk, a kill or a second run cannot leave a half-written one."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from perilune.errors import Error

TEMPORARY = ".writing"


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Turn an OSError inside the block into an Error that names `path`, or the file that the system named."""
    try:
        yield
    except OSError as cause:
        raise Error(f"{cause.filename or path} could not be written: {cause.strerror or cause}") from cause


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file under a temporary name, then rename it: `path` has all of `data`, or what it had before.

    Raises Error naming `path` when it cannot be written; the temporary file is removed.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as cause:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(cause, OSError):
            raise Error(f"{path} could not be written: {cause.strerror or cause}") from cause
        raise


def lock_folder(folder: Path) -> IO[bytes]:
    """Claim `folder` for this process until the returned file is closed; the system does that when a process dies.

    Raises Error when someone else holds the claim. A file system without locks claims nothing.
    """
    with naming(folder):
        file = (folder / ".lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise Error(
            f"out is {str(folder)!r}, where another run is at work; wait for it or choose another out"
        ) from None
    except OSError:
        pass
    return file


__all__ = ["TEMPORARY", "lock_folder", "naming", "write_whole"]
