"""How tensors get from rank to rank: two operations, over all ranks in one process or one rank a process.

A call takes and returns one tensor for each rank that lives in this process (`held`). All ranks make the same calls
in the same order; there is no other rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from perilune.errors import Error
from perilune.parallel.collectives import all_gather

Sizes = Sequence[Sequence[int]]


class Transport(Protocol):
    """`ranks` in all, of which `held` (ascending) live in this process."""

    ranks: int
    held: tuple[int, ...]

    def gather(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """int64 [n] from every rank -> [R, n], the same on all."""
        ...

    def exchange(
        self,
        sends: Sequence[torch.Tensor],
        sent: Sizes,
        received: Sizes,
        into: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Rank r's tensor is cut into sent[r][d] rows for each rank d; returned is what it gets, in rank order.

        into: contiguous tensors of just that many rows, in which it is returned.
        """
        ...


class Local:
    """R virtual ranks in one process, on CPU or one GPU."""

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise Error(f"local: ranks is {ranks}; must be >= 1")
        self.ranks, self.held = ranks, tuple(range(ranks))

    def gather(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(rows))

    def exchange(
        self,
        sends: Sequence[torch.Tensor],
        sent: Sizes,
        received: Sizes,
        into: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        pieces = [x.split(list(sizes)) for x, sizes in zip(sends, sent, strict=True)]
        got = [torch.cat([pieces[source][rank] for source in self.held]) for rank in self.held]
        return got if into is None else [room.copy_(x) for room, x in zip(into, got, strict=True)]


class Collective:
    """One rank a process over a torch.distributed group: gloo on CPU, NCCL on GPUs and across nodes.

    The group's own timeout bounds how long a rank waits for one that failed.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise Error("collective: torch.distributed has no process group; call init_process_group first")
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.held: tuple[int, ...] = (dist.get_rank(group),)

    def gather(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        (row,) = rows
        out_Rn = row.new_empty(self.ranks, row.shape[0])
        all_gather(out_Rn.view(-1), row.contiguous(), group=self.group)
        return out_Rn

    def exchange(
        self,
        sends: Sequence[torch.Tensor],
        sent: Sizes,
        received: Sizes,
        into: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        (x,), (out_sizes,), (in_sizes,) = sends, sent, received
        got = x.new_empty(sum(in_sizes), *x.shape[1:]) if into is None else into[0]
        # As words: not every backend knows every dtype, and rows are only moved.
        words, got_words = (x.contiguous(), got) if x.dtype in _WORDS else (_words(x.contiguous()), _words(got))
        dist.all_to_all_single(got_words, words, list(in_sizes), list(out_sizes), group=self.group)
        return [got]


_WORDS = (torch.int32, torch.uint8)


def _words(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, one row a row."""
    width = x.shape[1:].numel()
    dtype = torch.int32 if width * x.element_size() % 4 == 0 else torch.uint8
    return x.view(x.shape[0], width).view(dtype)


__all__ = ["Collective", "Local", "Transport"]
