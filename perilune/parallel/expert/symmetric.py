"""Memory of other GPUs that kernels write and read directly: torch's symmetric memory, multicast not used."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from perilune.errors import Error
from perilune.parallel.expert.transport import Local


@dataclass(frozen=True)
class Shared:
    """One buffer a rank, all of one shape. mine: those of the ranks here. table: int64 [R], all their addresses."""

    mine: tuple[torch.Tensor, ...]
    table: torch.Tensor


class Direct(Protocol):
    """`ranks` in all, of which `held` (ascending) live in this process, on one device."""

    ranks: int
    held: tuple[int, ...]
    device: torch.device

    def share(self, shape: Sequence[int], dtype: torch.dtype) -> Shared:
        """A buffer on every rank; all ranks make the same calls in the same order. Contents are undefined."""
        ...

    def barrier(self, channel: int = 0) -> None:
        """What ranks wrote before it can be read after it; on the current stream, without the host.

        Barriers of several streams need a channel each.
        """
        ...

    def signal(self, channel: int) -> None:
        """The first half of a barrier: tell all ranks that what was written before is there; waits for nobody."""
        ...

    def wait(self, channel: int) -> None:
        """The second half, on any stream: what ranks wrote before their `signal` can be read after it."""
        ...

    def gather(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """int64 [n] from every rank -> [R, n]; may wait for the device."""
        ...


class Virtual(Local):
    """`Local` whose ranks write each other's memory on one device, through the kernels of `Symmetric`."""

    def __init__(self, ranks: int, device: torch.device | str) -> None:
        super().__init__(ranks)
        self.device = torch.device(device)

    def share(self, shape: Sequence[int], dtype: torch.dtype) -> Shared:
        mine = tuple(torch.empty(*shape, dtype=dtype, device=self.device) for _ in self.held)
        return Shared(mine, torch.tensor([t.data_ptr() for t in mine], dtype=torch.int64, device=self.device))

    def barrier(self, channel: int = 0) -> None:
        """Kernels of one stream run one after the other, and the streams of a layer wait for each other."""

    signal = wait = barrier


class Symmetric:
    """One rank a process and GPU, all GPUs reaching each other (NVLink or PCIe peer access).

    timeout: seconds that a barrier waits for the other ranks before it stops the program. Raises Error where symmetric
    memory cannot be had.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 600.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise Error("symmetric: torch.distributed has no process group; call init_process_group first")
        if not torch.cuda.is_available():
            raise Error("symmetric: torch sees no GPU; use Collective on CPU")
        self.group = group if group is not None else dist.distributed_c10d._get_default_group()
        self.ranks = dist.get_world_size(group)
        self.held: tuple[int, ...] = (dist.get_rank(group),)
        self._others = [rank for rank in range(self.ranks) if rank not in self.held]
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._milliseconds = round(timeout * 1e3)
        self._handle: Any = None
        self._handle = self._rendezvous(torch.uint8, (16,))[1]
        self._waited = [self._handle]  # whose signals somebody may wait for
        # A kernel may wait for all that run when it is loaded (CUDA's lazy loading); that of `release` must not then.
        torch.empty(self._handle.signal_pad_size // 4, dtype=torch.int32, device=self.device).fill_(1)

    def share(self, shape: Sequence[int], dtype: torch.dtype) -> Shared:
        mine, handle = self._rendezvous(dtype, shape)
        peers = [handle.get_buffer(rank, list(shape), dtype).data_ptr() for rank in range(self.ranks)]
        if any(address % 16 for address in peers):
            raise Error("symmetric: a buffer does not begin at a multiple of 16 bytes")
        return Shared((mine,), torch.tensor(peers, dtype=torch.int64, device=self.device))

    def adder(self, numbers: int, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that adds tensors over the ranks: y of each -> the sum, in memory of its own.

        y: at most so many numbers, a multiple of 16 bytes, bfloat16 or float32. One kernel, fit for a CUDA graph: every
        rank reads what all have and adds it in the order of the ranks, so all get the same bits. It waits for the
        others without end.
        """
        room, handle = self._rendezvous(dtype, (numbers,))
        self._waited.append(handle)
        name: Any = self.group.group_name

        def add(y: torch.Tensor) -> torch.Tensor:
            mine = room[: y.numel()].view(y.shape)
            summed: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(mine, y.contiguous(), "sum", name)
            return summed

        return add

    def release(self, seconds: float) -> None:
        """After a rank has ended: for so long, let kernels here that wait for it go on; their results are worthless."""
        (mine,), end = self.held, time.monotonic() + seconds
        torch.cuda.set_device(self.device)
        with suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream()):
            pads = [
                (rank == mine, handle.get_signal_pad(rank, [handle.signal_pad_size // 4], torch.int32))
                for handle in self._waited
                for rank in range(self.ranks)
            ]
            while time.monotonic() < end:
                for own, pad in pads:
                    # Who waits for a signal finds it here; who gives one finds the last one taken.
                    pad.fill_(1 if own else 0)
                torch.cuda.current_stream().synchronize()

    def barrier(self, channel: int = 0) -> None:
        self._handle.barrier(channel=channel, timeout_ms=self._milliseconds)

    def signal(self, channel: int) -> None:
        for rank in self._others:
            self._handle.put_signal(rank, channel, self._milliseconds)

    def wait(self, channel: int) -> None:
        for rank in self._others:
            self._handle.wait_signal(rank, channel, self._milliseconds)

    def gather(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        out = [torch.empty_like(rows[0]) for _ in range(self.ranks)]
        dist.all_gather(out, rows[0].contiguous(), group=self.group)
        return torch.stack(out)

    def _rendezvous(self, dtype: torch.dtype, shape: Sequence[int]) -> tuple[torch.Tensor, Any]:
        import torch.distributed._symmetric_memory as symm_mem

        try:
            mine = symm_mem.empty(*shape, dtype=dtype, device=self.device)
            return mine, symm_mem.rendezvous(mine, self.group)
        except RuntimeError as cause:
            raise Error(f"symmetric: these GPUs cannot share memory: {str(cause).splitlines()[0]}") from cause


__all__ = ["Direct", "Shared", "Symmetric", "Virtual"]
