"""Pages that a process has written over a private mapping of a file, read from outside without stopping it.

A page of a private file mapping that was never written is the file's own. One that was is anonymous: present or
swapped, and not a file's. Linux 6.7 finds them with one PAGEMAP_SCAN; older kernels show the same bits in pagemap.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from perilune.sandbox.errors import SandboxError
from perilune.sandbox.pages import PAGE, Extent, coalesce

_PAGEMAP_SCAN = (3 << 30) | (96 << 16) | (ord("f") << 8) | 16  # _IOWR('f', 16, struct pm_scan_arg)
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_REGIONS = 32768
_IOV_MAX = 1024
_HUGE = 14  # MADV_HUGEPAGE

_libc = ctypes.CDLL(None, use_errno=True)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_size_t), ("length", ctypes.c_size_t))


def mapping_of(pid: int, path: Path, size: int) -> int:
    """The address at which process `pid` maps `size` bytes of the file from its beginning."""
    inode = str(path.stat().st_ino)
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            span, _, offset, _, found, *_ = line.split()
            start, end = (int(number, 16) for number in span.split("-"))
            if found == inode and int(offset, 16) == 0 and end - start == size:
                return start
    raise SandboxError(f"process {pid} does not map {path} ({size} bytes)")


def written(pid: int, start: int, size: int) -> list[Extent]:
    """Extents, counted in pages from `start`, that the process has written."""
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        try:
            return _scan(pagemap.fileno(), start, start + size)
        except OSError as error:
            if error.errno not in (errno.ENOTTY, errno.EINVAL):
                raise
        return _read_bits(pagemap.fileno(), start, size)


def _scan(pagemap: int, start: int, end: int) -> list[Extent]:
    regions = (ctypes.c_uint64 * (3 * _REGIONS))()
    extents: list[Extent] = []
    at = start
    while at < end:
        # size, flags, start, end, walk_end, vec, vec_len, max_pages, inverted, mask, anyof, returned categories
        argument = bytearray(
            struct.pack(
                "<12Q",
                *(96, 0, at, end, 0, ctypes.addressof(regions), _REGIONS, 0),
                *(_IS_FILE, _IS_FILE, _IS_PRESENT | _IS_SWAPPED, _IS_PRESENT | _IS_SWAPPED | _IS_FILE),
            )
        )
        found = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, argument)
        for i in range(found):
            _append(extents, (regions[3 * i] - start) // PAGE, (regions[3 * i + 1] - regions[3 * i]) // PAGE)
        at = struct.unpack_from("<Q", argument, 32)[0]
        if found < _REGIONS:
            break
    return extents


def _append(extents: list[Extent], first: int, count: int) -> None:
    # Neighbours differ in a category that does not matter here.
    if extents and sum(extents[-1]) == first:
        extents[-1] = (extents[-1][0], extents[-1][1] + count)
    else:
        extents.append((first, count))


def _read_bits(pagemap: int, start: int, size: int) -> list[Extent]:
    entries = os.pread(pagemap, size // PAGE * 8, start // PAGE * 8)
    return coalesce(
        page
        for page, (entry,) in enumerate(struct.iter_unpack("<Q", entries))
        # bit 63 present, 62 swapped, 61 page of a file or shared
        if entry >> 62 and not entry >> 61 & 1
    )


def read_memory(pid: int, start: int, extents: Sequence[Extent]) -> memoryview:
    """The extents' bytes, one after the other, copied out of the process."""
    total = sum(count for _, count in extents) * PAGE
    if not total:
        return memoryview(b"")
    buffer = mmap.mmap(-1, total)
    buffer.madvise(_HUGE)
    _transfer(_libc.process_vm_readv, pid, start, extents, ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
    return memoryview(buffer)


def write_memory(pid: int, start: int, extents: Sequence[Extent], data: mmap.mmap, offset: int) -> None:
    """Copy bytes of a (private) map, from `offset` on, over the extents of the process's memory."""
    _transfer(_libc.process_vm_writev, pid, start, extents, ctypes.addressof(ctypes.c_char.from_buffer(data)) + offset)


def _transfer(call: Callable[..., int], pid: int, start: int, extents: Sequence[Extent], local: int) -> None:
    for at in range(0, len(extents), _IOV_MAX):
        part = extents[at : at + _IOV_MAX]
        remote = (_Iovec * len(part))(*(_Iovec(start + first * PAGE, count * PAGE) for first, count in part))
        length = sum(count for _, count in part) * PAGE
        done = 0
        while done < length:
            here = _Iovec(local + done, length - done)
            skipped, first = _skip(remote, done)
            moved = call(pid, ctypes.byref(here), 1, skipped, len(part) - first, 0)
            if moved <= 0:
                number = ctypes.get_errno()
                raise SandboxError(f"memory of process {pid}: {os.strerror(number)}")
            done += moved
        local += length


def _skip(remote: ctypes.Array[_Iovec], done: int) -> tuple[ctypes.Array[_Iovec], int]:
    """What is left of `remote` after `done` bytes (a call moves at most 2 GiB), and how many pieces are done."""
    first = 0
    while first < len(remote) and done >= remote[first].length:
        done -= remote[first].length
        first += 1
    left = (_Iovec * (len(remote) - first))(*remote[first:])
    if first < len(remote):
        left[0] = _Iovec(remote[first].base + done, remote[first].length - done)
    return left, first


__all__ = ["mapping_of", "read_memory", "write_memory", "written"]
