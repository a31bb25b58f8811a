"""Pinned host memory for tensors of a GPU: two streams copy beside the computation.

Order by events alone: a copy out waits for what the computing stream had been given when `put` was called; a copy back
waits for the copy out, and for the computing stream, from whose pool its memory comes; the computing stream waits for
the copy back in `get`. Memory of the device is held until no copy touches it and then freed to the computing stream's
pool: none belongs to a side stream.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from perilune.errors import Error
from perilune.memory.stores import check_room


@dataclass
class _Pinned:
    """A buffer and the last copy that touches it."""

    bytes: torch.Tensor
    event: torch.cuda.Event


@dataclass
class _Ticket:
    buffer: _Pinned
    numbers: int
    dtype: torch.dtype
    back: tuple[torch.Tensor, torch.cuda.Event] | None = None


class PinnedStore:
    """Buffers are kept for the next step, by size; limit: bytes of them in all, 0: no limit.

    in_flight: copies out that may be under way before `put` waits for the oldest (their tensors are held until then).
    """

    def __init__(self, device: torch.device, limit: int = 0, in_flight: int = 8) -> None:
        self.device, self.limit, self.in_flight = device, limit, in_flight
        self.held, self.pinned, self.moved, self.waited = 0, 0, 0, 0.0
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: dict[int, list[_Pinned]] = {}
        self._leaving: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()

    def put(self, flat: torch.Tensor) -> _Ticket:
        self._let_go(self.in_flight - 1)
        buffer = self._buffer(flat.nbytes)
        made = torch.cuda.current_stream(self.device).record_event()
        with torch.cuda.stream(self._out):
            self._out.wait_event(made)
            self._out.wait_event(buffer.event)
            _copy(buffer.bytes[: flat.nbytes], flat.detach().view(torch.uint8))
            buffer.event = self._out.record_event()
        self._leaving.append((buffer.event, flat))
        self.held += flat.nbytes
        self.moved += flat.nbytes
        return _Ticket(buffer, flat.numel(), flat.dtype)

    def prefetch(self, ticket: _Ticket) -> None:
        if ticket.back is not None:
            return
        self._let_go(self.in_flight)
        current = torch.cuda.current_stream(self.device)
        flat = _empty(ticket.numbers, ticket.dtype, self.device)
        allocated = current.record_event()
        with torch.cuda.stream(self._back):
            self._back.wait_event(allocated)
            self._back.wait_event(ticket.buffer.event)
            _copy(flat.view(torch.uint8), ticket.buffer.bytes[: flat.nbytes])
            event = self._back.record_event()
        ticket.buffer.event, ticket.back = event, (flat, event)
        self.moved += flat.nbytes

    def get(self, ticket: _Ticket) -> torch.Tensor:
        self.prefetch(ticket)
        assert ticket.back is not None
        (flat, event), ticket.back = ticket.back, None
        torch.cuda.current_stream(self.device).wait_event(event)
        return flat

    def drop(self, ticket: _Ticket) -> None:
        if ticket.back is not None:
            # Nobody will use it, but its memory goes back to the computing stream's pool.
            torch.cuda.current_stream(self.device).wait_event(ticket.back[1])
            ticket.back = None
        self.held -= ticket.numbers * ticket.dtype.itemsize
        self._free.setdefault(ticket.buffer.bytes.numel(), []).append(ticket.buffer)

    def _let_go(self, most: int) -> None:
        """Free tensors whose copy out has ended; wait for the oldest while more than `most` are left."""
        while self._leaving and (len(self._leaving) > most or self._leaving[0][0].query()):
            self._leaving.popleft()[0].synchronize()

    def _buffer(self, size: int) -> _Pinned:
        if self._free.get(size):
            return self._free[size].pop()
        if self.limit and self.pinned + size > self.limit:
            self._unpin()
            check_room("memory.host_bytes", self.limit, self.pinned, size)
        try:
            made = _pin(size)
        except RuntimeError as cause:
            raise Error(f"host memory: {size} bytes cannot be pinned beside {self.pinned}: {cause}") from cause
        self.pinned += size
        return _Pinned(made, torch.cuda.current_stream(self.device).record_event())

    def _unpin(self) -> None:
        """Give up the buffers nobody uses."""
        for buffers in self._free.values():
            for buffer in buffers:
                buffer.event.synchronize()
                self.pinned -= buffer.bytes.numel()
        self._free.clear()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _pin(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _empty(numbers: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numbers, dtype=dtype, device=device)


__all__ = ["PinnedStore"]
