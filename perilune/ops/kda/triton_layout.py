"""Where the chunks of a packed batch lie: small index tensors, built once a cut and kept.

The chunk grid is absolute in the document: a sequence that continues at token 100 begins in row 36 of its first
chunk, and rows before its first token are empty.

Legend: N sequences, C chunks in total (over all sequences).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import torch

from perilune.ops.sequences import Sequences

CHUNK = 64
TILE = 1024


@dataclass(frozen=True)
class Layout:
    """Index tensors on the device.

    table: int64 [C, 3] (token of row 0, which may lie before the sequence; first token; end token) of each chunk.
    cu: int64 [N+1] token offsets. first_chunk: int32 [N+1] chunk offsets. shift: int32 [N] empty rows at the start.
    lengths, starts: the cut, on the host.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
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
        lengths=lengths,
        starts=starts,
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

    The positions have passed `check_checkpoints`.
    """
    slots: list[int] = []
    count = 0
    for length, start, positions in zip(lengths, starts, checkpoints, strict=True):
        base = start // CHUNK * CHUNK
        mine = [-1] * (-(-(start + length - base) // CHUNK) if length else 0)
        for position in positions:
            mine[(position - base) // CHUNK - 1] = count
            count += 1
        slots += mine
    return torch.tensor(slots, dtype=torch.int32, device=device), count


@dataclass(frozen=True)
class Piece:
    """A run of chunks. tokens, chunks, sequences: where it lies in the batch; layout: its own, from its first token."""

    tokens: slice
    chunks: slice
    sequences: slice
    layout: Layout


@lru_cache(maxsize=32)
def pieces(lengths: tuple[int, ...], starts: tuple[int, ...], size: int, device: torch.device) -> tuple[Piece, ...]:
    """Pieces of about `size` tokens, cut between chunks; a sequence may go through several."""
    runs: list[dict[int, tuple[int, int]]] = [{}]  # of each piece: sequence to length and start
    room = size
    for n, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        position, end = start, start + length
        while position < end:
            if room <= 0:
                runs.append({})
                room = size
            stop = max((position + room) // CHUNK, position // CHUNK + 1) * CHUNK
            stop = end if end - stop < CHUNK else stop  # no piece for a rest
            runs[-1][n] = stop - position, position
            room = room - (stop - position) if stop == end else 0
            position = stop
    found = []
    token = chunk = 0
    for run in (r for r in runs if r):
        inside = range(min(run), max(run) + 1)
        parts, begins = zip(*(run.get(n, (0, 0)) for n in inside), strict=True)
        lay = _layout(parts, begins, device)
        tokens, chunks = slice(token, token + sum(parts)), slice(chunk, chunk + lay.chunks)
        found.append(Piece(tokens, chunks, slice(inside.start, inside.stop), lay))
        token, chunk = tokens.stop, chunks.stop
    return tuple(found)


@dataclass(frozen=True)
class Tiles:
    """The 1024-token tiles of a packed batch, counted from each document's start, as sequences of their own.

    layout: the same chunks, grouped by tile. first_tile: int32 [N+1], tiles of sequence n. Index tensors, int64:
    last: of each sequence its last tile (0 for an empty sequence); empty: the sequences without tokens;
    whole: [2, n], sequences that end on a multiple of 1024 and their last tiles.
    """

    layout: Layout
    first_tile: torch.Tensor
    last: torch.Tensor
    empty: torch.Tensor
    whole: torch.Tensor


def _cuts(length: int, start: int) -> list[int]:
    """Where the tiles of a sequence begin, and its end."""
    return [start, *range(start // TILE * TILE + TILE, start + length, TILE), start + length] if length else []


@lru_cache(maxsize=32)
def _tiles(lengths: tuple[int, ...], starts: tuple[int, ...], device: torch.device) -> Tiles:
    cuts = [_cuts(length, start) for length, start in zip(lengths, starts, strict=True)]
    parts = tuple(b - a for c in cuts for a, b in pairwise(c))
    begins = tuple(a for c in cuts for a in c[:-1])
    first = [0, *accumulate(max(len(c) - 1, 0) for c in cuts)]
    whole = [(n, first[n + 1] - 1) for n, c in enumerate(cuts) if c and c[-1] % TILE == 0]

    def put(values: list[int] | list[tuple[int, int]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Tiles(
        layout=_layout(parts, begins, device),
        first_tile=put(first, torch.int32),
        last=put([first[n + 1] - 1 if c else 0 for n, c in enumerate(cuts)]),
        empty=put([n for n, c in enumerate(cuts) if not c]),
        whole=put(whole).reshape(-1, 2).T,
    )


def tiles(sequences: Sequences, device: torch.device) -> Tiles:
    """The tiles of a cut; the same cut on the same device gives the same tensors."""
    return _tiles(sequences.lengths, sequences.starts, device)


@lru_cache(maxsize=32)
def tile_slots(
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    checkpoints: tuple[tuple[int, ...], ...],
    device: torch.device,
) -> torch.Tensor:
    """int64 [2, n]: the requested states that lie at the end of a tile, and those tiles."""
    pairs: list[tuple[int, int]] = []
    slot = first = 0
    for length, start, positions in zip(lengths, starts, checkpoints, strict=True):
        ends = _cuts(length, start)[1:]
        for position in positions:
            if position % TILE == 0:
                pairs.append((slot, first + ends.index(position)))
            slot += 1
        first += len(ends)
    return torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2).T


__all__ = ["CHUNK", "TILE", "Layout", "Piece", "Tiles", "checkpoint_slots", "layout", "pieces", "tile_slots", "tiles"]
