"""Gradients that are added up in host memory while the device computes the next ones.

A hook takes each gradient as soon as a micro-batch has made it: a stream copies it out, a thread adds it to the sum on
the host and frees its device memory. The additions are those that the device would do, in the same order, so the sums
have the same bits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping

import torch

from perilune.errors import Error
from perilune.ops.pinned import host_empty


class _Sum:
    """On the host. empty: the next gradient is the first of its step. taken: the copy to the device that reads it."""

    def __init__(self, grad: torch.Tensor) -> None:
        self.host = host_empty(grad.shape, grad.dtype, pin=grad.is_cuda)
        self.empty = True
        self.taken: torch.cuda.Event | None = None


class _Work:
    """One gradient on its way: its copy on the host is added to the sum, or is the sum if it is the first."""

    def __init__(self, into: _Sum, grad: torch.Tensor, host: torch.Tensor, first: bool) -> None:
        self.into, self.grad, self.host, self.first = into, grad, host, first
        self.size = grad.nbytes
        self.copied: torch.cuda.Event | None = None


class HostGradients:
    """The gradients of some parameters on the host. `take` ends a step.

    At most two times the largest gradient is on its way, on the device as well as on the host; backward waits where
    the link is slower than that.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], part: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    ) -> None:
        """weights: leaves by name. part: the plain tensor that a gradient is, where it is not one itself."""
        self._weights, self._part = dict(weights), part
        self._sums: dict[str, _Sum] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._free: dict[int, list[torch.Tensor]] = {}
        self._limit, self._under_way = 0, 0
        self._moved = threading.Condition()
        self._failed: BaseException | None = None
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._hooks = [
            weight.register_post_accumulate_grad_hook(lambda weight, name=name: self._made(name, weight))
            for name, weight in self._weights.items()
        ]
        self._thread = threading.Thread(target=self._add_up, name="perilune-gradients", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, torch.Tensor]:
        """The sums of the step, by name, on the devices of their parameters; the next gradients begin a new step."""
        self._wait(0)
        found = {}
        for name, mine in self._sums.items():
            if mine.empty:
                continue
            device = self._part(self._weights[name].detach()).device
            # A copy also on a CPU, where the sum's memory is used again.
            found[name] = mine.host.to(device, non_blocking=True, copy=True)
            mine.empty = True
            if device.type == "cuda":
                mine.taken = torch.cuda.current_stream(device).record_event()
        return found

    def close(self) -> None:
        """Let the parameters keep their gradients again."""
        for hook in self._hooks:
            hook.remove()
        self._queue.put(None)
        self._thread.join()

    def _made(self, name: str, weight: torch.Tensor) -> None:
        assert weight.grad is not None
        grad, weight.grad = self._part(weight.grad), None
        if name not in self._sums:
            self._sums[name] = _Sum(grad)
        mine = self._sums[name]
        self._limit = max(self._limit, 2 * grad.nbytes)
        self._wait(self._limit - grad.nbytes)
        first, mine.empty = mine.empty, False
        if grad.is_cuda:
            host = mine.host if first else self._staging(grad)
            work = _Work(mine, grad, host, first)
            work.copied = self._copy_out(work)
        else:
            work = _Work(mine, grad, grad, first)
        with self._moved:
            self._under_way += work.size
        self._queue.put(work)

    def _copy_out(self, work: _Work) -> torch.cuda.Event:
        device = work.grad.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        out = self._streams[device]
        made = torch.cuda.current_stream(device).record_event()
        with torch.cuda.stream(out):
            out.wait_event(made)
            if work.first and work.into.taken is not None:
                out.wait_event(work.into.taken)
            work.host.copy_(work.grad, non_blocking=True)
            event: torch.cuda.Event = out.record_event()
            return event

    def _staging(self, grad: torch.Tensor) -> torch.Tensor:
        with self._moved:
            free = self._free.get(grad.nbytes)
            host = free.pop() if free else None
        if host is None:
            host = host_empty((grad.nbytes,), torch.uint8, pin=True)
        return host.view(grad.dtype).view(grad.shape)

    def _wait(self, most: int) -> None:
        """Until at most so many bytes are on their way."""
        with self._moved:
            self._moved.wait_for(lambda: self._under_way <= most or self._failed is not None)
        if self._failed is not None:
            raise Error(f"memory.gradients: adding up on the host failed: {self._failed}") from self._failed

    def _add_up(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                self._add(work)
            except BaseException as cause:
                with self._moved:
                    self._failed = cause
                    self._moved.notify_all()
                return
            with self._moved:
                self._under_way -= work.size
                if work.copied is not None and not work.first:
                    flat = work.host.view(-1).view(torch.uint8)
                    self._free.setdefault(work.size, []).append(flat)
                self._moved.notify_all()

    def _add(self, work: _Work) -> None:
        if work.copied is not None:
            work.copied.synchronize()
        with torch.no_grad():
            if not work.first:
                work.into.host.add_(work.host)
            elif work.copied is None:
                work.into.host.copy_(work.host)
        # Its device memory goes back to its pool: nothing reads it any more.
        del work.grad


__all__ = ["HostGradients"]
