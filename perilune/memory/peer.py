"""Memory of another rank as a store: an early pipeline stage keeps activations where a late stage has room for them.

A lender gives a room, a flat buffer of its device; the borrower alone decides what lies where in it. Two kinds of room
do the same. `MessageRoom`: torch.distributed messages, which a thread at the lender answers in order. `MappedRoom`: the
buffer mapped into the borrower's address space, for GPUs of one host that reach each other; two streams copy there and
back, and the lender does nothing at all.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from perilune.errors import Error
from perilune.memory.arena import Arena


class Copy(Protocol):
    """A copy that has been started."""

    def done(self) -> bool:
        """Whether it has ended for certain; does not wait."""

    def wait(self) -> None:
        """What the current stream (on a CPU: the caller) does next comes after the copy."""

    def finish(self) -> None:
        """Wait on the host until it has ended."""


class Room(Protocol):
    """`size` bytes on rank `lender`."""

    lender: int
    size: int

    def write(self, offset: int, source: torch.Tensor) -> Copy:
        """Begin to copy a flat uint8 tensor to `offset`, behind all reads that were begun before."""

    def read(self, offset: int, target: torch.Tensor, after: Copy) -> Copy:
        """Begin to copy from `offset` into a flat uint8 tensor, behind the write `after`."""

    def close(self) -> None:
        """Nothing more is copied."""


@dataclass
class _Leaving:
    """A tensor that is held until its copy out has ended, and the stream that put it."""

    sent: Copy
    flat: torch.Tensor | None
    size: int
    room: int
    stream: torch.cuda.Stream | None


@dataclass
class _Ticket:
    room: int
    offset: int
    numbers: int
    dtype: torch.dtype
    device: torch.device
    leaving: _Leaving
    back: tuple[torch.Tensor, Copy] | None = None

    @property
    def bytes(self) -> int:
        return self.numbers * self.dtype.itemsize


class PeerStore:
    """`Store` in rooms of other ranks, the first one with a free range. What finds no range stays on the device:
    a loan is what evens out the stages, and more than that would be too much for the lender.

    in_flight: bytes whose copies out may be under way, and whose tensors are held until then, before the stream that
    puts more waits for the oldest.
    """

    def __init__(self, rooms: Sequence[Room], in_flight: int = 1 << 28) -> None:
        self.rooms, self.in_flight = list(rooms), in_flight
        self.held, self.moved, self.most = 0, 0, 0
        self._arenas = [Arena(room.size) for room in rooms]
        self._leaving: deque[_Leaving] = deque()
        self._leaving_bytes = 0

    def takes(self, size: int) -> bool:
        """Whether there is a free range of so many bytes."""
        return any(arena.fits(size) for arena in self._arenas)

    def put(self, flat: torch.Tensor) -> _Ticket:
        """As in `Store`. Raises Error without room, and when the lender does not answer."""
        i = next((i for i, arena in enumerate(self._arenas) if arena.fits(flat.nbytes)), -1)
        if i < 0:
            raise Error(f"peer memory: {self.held} bytes lie there and {flat.nbytes} more find no range")
        offset = self._arenas[i].take(flat.nbytes)
        self._let_go(max(0, self.in_flight - flat.nbytes))
        with self._named(i):
            sent = self.rooms[i].write(offset, flat.detach().view(torch.uint8))
        stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        leaving = _Leaving(sent, flat, flat.nbytes, i, stream)
        self._leaving.append(leaving)
        self._leaving_bytes += leaving.size
        self.held += flat.nbytes
        self.most = max(self.most, self.held)
        self.moved += flat.nbytes
        return _Ticket(i, offset, flat.numel(), flat.dtype, flat.device, leaving)

    def prefetch(self, ticket: _Ticket) -> None:
        if ticket.back is None:
            flat = _empty(ticket.numbers, ticket.dtype, ticket.device)
            with self._named(ticket.room):
                copy = self.rooms[ticket.room].read(ticket.offset, flat.view(torch.uint8), ticket.leaving.sent)
            ticket.back = flat, copy
            self.moved += ticket.bytes

    def get(self, ticket: _Ticket) -> torch.Tensor:
        self.prefetch(ticket)
        assert ticket.back is not None
        (flat, copy), ticket.back = ticket.back, None
        with self._named(ticket.room):
            copy.wait()
        stream = ticket.leaving.stream
        if stream is None or stream == torch.cuda.current_stream(ticket.device):
            # The way back is behind the way out.
            self._free(ticket.leaving)
        return flat

    def drop(self, ticket: _Ticket) -> None:
        if ticket.back is not None:
            # Nobody will use it, but its memory goes back to the computing stream's pool. A lender that is gone is
            # not worth a second error here.
            with contextlib.suppress(RuntimeError):
                ticket.back[1].wait()
            ticket.back = None
        self.held -= ticket.bytes
        self._arenas[ticket.room].give(ticket.offset, ticket.bytes)

    def close(self) -> None:
        """End the rooms' use, also of those whose lender is gone; for the end of a run."""
        with contextlib.suppress(Error):
            while self._leaving:
                with self._named(self._leaving[0].room):
                    self._leaving.popleft().sent.finish()
        for room in self.rooms:
            room.close()

    def _let_go(self, most: int) -> None:
        """Free tensors whose copy out has ended, and the oldest behind theirs while more than `most` bytes are left."""
        while self._leaving and (self._leaving_bytes > most or self._leaving[0].sent.done()):
            oldest = self._leaving.popleft()
            if oldest.flat is None:
                continue
            # Its memory goes back to the pool of the stream that made it.
            own = contextlib.nullcontext() if oldest.stream is None else torch.cuda.stream(oldest.stream)
            with self._named(oldest.room), own:
                oldest.sent.wait()
            self._free(oldest)

    def _free(self, leaving: _Leaving) -> None:
        if leaving.flat is not None:
            leaving.flat = None
            self._leaving_bytes -= leaving.size

    @contextlib.contextmanager
    def _named(self, i: int) -> Iterator[None]:
        """torch's errors name no rank."""
        try:
            yield
        except RuntimeError as cause:
            first = str(cause).splitlines()[0]
            raise Error(
                f"peer memory: rank {self.rooms[i].lender}, which holds {self.held} bytes of this rank's activations, "
                f"does not answer: {first}"
            ) from cause


class MappedRoom:
    """A lender's buffer in this process's address space. Order by events alone, memory as in `memory.pinned`."""

    def __init__(self, lender: int, room: torch.Tensor) -> None:
        """room: uint8, on the borrower's device as far as torch knows (`memory.mapped`)."""
        self.lender, self.size, self._room = lender, room.numel(), room
        self._out, self._back = torch.cuda.Stream(room.device), torch.cuda.Stream(room.device)
        self._read: torch.cuda.Event | None = None

    def write(self, offset: int, source: torch.Tensor) -> Copy:
        made = torch.cuda.current_stream(self._room.device).record_event()
        with torch.cuda.stream(self._out):
            self._out.wait_event(made)
            if self._read is not None:
                # The range may have been another's, which is still being read.
                self._out.wait_event(self._read)
            _copy(self._room[offset : offset + source.numel()], source)
            return _Event(self._out.record_event(), self._room.device)

    def read(self, offset: int, target: torch.Tensor, after: Copy) -> Copy:
        allocated = torch.cuda.current_stream(self._room.device).record_event()
        with torch.cuda.stream(self._back):
            self._back.wait_event(allocated)
            after.wait()
            _copy(target, self._room[offset : offset + target.numel()])
            self._read = self._back.record_event()
        return _Event(self._read, self._room.device)

    def close(self) -> None:
        """The last copy has ended, so the lender may free its buffer."""
        for stream in (self._out, self._back):
            stream.synchronize()


class _Event:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def done(self) -> bool:
        ended: bool = self._event.query()
        return ended

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def finish(self) -> None:
        self._event.synchronize()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _empty(numbers: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numbers, dtype=dtype, device=device)


__all__ = ["Copy", "MappedRoom", "PeerStore", "Room"]
