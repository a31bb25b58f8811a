"""Where each token of a packed batch sits in the 64-row chunks of its document.

The chunk grid is absolute in the document: position p is row p % 64 of chunk p // 64, whatever the call starts at.
Chunks are ordered step by step: first the first chunk of every sequence, then every second chunk, and so on, the
sequences with most chunks first, so that a step of the serial scan is one contiguous slice. Consecutive steps form
groups, which bound the memory that intermediates take.

Legend: T tokens, N sequences, H heads, C rows of a chunk (64), B chunk-heads of a group, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from perilune.errors import Error
from perilune.ops.sequences import Sequences

CHUNK = 64
# Elements of one [B, 64, K] tensor of a group: 2 MiB in fp32. Smaller groups pay more for calls than caches give back.
GROUP_ELEMENTS = 2**19


@dataclass(frozen=True)
class Group:
    """Some consecutive steps. first: index of the first step; counts: sequences alive at each.

    rows: where the group's rows lie among the rows of all groups. source: row in a [T * H, n] tensor of each row of
    [B, 64, n], in order; padding: the rows where no token sits, None when there are none.
    """

    first: int
    counts: tuple[int, ...]
    rows: slice
    source: torch.Tensor
    padding: torch.Tensor | None

    def load(self, x_Rn: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T * H, n] -> [B, 64, n], zeros where no token sits."""
        y_Rn = torch.index_select(x_Rn, 0, self.source, out=out)
        if self.padding is not None:
            y_Rn.index_fill_(0, self.padding, 0.0)
        return y_Rn.view(-1, CHUNK, x_Rn.shape[-1])

    def view(self, all_Rn: torch.Tensor) -> torch.Tensor:
        """The group's part [B, 64, n] of a tensor with the rows of all groups."""
        return all_Rn[self.rows].view(-1, CHUNK, all_Rn.shape[-1])


@dataclass(frozen=True)
class ChunkTable:
    """order_N: the sequence of each rank (most chunks first); rank: the rank of each sequence; groups of steps.

    rows: of all groups together. row_TH: the one of each token and head.
    """

    order_N: torch.Tensor
    rank: tuple[int, ...]
    groups: tuple[Group, ...]
    rows: int
    row_TH: torch.Tensor

    def tokens(self, x_Rn: torch.Tensor) -> torch.Tensor:
        """The rows of all groups [rows, n] -> [T, H, n]."""
        return x_Rn.index_select(0, self.row_TH.flatten()).view(*self.row_TH.shape, x_Rn.shape[-1])


@lru_cache(maxsize=16)
def chunk_table(sequences: Sequences, heads: int, width: int) -> ChunkTable:
    """The table of a cut for `heads` heads of at most `width` channels; cached, since every layer asks for the same."""
    first = [start // CHUNK for start in sequences.starts]
    chunks = [
        -(-(start + length) // CHUNK) - begin if length else 0
        for start, length, begin in zip(sequences.starts, sequences.lengths, first, strict=True)
    ]
    order = sorted(range(sequences.count), key=lambda n: -chunks[n])
    rank = [0] * sequences.count
    for r, n in enumerate(order):
        rank[n] = r
    counts: list[int] = []
    alive = sequences.count
    for step in range(max(chunks, default=0)):
        while chunks[order[alive - 1]] <= step:
            alive -= 1
        counts.append(alive)

    device, T = sequences.device, sequences.total
    first_N, rank_N, counts_S = (torch.tensor(x, dtype=torch.int64, device=device) for x in (first, rank, counts))
    step_T = sequences.positions_T // CHUNK - first_N[sequences.ids_T]
    slot_T = (counts_S.cumsum(0) - counts_S)[step_T] + rank_N[sequences.ids_T]
    head_H = torch.arange(heads, device=device)
    row_TH = ((slot_T * heads)[:, None] + head_H) * CHUNK + (sequences.positions_T % CHUNK)[:, None]
    rows = sum(counts) * heads * CHUNK
    source_R = torch.full((rows,), -1, dtype=torch.int64, device=device)
    source_R[row_TH.flatten()] = torch.arange(T * heads, device=device)

    groups, step, low = [], 0, 0
    limit = max(GROUP_ELEMENTS // (CHUNK * max(width, CHUNK)), 1)
    while step < len(counts):
        end, size = step + 1, counts[step] * heads
        while end < len(counts) and size + counts[end] * heads <= limit:
            size, end = size + counts[end] * heads, end + 1
        here = slice(low, low + size * CHUNK)
        padding = (source_R[here] < 0).nonzero()[:, 0]
        source = source_R[here].clamp(min=0)
        groups.append(Group(step, tuple(counts[step:end]), here, source, padding if len(padding) else None))
        step, low = end, here.stop
    order_N = torch.tensor(order, dtype=torch.int64, device=device)
    return ChunkTable(order_N, tuple(rank), tuple(groups), rows, row_TH)


def check_checkpoints(sequences: Sequences, checkpoints: tuple[tuple[int, ...], ...]) -> None:
    """Raise Error unless there is one tuple per sequence, of different multiples of 64 inside the sequence."""
    if len(checkpoints) != sequences.count:
        raise Error(f"checkpoints has {len(checkpoints)} entries; one tuple a sequence makes {sequences.count}")
    for n, (positions, start, length) in enumerate(zip(checkpoints, sequences.starts, sequences.lengths, strict=True)):
        for p in positions:
            if p % CHUNK or not start < p <= start + length:
                raise Error(f"checkpoints[{n}] has {p}; must be a multiple of {CHUNK} in ({start}, {start + length}]")
        if len(set(positions)) < len(positions):
            raise Error(f"checkpoints[{n}] is {positions}; each position once")


def checkpoint_marks(
    sequences: Sequences, table: ChunkTable, checkpoints: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, int], ...]:
    """(step, rank) of each checkpoint, in order: its state is that of the rank after the step."""
    return tuple(
        (p // CHUNK - 1 - start // CHUNK, rank)
        for positions, start, rank in zip(checkpoints, sequences.starts, table.rank, strict=True)
        for p in positions
    )
