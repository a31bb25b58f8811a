"""Places outside the device for flat tensors between the forward and the backward pass.

A store copies beside the computation. What it promises, whatever its speed: `put` has read what the tensor held when
it was called, `get` gives exactly these bytes back, and no memory is given to anybody while a copy still touches it.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from perilune.errors import Error


class Store(Protocol):
    """put, get and what is between them; tickets are the store's own.

    held: bytes that lie here now. moved: bytes copied so far, both ways. waited: seconds that `get` has waited.
    """

    held: int
    moved: int
    waited: float

    def put(self, flat: torch.Tensor) -> Any:
        """Begin to take a flat tensor in; its ticket. Raises Error where there is no room."""

    def prefetch(self, ticket: Any) -> None:
        """Begin to bring it back."""

    def get(self, ticket: Any) -> torch.Tensor:
        """The tensor, for use from now on; the store's copy stays until `drop`."""

    def drop(self, ticket: Any) -> None:
        """Its room may be used again."""


class MemoryStore:
    """Ordinary host memory, copied at once: for tensors that live on the CPU."""

    def __init__(self, limit: int = 0) -> None:
        """limit: bytes; 0: no limit."""
        self.limit, self.held, self.moved, self.waited = limit, 0, 0, 0.0

    def put(self, flat: torch.Tensor) -> torch.Tensor:
        check_room("memory.host_bytes", self.limit, self.held, flat.nbytes)
        self.held += flat.nbytes
        self.moved += flat.nbytes
        return flat.clone()

    def prefetch(self, ticket: torch.Tensor) -> None:
        pass

    def get(self, ticket: torch.Tensor) -> torch.Tensor:
        self.moved += ticket.nbytes
        return ticket.clone()

    def drop(self, ticket: torch.Tensor) -> None:
        self.held -= ticket.nbytes


class FileStore:
    """Files in a folder (on an NVMe disk), written and read by a few threads.

    Files have no name (they are unlinked when opened), so nothing is left behind however the process ends.
    """

    def __init__(self, folder: Path, threads: int = 4) -> None:
        if not folder.is_dir():
            raise Error(f"memory.nvme is {str(folder)!r}; must be a folder that exists")
        self.folder, self.held, self.moved, self.waited = folder, 0, 0, 0.0
        self._pool = ThreadPoolExecutor(threads, "perilune-nvme")
        self._lock = threading.Lock()
        self._failed: OSError | None = None

    def put(self, flat: torch.Tensor) -> _File:
        self._check()
        try:
            descriptor = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        except OSError as cause:
            raise self._error(cause) from cause
        file = _File(flat.numel(), flat.dtype, flat.device, descriptor)
        # The copy is the thread's own: whoever called may change the tensor.
        host = flat.detach().to("cpu", copy=True)
        self.held += flat.nbytes
        self.moved += flat.nbytes
        file.written = self._pool.submit(self._write, file, host)
        return file

    def prefetch(self, ticket: _File) -> None:
        if ticket.read is None:
            ticket.read = self._pool.submit(self._read, ticket)

    def get(self, ticket: _File) -> torch.Tensor:
        self.prefetch(ticket)
        assert ticket.read is not None
        begin = time.perf_counter()
        host = ticket.read.result()
        self.waited += time.perf_counter() - begin
        self._check()
        ticket.read = None
        self.moved += host.nbytes
        return host.to(ticket.device)

    def drop(self, ticket: _File) -> None:
        self.held -= ticket.numbers * ticket.dtype.itemsize
        # The file's last reference closes it: that of a running thread, or this one.
        ticket.read = None

    def _write(self, file: _File, host: torch.Tensor) -> None:
        try:
            rest, at = _bytes(host), 0
            while at < len(rest):
                at += os.pwrite(file.descriptor.fileno(), rest[at : at + (1 << 27)], at)
        except OSError as cause:
            with self._lock:
                self._failed = self._failed or cause

    def _read(self, file: _File) -> torch.Tensor:
        assert file.written is not None
        file.written.result()
        host = torch.empty(file.numbers, dtype=file.dtype, pin_memory=file.device.type == "cuda")
        rest, at = _bytes(host), 0
        while at < len(rest):
            count = os.preadv(file.descriptor.fileno(), [rest[at : at + (1 << 27)]], at)
            if count == 0:
                # A write has failed, and says so by itself.
                break
            at += count
        return host

    def _check(self) -> None:
        if self._failed is not None:
            raise self._error(self._failed)

    def _error(self, cause: OSError) -> Error:
        return Error(
            f"memory.nvme is {str(self.folder)!r}: {cause.strerror} with {self.held / 1e9:.3f} GB of activations there"
        )


class _File:
    def __init__(self, numbers: int, dtype: torch.dtype, device: torch.device, descriptor: Any) -> None:
        self.numbers, self.dtype, self.device, self.descriptor = numbers, dtype, device, descriptor
        self.written: Future[None] | None = None
        self.read: Future[torch.Tensor] | None = None


def check_room(field: str, limit: int, held: int, more: int) -> None:
    """Raises Error when `more` bytes do not fit."""
    if limit and held + more > limit:
        raise Error(f"{field} is {limit}; {held} bytes of activations lie there and {more} more do not fit")


def _bytes(host: torch.Tensor) -> memoryview:
    return memoryview(host.view(torch.uint8).numpy())  # type: ignore[arg-type]


__all__ = ["FileStore", "MemoryStore", "Store", "check_room"]
