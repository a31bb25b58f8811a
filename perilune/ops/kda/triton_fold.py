"""Fold the maps of a document's tiles: S -> M S + B from the first tile to the last, every state on the way kept.

One program owns a slice of the value dim of one head of one document. Products are float32 without tf32, in a fixed
order: the chain of maps must not drift, and its bits must not depend on the batch or on matmul settings.

Legend: N sequences, H heads, K key dim, V value dim.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold_kernel(
    M, B, initial, entry, after, first_tile, H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """first_tile [N+1]: tiles of sequence n. entry, after [tiles, H, K, V]: filled with each tile's states."""
    pid = tl.program_id(0)
    part = pid % (V // BV)
    h = pid // (V // BV) % H
    n = pid // (V // BV * H)
    rows = tl.arange(0, K)[:, None]
    cols = part * BV + tl.arange(0, BV)[None, :]
    inner = tl.arange(0, BK)
    state = rows * V + cols
    if INITIAL:
        S = tl.load(initial + (n.to(tl.int64) * H + h) * (K * V) + state)
    else:
        S = tl.zeros([K, BV], tl.float32)
    first = tl.load(first_tile + n).to(tl.int64)
    for i in range(tl.load(first_tile + n + 1) - tl.load(first_tile + n)):
        th = (first + i) * H + h
        tl.store(entry + th * (K * V) + state, S)
        tl.debug_barrier()  # the state is read back below, by other threads than wrote it
        S = tl.load(B + th * (K * V) + state)
        for j in tl.static_range(K // BK):
            m = tl.load(M + th * (K * K) + rows * K + (j * BK + inner)[None, :])
            s = tl.load(entry + th * (K * V) + (j * BK + inner)[:, None] * V + cols)
            S = tl.dot(m, s, acc=S, input_precision="ieee")
        tl.store(after + th * (K * V) + state, S)


__all__ = ["fold_kernel"]
