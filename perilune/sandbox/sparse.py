"""Files with holes: copied without them, sharing blocks where the file system can, or filled before they are mapped."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from pathlib import Path

_FICLONE = 0x40049409
_TMPFS = 0x01021994


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file without following a link, sharing blocks where the file system can, leaving its holes."""
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        copy_into(source, fd)
    finally:
        os.close(fd)


def copy_into(source: Path, target: int, follow: bool = False) -> None:
    """The same, into an open empty file; `follow` for a source that nobody else can have put there."""
    # A pipe in its place would be waited for: what is no plain file is refused.
    fd = os.open(source, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(source))
        with contextlib.suppress(OSError):
            fcntl.ioctl(target, _FICLONE, fd)
            return
        size = os.fstat(fd).st_size
        os.ftruncate(target, size)
        at = 0
        while at < size:
            try:
                at = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:
                break  # nothing but a hole is left
            end = os.lseek(fd, at, os.SEEK_HOLE)
            while at < end:
                done = os.copy_file_range(fd, target, end - at, at, at)
                if not done:
                    raise OSError(errno.EIO, "it was cut while it was copied", str(source))
                at += done
    finally:
        os.close(fd)


def fill_holes(fd: int, size: int) -> None:
    """Take the room of a file that is to be mapped, where reading a hole takes some: in memory (tmpfs).

    Without it a process that reads a page of its map on a full tmpfs dies of SIGBUS. Raises `OSError` if there is none.
    """
    if _file_system(fd) == _TMPFS:
        os.posix_fallocate(fd, 0, size)


def _file_system(fd: int) -> int:
    answer = (ctypes.c_long * 32)()
    if ctypes.CDLL(None, use_errno=True).fstatfs(fd, answer):
        raise OSError(ctypes.get_errno(), "fstatfs")
    return int(answer[0])


def reflinks(directory: Path) -> bool:
    """True if files of this directory can share blocks."""
    directory.mkdir(parents=True, exist_ok=True)
    source, target = directory / ".reflink-source", directory / ".reflink-target"
    try:
        source.write_bytes(bytes(4096))
        with source.open("rb") as file, target.open("wb") as copy:
            fcntl.ioctl(copy.fileno(), _FICLONE, file.fileno())
        return True
    except OSError:
        return False
    finally:
        source.unlink(missing_ok=True)
        target.unlink(missing_ok=True)


__all__ = ["copy_into", "copy_sparse", "fill_holes", "reflinks"]
