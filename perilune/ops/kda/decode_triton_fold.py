"""Triton kernels of KDA decode between steps: 64 entries into a matrix, and the window past accepted drafts.

Legend as in decode_call.py; pointer arguments carry the name of their tensor.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc,unused-ignore"

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.kda.decode_call import CAPACITY, CENTRE, GRID
from perilune.ops.kda.decode_triton_kernels import move_window

_CENTRE = tl.constexpr(CENTRE)
_CAPACITY = tl.constexpr(CAPACITY)
_GRID = tl.constexpr(GRID)
_BLOCK = tl.constexpr(16)
_RUNTIME = ["tokens", "heads"]


@triton.jit(do_not_specialize=_RUNTIME)
def fold_kernel(
    matrix_SHKV, k_SHRK, u_SHRV, g_SHRK, lengths_N, slots_N, matrices_N, target_N, heads,
    SAFE: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    n = tl.program_id(1)
    length = tl.load(lengths_N + n)
    slot = tl.load(slots_N + n).to(tl.int64)
    if (length < _GRID) | (slot < 0):
        return
    ck = tl.arange(0, K)
    cv = tl.arange(0, V)
    cr = tl.arange(0, _BLOCK)
    slab = slot * heads + h
    square = ck[:, None] * V + cv[None, :]
    S = tl.load(matrix_SHKV + (tl.load(matrices_N + n).to(tl.int64) * heads + h) * (K * V) + square)
    k_ring = k_SHRK + slab * (_CAPACITY * K)
    u_ring = u_SHRV + slab * (_CAPACITY * V)
    g_ring = g_SHRK + slab * (_CAPACITY * K)
    for block in range(_GRID // _BLOCK):
        rows = block * _BLOCK + cr
        # Keys come transposed, [K, R], ready to meet the corrections in a product over R.
        keys = tl.load(k_ring + rows[None, :] * K + ck[:, None]).to(tl.float32)
        written = tl.load(u_ring + rows[:, None] * V + cv[None, :]).to(tl.float32)
        total = tl.load(g_ring + (block * _BLOCK + _BLOCK - 1) * K + ck)
        if SAFE:
            keys = keys * tl.exp(total + _CENTRE)[:, None]
        else:
            each = tl.load(g_ring + rows[None, :] * K + ck[:, None])
            keys = keys * tl.exp(total[:, None] - each)
        S = tl.dot(keys, written, acc=S * tl.exp(total)[:, None], input_precision="ieee")
    # What is left of the tail, at most eight entries, moves to its start.
    rest = (cr[:, None] < length - _GRID) & (cr[:, None] < _CAPACITY - _GRID)
    key_at = cr[:, None] * K + ck[None, :]
    value_at = cr[:, None] * V + cv[None, :]
    k_rest = tl.load(k_ring + _GRID * K + key_at, mask=rest, other=0.0)
    u_rest = tl.load(u_ring + _GRID * V + value_at, mask=rest, other=0.0)
    g_rest = tl.load(g_ring + _GRID * K + key_at, mask=rest, other=0.0)
    tl.debug_barrier()
    target = tl.load(target_N + n).to(tl.int64)
    tl.store(matrix_SHKV + (target * heads + h) * (K * V) + square, S)
    tl.store(k_ring + key_at, k_rest, mask=rest)
    tl.store(u_ring + value_at, u_rest, mask=rest)
    tl.store(g_ring + key_at, g_rest, mask=rest)


@triton.jit(do_not_specialize=_RUNTIME)
def shift_kernel(
    q_THK, k_THK, v_THV, window_S3C, slots_N, accepted_N, q_stride, k_stride, v_stride, heads, tokens,
    K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    n = tl.program_id(1)
    slot = tl.load(slots_N + n).to(tl.int64)
    if slot < 0:
        return
    count = tl.load(accepted_N + n)
    ck = tl.arange(0, K)
    cv = tl.arange(0, V)
    first = n.to(tl.int64) * tokens
    channels = heads * (2 * K + V)
    q_window = window_S3C + slot * 3 * channels + h * K
    k_window = q_window + heads * K
    v_window = window_S3C + slot * 3 * channels + heads * 2 * K + h * V
    q_x = q_THK + first * q_stride + h * K
    k_x = k_THK + first * k_stride + h * K
    v_x = v_THV + first * v_stride + h * V
    move_window(q_x, q_window, count, q_stride, channels, ck)
    move_window(k_x, k_window, count, k_stride, channels, ck)
    move_window(v_x, v_window, count, v_stride, channels, cv)
