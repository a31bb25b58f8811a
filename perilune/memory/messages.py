"""A room on another rank behind torch.distributed's messages: gloo for CPUs, NCCL for GPUs of several hosts.

The borrower sends a header (int64: what, offset, bytes) over gloo and the bytes over the group of its device; a thread
at the lender does what headers say, one after the other. Messages keep their order, so nothing else is needed for it.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from perilune.memory.peer import Copy

_END, _WRITE, _READ = range(3)
# Lenders wait for headers as long as a run may take: gloo has no waiting without an end.
_FOR_EVER = datetime.timedelta(days=365)


class Pair:
    """The groups of a borrower and its lender; all ranks of the run make all pairs, in one order."""

    def __init__(self, borrower: int, lender: int, device: torch.device, timeout: float) -> None:
        """timeout: seconds after which a borrower that waits gives up."""
        self.borrower, self.lender, self.device = borrower, lender, device
        self.timeout = datetime.timedelta(seconds=timeout)
        self.headers: Any = dist.new_group([borrower, lender], timeout=_FOR_EVER, backend="gloo")
        self.bytes: Any = self.headers
        if device.type == "cuda":
            self.bytes = dist.new_group([borrower, lender], timeout=_FOR_EVER, backend="nccl")
            self._meet(dist.get_rank())

    def _meet(self, rank: int) -> None:
        """Both directions once. NCCL sets them up at their first use, and allocates for that: in the lender's thread,
        behind a computing stream that waits for the borrower, it would never end."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if rank == self.borrower:
            dist.send(byte, self.lender, group=self.bytes)
            dist.recv(byte, self.lender, group=self.bytes)
        elif rank == self.lender:
            dist.recv(byte, self.borrower, group=self.bytes)
            dist.send(byte, self.borrower, group=self.bytes)
        torch.cuda.synchronize(self.device)


class MessageRoom:
    """The borrower's side."""

    def __init__(self, pair: Pair, size: int) -> None:
        self.lender, self.size, self._pair = pair.lender, size, pair

    def write(self, offset: int, source: torch.Tensor) -> Copy:
        works = self._say(_WRITE, offset, source.numel())
        if source.numel():
            # gloo reads when it comes to it, and the tensor may change until then.
            source = source.clone() if source.device.type == "cpu" else source
            works.append(dist.isend(source, self.lender, group=self._pair.bytes, tag=1))
        return _Works(works, self._pair)

    def read(self, offset: int, target: torch.Tensor, after: Copy) -> Copy:
        works = self._say(_READ, offset, target.numel())
        if target.numel():
            works.append(dist.irecv(target, self.lender, group=self._pair.bytes, tag=1))
        return _Works(works, self._pair)

    def close(self) -> None:
        """Tell the lender to end; one that has gone already is not an error."""
        with contextlib.suppress(RuntimeError):
            _Works(self._say(_END, 0, 0), self._pair).finish()

    def _say(self, what: int, offset: int, size: int) -> list[Any]:
        header = torch.tensor([what, offset, size])
        return [dist.isend(header, self.lender, group=self._pair.headers, tag=0)]


class _Works:
    """torch's handles of the messages of one copy."""

    def __init__(self, works: Sequence[Any], pair: Pair) -> None:
        self._works, self._pair = works, pair

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait(self._pair.timeout)

    def finish(self) -> None:
        self.wait()
        # NCCL's `wait` is for the stream only.
        begin = time.monotonic()
        while self._pair.device.type == "cuda" and not self.done():
            if time.monotonic() - begin > self._pair.timeout.total_seconds():
                raise RuntimeError(f"no answer in {self._pair.timeout.total_seconds():g} seconds")
            time.sleep(1e-4)


class Lender:
    """The lender's side: a buffer, and the thread that answers. `failed` says why it ended, if not by `close`."""

    def __init__(self, pair: Pair, room: torch.Tensor) -> None:
        """room: uint8, flat, on the pair's device."""
        self.failed: BaseException | None = None
        self._pair, self._room = pair, room
        self._thread = threading.Thread(target=self._serve, name=f"perilune-lends-{pair.borrower}", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Wait until the borrower has ended, so many seconds at most."""
        self._thread.join(timeout)

    def _serve(self) -> None:
        try:
            if self._room.device.type == "cuda":
                # The computing stream must not wait for messages.
                with torch.cuda.device(self._room.device), torch.cuda.stream(torch.cuda.Stream(self._room.device)):
                    self._answer()
            else:
                self._answer()
        except RuntimeError as cause:
            self.failed = cause

    def _answer(self) -> None:
        pair, header = self._pair, torch.empty(3, dtype=torch.int64)
        sending: list[Any] = []
        while True:
            dist.recv(header, pair.borrower, group=pair.headers, tag=0)
            what, offset, size = header.tolist()
            if what == _END:
                break
            part = self._room[offset : offset + size]
            # A range is never overwritten before its numbers have left.
            for work in sending if what == _WRITE else ():
                work.wait()
            sending = [] if what == _WRITE else sending
            if size and what == _WRITE:
                dist.irecv(part, pair.borrower, group=pair.bytes, tag=1).wait()  # type: ignore[union-attr]
            elif size:
                sending.append(dist.isend(part, pair.borrower, group=pair.bytes, tag=1))
        for work in sending:
            work.wait()


__all__ = ["Lender", "MessageRoom", "Pair"]
