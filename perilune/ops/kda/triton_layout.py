"""Where the chunks of a packed batch lie: small index tensors, built once a cut and kept.

The chunk grid is absolute in the document: a sequence that continues at token 100 begins in row 36 of its first
chunk, and rows before its first token are empty.

Legend: N sequences, C chunks in total (over all sequences).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from perilune.errors import Error
from perilune.ops.sequences import Sequences

CHUNK = 64
TILE = 1024


@dataclass(frozen=True)
class Layout:
    """Index tensors on the device.

    table: int64 [C, 3] (token of row 0, which may lie before the sequence; first token; end token) of each chunk.
    cu: int64 [N+1] token offsets. first_chunk: int32 [N+1] chunk offsets. shift: int32 [N] empty rows at the start.
    """

    chunks: int
    table: torch.Tensor
    cu: torch.Tensor
    first_chunk: torch.Tensor
    shift: torch.Tensor


@lru_cache(maxsize=32)
def _layout(lengths: tuple[int, ...], starts: tuple[int, ...], device: torch.device) -> Layout:
    length = np.asarray(lengths, dtype=np.int64)
    shift = np.asarray(starts, dtype=np.int64) % CHUNK
    count = np.where(length > 0, -(-(shift + length) // CHUNK), 0)
    cu = np.concatenate([[0], np.cumsum(length)])
    first = np.concatenate([[0], np.cumsum(count)])
    sequence = np.repeat(np.arange(len(lengths)), count)
    index = np.arange(first[-1]) - first[sequence]
    table = np.stack([cu[sequence] - shift[sequence] + CHUNK * index, cu[sequence], cu[sequence + 1]], axis=1)

    def put(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(array).to(dtype).to(device)

    return Layout(
        chunks=int(first[-1]),
        table=put(table.reshape(-1, 3), torch.int64),
        cu=put(cu, torch.int64),
        first_chunk=put(first, torch.int32),
        shift=put(shift, torch.int32),
    )


def layout(sequences: Sequences, device: torch.device) -> Layout:
    """The chunks of a cut; the same cut on the same device gives the same tensors."""
    return _layout(sequences.lengths, sequences.starts, device)


@lru_cache(maxsize=32)
def checkpoint_slots(
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    checkpoints: tuple[tuple[int, ...], ...],
    device: torch.device,
) -> tuple[torch.Tensor, int]:
    """int32 [C]: which requested state each chunk's end is (-1: none), and how many are requested.

    Raises Error for a position off the 64 grid, outside its sequence, or requested twice.
    """
    if len(checkpoints) != len(lengths):
        raise Error(
            f"checkpoints has {len(checkpoints)} entries but there are {len(lengths)} sequences; one tuple each"
        )
    slots: list[int] = []
    count = 0
    for n, (length, start, positions) in enumerate(zip(lengths, starts, checkpoints, strict=True)):
        base = start // CHUNK * CHUNK
        chunks = -(-(start + length - base) // CHUNK) if length else 0
        mine = [-1] * chunks
        for position in positions:
            if position % CHUNK or not start < position <= start + length:
                raise Error(
                    f"checkpoints[{n}] has {position}; must be a multiple of {CHUNK} in ({start}, {start + length}]"
                )
            at = (position - base) // CHUNK - 1
            if mine[at] >= 0:
                raise Error(f"checkpoints[{n}] has {position} twice; each position once")
            mine[at] = count
            count += 1
        slots += mine
    return torch.tensor(slots, dtype=torch.int32, device=device), count


@dataclass(frozen=True)
class Tiles:
    """The 1024-token tiles of a packed batch, counted from each document's start, as sequences of their own.

    layout: the same chunks, grouped by tile. before: for each tile its predecessor in the same sequence or -1.
    sequence: the sequence of each tile. last: the last tile of each sequence, -1 for an empty sequence.
    """

    layout: Layout
    before: tuple[int, ...]
    sequence: tuple[int, ...]
    last: tuple[int, ...]


@lru_cache(maxsize=32)
def _tiles(lengths: tuple[int, ...], starts: tuple[int, ...], device: torch.device) -> Tiles:
    rows: list[tuple[int, int, int, int]] = []  # length, start, tile before, sequence
    last: list[int] = []
    for n, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        position, previous = start, -1
        while position < start + length:
            stop = min(position // TILE * TILE + TILE, start + length)
            rows.append((stop - position, position, previous, n))
            position, previous = stop, len(rows) - 1
        last.append(previous)
    parts, begins, before, sequence = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Tiles(_layout(parts, begins, device), before, sequence, tuple(last))


def tiles(sequences: Sequences, device: torch.device) -> Tiles:
    """The tiles of a cut; the same cut on the same device gives the same tensors."""
    return _tiles(sequences.lengths, sequences.starts, device)


__all__ = ["CHUNK", "TILE", "Layout", "Tiles", "checkpoint_slots", "layout", "tiles"]
