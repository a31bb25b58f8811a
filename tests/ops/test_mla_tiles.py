"""The tables of the varlen kernels name every row once, with the keys or queries that belong to it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.ops.mla.tiles import key_tiles, query_tiles

CPU = torch.device("cpu")
CUTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6)


@given(CUTS, st.sampled_from([1, 8, 16]))
def test_query_tiles(cut: list[tuple[int, int]], M: int) -> None:
    queries = tuple(n for n, _ in cut)
    keys = tuple(n + more for n, more in cut)
    expected, row, key_row = {}, 0, 0
    for n, s in zip(queries, keys, strict=True):
        for t in range(n):
            expected[row + t] = (row + n, key_row, s, s - n + t)
        row, key_row = row + n, key_row + s
    found: dict[int, tuple[int, ...]] = {}
    work = []
    for first, end, key, count, position in query_tiles(queries, keys, M, True, CPU).tolist():
        for i in range(min(M, end - first)):
            assert first + i not in found
            found[first + i] = (end, key, count, position + i)
        work.append(min(position + M, count))
    assert found == expected
    assert work == sorted(work, reverse=True)


@given(CUTS, st.sampled_from([1, 8, 16]))
def test_key_tiles(cut: list[tuple[int, int]], C: int) -> None:
    queries = tuple(n for n, _ in cut)
    keys = tuple(n + more for n, more in cut)
    expected, row, key_row = {}, 0, 0
    for n, s in zip(queries, keys, strict=True):
        for i in range(s):
            expected[key_row + i] = (s, i, row, n)
        row, key_row = row + n, key_row + s
    found: dict[int, tuple[int, ...]] = {}
    for first, count, index, query_row, total in key_tiles(queries, keys, C, True, CPU).tolist():
        for i in range(min(C, count - index)):
            assert first + i not in found
            found[first + i] = (count, index + i, query_row, total)
    assert found == expected
