"""Activations in files: written and read by a few threads, beside the page cache where the file system allows it.

Files have no name (they are unlinked when opened), so nothing is left behind however the process ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from perilune.errors import Error
from perilune.ops.pinned import host_empty

# What O_DIRECT wants of addresses, offsets and sizes.
_ALIGN = 4096
_PIECE = 1 << 27


@dataclass
class _File:
    numbers: int
    dtype: torch.dtype
    device: torch.device
    descriptor: Any
    written: Future[None] = field(default_factory=Future)
    read: Future[torch.Tensor] | None = None

    @property
    def size(self) -> int:
        return self.numbers * self.dtype.itemsize


class FileStore:
    """A store (`memory.stores.Store`) of files in a folder on an NVMe disk.

    pending: bytes that may wait to be written; `put` waits while there are more.
    """

    def __init__(self, folder: Path, threads: int = 4, pending: int = 1 << 30) -> None:
        """Raises Error for a folder that does not exist."""
        if not folder.is_dir():
            raise Error(f"memory.nvme is {str(folder)!r}; must be a folder that exists")
        self.folder, self.pending, self.held, self.moved = folder, pending, 0, 0
        self._pool = ThreadPoolExecutor(threads, "perilune-nvme")
        self._lock = threading.Lock()
        self._failed: OSError | None = None
        self._writing: deque[tuple[Future[None], int]] = deque()
        self._out: torch.cuda.Stream | None = None

    def put(self, flat: torch.Tensor) -> _File:
        self._check()
        self._wait_for_room(flat.nbytes)
        try:
            file = _File(flat.numel(), flat.dtype, flat.device, open_nameless(self.folder))
        except OSError as cause:
            raise self._error(cause) from cause
        # The copy is the thread's own: whoever called may change the tensor.
        host, ready = self._copy_out(flat)
        self.held += flat.nbytes
        self.moved += flat.nbytes
        file.written = self._pool.submit(self._write, file, host, ready)
        self._writing.append((file.written, file.size))
        return file

    def prefetch(self, ticket: _File) -> None:
        if ticket.read is None:
            ticket.read = self._pool.submit(self._read, ticket)

    def get(self, ticket: _File) -> torch.Tensor:
        self.prefetch(ticket)
        assert ticket.read is not None
        host = ticket.read.result()
        self._check()
        ticket.read = None
        self.moved += ticket.size
        return host[: ticket.size].view(ticket.dtype).to(ticket.device, non_blocking=True)

    def drop(self, ticket: _File) -> None:
        self.held -= ticket.size
        # The file's last reference closes it: that of a running thread, or this one.
        ticket.read = None

    def _wait_for_room(self, size: int) -> None:
        while self._writing and (
            self._writing[0][0].done() or sum(waiting for _, waiting in self._writing) + size > self.pending
        ):
            self._writing.popleft()[0].result()

    def _copy_out(self, flat: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A host buffer, and what must be synchronised before it holds the numbers; None: it does."""
        host = aligned(flat.nbytes, flat.is_cuda)
        target = host[: flat.nbytes]
        if not flat.is_cuda:
            target.copy_(flat.detach().view(torch.uint8))
            return host, None
        self._out = self._out or torch.cuda.Stream(flat.device)
        made = torch.cuda.current_stream(flat.device).record_event()
        with torch.cuda.stream(self._out):
            self._out.wait_event(made)
            target.copy_(flat.detach().view(torch.uint8), non_blocking=True)
            return host, (self._out.record_event(), flat)

    def _write(self, file: _File, host: torch.Tensor, ready: Any) -> None:
        if ready is not None:
            ready[0].synchronize()
        try:
            write_all(file.descriptor.fileno(), memoryview(host.numpy()))  # type: ignore[arg-type]
        except OSError as cause:
            with self._lock:
                self._failed = self._failed or cause

    def _read(self, file: _File) -> torch.Tensor:
        file.written.result()
        host = aligned(file.size, file.device.type == "cuda")
        try:
            read_all(file.descriptor.fileno(), memoryview(host.numpy()))  # type: ignore[arg-type]
        except OSError as cause:
            with self._lock:
                self._failed = self._failed or cause
        return host

    def _check(self) -> None:
        if self._failed is not None:
            raise self._error(self._failed)

    def _error(self, cause: OSError) -> Error:
        return Error(
            f"memory.nvme is {str(self.folder)!r}: {cause.strerror} with {self.held / 1e9:.3f} GB of activations there"
        )


def aligned(size: int, pin: bool) -> torch.Tensor:
    """uint8 of `size` rounded up to what O_DIRECT moves, at an address that it takes. Raises Error without memory."""
    size += -size % _ALIGN
    try:
        raw = host_empty((size + _ALIGN,), torch.uint8, pin)
    except RuntimeError as cause:
        raise Error(f"host memory: a buffer of {size} bytes for files cannot be had: {cause}") from cause
    begin = -raw.data_ptr() % _ALIGN
    return raw[begin : begin + size]


def open_nameless(folder: Path) -> Any:
    """A new file in the folder that vanishes when it is closed; past the page cache if the file system can."""
    file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
    _set_direct(file.fileno(), True)
    return file


def write_all(descriptor: int, rest: memoryview) -> None:
    at = 0
    while at < len(rest):
        at += _direct_or_not(descriptor, lambda at=at: os.pwrite(descriptor, rest[at : at + _PIECE], at))


def read_all(descriptor: int, rest: memoryview) -> None:
    """Fill `rest`, as far as the file goes."""
    at = 0
    while at < len(rest):
        count = _direct_or_not(descriptor, lambda at=at: os.preadv(descriptor, [rest[at : at + _PIECE]], at))
        if count == 0:
            # A write has failed, and says so by itself.
            break
        at += count


def _direct_or_not(descriptor: int, call: Any) -> int:
    """EINVAL is a file system's answer to what it cannot do directly: then through the page cache."""
    try:
        return int(call())
    except OSError as cause:
        if cause.errno != errno.EINVAL or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise
    _set_direct(descriptor, False)
    return int(call())


def _set_direct(descriptor: int, on: bool) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError as cause:
        if cause.errno != errno.EINVAL:
            raise


__all__ = ["FileStore", "aligned", "open_nameless", "read_all", "write_all"]
