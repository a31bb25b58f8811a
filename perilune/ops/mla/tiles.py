"""Which rows each program of the varlen kernels holds: small index tables, built once a cut and kept.

Legend: X tiles.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from perilune.ops.upload import upload


@lru_cache(maxsize=64)
def query_tiles(
    queries: tuple[int, ...], keys: tuple[int, ...], M: int, causal: bool, device: torch.device
) -> torch.Tensor:
    """int32 [X, 5]: first query row, end of the sequence's rows, first key row, keys, position of the first query.

    The tiles with the most keys come first, so that the last programs to run are short.
    """
    sequence, first, offsets = _cut(queries, M)
    key_offsets, key_counts = np.concatenate([[0], np.cumsum(keys, dtype=np.int64)]), np.asarray(keys, dtype=np.int64)
    query_counts = np.asarray(queries, dtype=np.int64)
    position = key_counts[sequence] - query_counts[sequence] + first
    columns = (
        offsets[sequence] + first,
        offsets[sequence] + query_counts[sequence],
        key_offsets[sequence],
        key_counts[sequence],
        position,
    )
    work = np.minimum(position + M, key_counts[sequence]) if causal else key_counts[sequence]
    return _table(columns, work, device)


@lru_cache(maxsize=64)
def key_tiles(
    queries: tuple[int, ...], keys: tuple[int, ...], C: int, causal: bool, device: torch.device
) -> torch.Tensor:
    """int32 [X, 5]: first key row, keys of the sequence, index of the first key in it, first query row, queries."""
    sequence, first, offsets = _cut(keys, C)
    query_offsets = np.concatenate([[0], np.cumsum(queries, dtype=np.int64)])
    key_counts, query_counts = np.asarray(keys, dtype=np.int64), np.asarray(queries, dtype=np.int64)
    columns = (
        offsets[sequence] + first,
        key_counts[sequence],
        first,
        query_offsets[sequence],
        query_counts[sequence],
    )
    hidden = np.maximum(first - (key_counts - query_counts)[sequence], 0) if causal else 0
    return _table(columns, query_counts[sequence] - hidden, device)


def _cut(lengths: tuple[int, ...], tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each tile its sequence and its first place in it; and the offsets of the sequences."""
    length = np.asarray(lengths, dtype=np.int64)
    count = -(-length // tile)
    sequence = np.repeat(np.arange(len(lengths)), count)
    before = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
    first = (np.arange(before[-1]) - before[sequence]) * tile
    return sequence, first, np.concatenate([[0], np.cumsum(length)])


def _table(columns: tuple[np.ndarray, ...], work: np.ndarray, device: torch.device) -> torch.Tensor:
    order = np.argsort(-work, kind="stable")
    return upload(np.stack(columns, axis=1)[order], torch.int32, device)


__all__ = ["key_tiles", "query_tiles"]
