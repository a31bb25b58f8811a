"""Pinned host memory for tensors of a GPU: two streams copy beside the computation.

Order by events alone, and the host never waits: a copy out waits for what the computing stream had been given when
`put` was called; a copy back waits for the copy out, and for the computing stream, from whose pool its memory comes;
the computing stream waits for the copy back in `get`, and for a copy out before its tensor's memory is freed to the
pool. No memory of the device belongs to a side stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from operator import attrgetter

import torch

from perilune.errors import Error
from perilune.memory.stores import check_room
from perilune.ops.pinned import host_empty

# Bytes in flight before a layer's size is known.
LEAST = 1 << 28


@dataclass
class _Pinned:
    """A buffer and the last copy that touches it."""

    bytes: torch.Tensor
    event: torch.cuda.Event

    @property
    def size(self) -> int:
        return self.bytes.numel()


@dataclass
class _Ticket:
    """source: the tensor that was put, while its memory is not freed; version: of it, then; left: the copy out."""

    buffer: _Pinned
    numbers: int
    dtype: torch.dtype
    source: torch.Tensor | None
    version: int
    left: torch.cuda.Event
    back: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    @property
    def size(self) -> int:
        return self.numbers * self.dtype.itemsize


class PinnedStore:
    """Buffers are kept for the next step, for tensors as large or, without a limit, up to a third smaller. Those that
    steps of other sizes have left are given up before more is pinned than half as much again as was ever held at once.

    limit: bytes pinned in all; 0: no limit.
    in_flight: bytes of tensors that have been put and are not freed yet, as their copy out may be under way; half of it
    once tensors are fetched. None: one and a half times `layer`, bytes of the largest layer that a step has had, and
    half a layer once tensors are fetched, which is what may be on its way back later. A tensor that is asked for while
    it is among them is not copied back.
    """

    def __init__(self, device: torch.device, limit: int = 0, in_flight: int | None = None) -> None:
        self.device, self.limit, self.in_flight, self.layer = device, limit, in_flight, 0
        self.held, self.pinned, self.moved, self._most_held = 0, 0, 0, 0
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: list[_Pinned] = []  # by size
        self._leaving: deque[_Ticket] = deque()
        self._leaving_bytes = 0

    def put(self, flat: torch.Tensor) -> _Ticket:
        self._let_go(max(0, self._most_in_flight(3) - flat.nbytes))
        buffer = self._buffer(flat.nbytes)
        made = torch.cuda.current_stream(self.device).record_event()
        with torch.cuda.stream(self._out):
            self._out.wait_event(made)
            self._out.wait_event(buffer.event)
            _copy(buffer.bytes[: flat.nbytes], flat.detach().view(torch.uint8))
            buffer.event = self._out.record_event()
        ticket = _Ticket(buffer, flat.numel(), flat.dtype, flat, flat._version, buffer.event)
        self._leaving.append(ticket)
        self._leaving_bytes += ticket.size
        self.held += ticket.size
        self.moved += ticket.size
        return ticket

    def prefetch(self, ticket: _Ticket) -> None:
        if ticket.back is not None:
            return
        # The oldest are needed last.
        self._let_go(self._most_in_flight(1))
        if ticket.source is not None and ticket.source._version == ticket.version:
            ticket.back = (ticket.source, None)
            return
        current = torch.cuda.current_stream(self.device)
        flat = _empty(ticket.numbers, ticket.dtype, self.device)
        allocated = current.record_event()
        with torch.cuda.stream(self._back):
            self._back.wait_event(allocated)
            self._back.wait_event(ticket.buffer.event)
            _copy(flat.view(torch.uint8), ticket.buffer.bytes[: flat.nbytes])
            event = self._back.record_event()
        ticket.buffer.event, ticket.back = event, (flat, event)
        self.moved += ticket.size

    def get(self, ticket: _Ticket) -> torch.Tensor:
        self.prefetch(ticket)
        assert ticket.back is not None
        (flat, event), ticket.back = ticket.back, None
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
        return flat

    def drop(self, ticket: _Ticket) -> None:
        if ticket.back is not None and ticket.back[1] is not None:
            # Nobody will use it, but its memory goes back to the computing stream's pool.
            torch.cuda.current_stream(self.device).wait_event(ticket.back[1])
        ticket.back = None
        self._free_source(ticket)
        self.held -= ticket.size
        insort(self._free, ticket.buffer, key=attrgetter("size"))

    def _most_in_flight(self, halves: int) -> int:
        """halves: of a layer, 3 in a forward pass and 1 in a backward pass."""
        # A layer's tensors are made in bursts; a forward pass has the room, as the backward pass needs more.
        if self.in_flight is None:
            return max(LEAST, halves * self.layer // 2)
        return self.in_flight if halves == 3 else self.in_flight // 2

    def _let_go(self, most: int) -> None:
        """Free what has been copied out, and the oldest others behind their copies while there is more than `most`."""
        while self._leaving and (self._leaving_bytes > most or self._leaving[0].left.query()):
            self._free_source(self._leaving.popleft())

    def _free_source(self, ticket: _Ticket) -> None:
        if ticket.source is not None:
            self._leaving_bytes -= ticket.size
            torch.cuda.current_stream(self.device).wait_event(ticket.left)
            ticket.source = None

    def _buffer(self, size: int) -> _Pinned:
        at = bisect_left(self._free, size, key=attrgetter("size"))
        # A limit is of what is held, so nothing is wasted under one.
        if at < len(self._free) and self._free[at].size <= (size if self.limit else 5 * size // 4):
            return self._free.pop(at)
        self._most_held = max(self._most_held, self.held + size)
        most = 3 * self._most_held // 2
        if self.pinned + size > (min(self.limit, most) if self.limit else most):
            if at < len(self._free) and not self.limit and self._free[at].size <= 3 * size // 2:
                return self._free.pop(at)  # rather than to pin anew in every step
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
        for buffer in self._free:
            buffer.event.synchronize()
            self.pinned -= buffer.size
        self._free.clear()
        # Those that are over hold their buffers.
        self._leaving = deque(ticket for ticket in self._leaving if ticket.source is not None)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _pin(size: int) -> torch.Tensor:
    return host_empty((size,), torch.uint8, pin=True)


def _empty(numbers: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numbers, dtype=dtype, device=device)


__all__ = ["PinnedStore"]
