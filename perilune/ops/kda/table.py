"""Where each token of a packed batch sits in the 64-row chunks of its document.

The chunk grid is absolute in the document: position p is row p % 64 of chunk p // 64, whatever the call starts at.
Chunks are stored step by step: first the first chunk of every sequence, then every second chunk, and so on, the
sequences with most chunks first. A step of the serial scan is then one contiguous slice.

Legend: T tokens, N sequences, X chunks of all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from perilune.errors import Error
from perilune.ops.sequences import Sequences

CHUNK = 64


@dataclass(frozen=True)
class ChunkTable:
    """rows_T: flat row (chunk * 64 + row) of each token. order_N: the sequence of each rank (most chunks first).

    counts: sequences alive at each step; offsets: first chunk of each step, one more at the end (= X).
    full: every row of every chunk holds a token.
    """

    rows_T: torch.Tensor
    order_N: torch.Tensor
    counts: tuple[int, ...]
    offsets: tuple[int, ...]
    rank: tuple[int, ...]
    full: bool

    @property
    def chunks(self) -> int:
        """X."""
        return self.offsets[-1]

    def pad(self, x_Tn: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [X, 64, ...], zeros where no token sits."""
        shape = (self.chunks * CHUNK, *x_Tn.shape[1:])
        padded = x_Tn.new_empty(shape) if self.full else x_Tn.new_zeros(shape)
        padded.index_copy_(0, self.rows_T, x_Tn)
        return padded.unflatten(0, (self.chunks, CHUNK))

    def unpad(self, x_XCn: torch.Tensor) -> torch.Tensor:
        """[X, 64, ...] -> [T, ...]."""
        return x_XCn.flatten(0, 1).index_select(0, self.rows_T)


@lru_cache(maxsize=32)
def chunk_table(sequences: Sequences) -> ChunkTable:
    """The table of a cut; cached, since every layer of a model asks for the same one."""
    first = [start // CHUNK for start in sequences.starts]
    chunks = [
        -(-(start + length) // CHUNK) - begin if length else 0
        for start, length, begin in zip(sequences.starts, sequences.lengths, first, strict=True)
    ]
    order = sorted(range(sequences.count), key=lambda n: -chunks[n])
    rank = [0] * sequences.count
    for r, n in enumerate(order):
        rank[n] = r
    counts, offsets = [], [0]
    alive = sequences.count
    for step in range(max(chunks, default=0)):
        while chunks[order[alive - 1]] <= step:
            alive -= 1
        counts.append(alive)
        offsets.append(offsets[-1] + alive)
    device = sequences.device
    first_N, rank_N, offset_S = (torch.tensor(v, dtype=torch.int64, device=device) for v in (first, rank, offsets))
    step_T = sequences.positions_T // CHUNK - first_N[sequences.ids_T]
    slot_T = offset_S[step_T] + rank_N[sequences.ids_T]
    return ChunkTable(
        rows_T=slot_T * CHUNK + sequences.positions_T % CHUNK,
        order_N=torch.tensor(order, dtype=torch.int64, device=device),
        counts=tuple(counts),
        offsets=tuple(offsets),
        rank=tuple(rank),
        full=sequences.total == offsets[-1] * CHUNK,
    )


def checkpoint_slots(
    sequences: Sequences, table: ChunkTable, checkpoints: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """For each checkpoint, in order, the chunk after which its state is read, grouped by step: (chunk, ...).

    Raises Error unless there is one tuple per sequence and each position is a multiple of 64 inside the sequence.
    """
    if len(checkpoints) != sequences.count:
        raise Error(f"checkpoints has {len(checkpoints)} entries; give one tuple for each of {sequences.count} sequences")
    slots = []
    for n, positions in enumerate(checkpoints):
        start, length = sequences.starts[n], sequences.lengths[n]
        for p in positions:
            if p % CHUNK or not start < p <= start + length:
                raise Error(
                    f"checkpoints[{n}] has {p}; must be a multiple of {CHUNK} with {start} < position <= {start + length}"
                )
            slots.append(table.offsets[p // CHUNK - 1 - start // CHUNK] + table.rank[n])
    return tuple(slots)
