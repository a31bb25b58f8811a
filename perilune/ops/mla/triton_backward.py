"""The backward kernels of varlen attention; weights are made again from the saved log-sum-exp.

One kernel holds a tile of keys and walks over the queries that see it (dk, dv), one holds a tile of queries and walks
over its keys (dq): no atomics, so gradients repeat bit for bit, at the price of two products made twice.

Legend: as in triton_forward; D = delta, sum_V d_o o.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.mla.triton_forward import LOG2E, RUNTIME


@triton.jit(do_not_specialize=("heads", "tokens"))
def delta_kernel(o_THV, d_o_THV, delta_HT, heads, tokens, d_o_stride, d_o_head, M: tl.constexpr, V: tl.constexpr):
    """delta_HT = sum over V of d_o o, for M rows of one head."""
    rows = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, V)[None, :]
    inside = rows < tokens
    o = tl.load(o_THV + (rows * heads + h)[:, None] * V + columns, mask=inside[:, None], other=0.0)
    d_o = tl.load(d_o_THV + (rows * d_o_stride + h * d_o_head)[:, None] + columns, mask=inside[:, None], other=0.0)
    tl.store(delta_HT + h * tokens + rows, tl.sum(o.to(tl.float32) * d_o.to(tl.float32), 1), mask=inside)


@triton.jit
def _keys_tile(
    d_k1, d_k2, d_v, k1, k2, v, q1_desc, q2_desc, d_o_desc, lse_T, delta_T,
    first, row, queries, q_column, o_column, positions, shift, scale,
    M: tl.constexpr, A: tl.constexpr, B: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries first .. first + M - 1 of a sequence against the keys held; everything is transposed, [keys, queries]."""
    t = first + tl.arange(0, M)
    q1 = q1_desc.load([row + first, q_column])
    d_o = d_o_desc.load([row + first, o_column])
    q2 = q1
    if B > 0:
        q2 = q2_desc.load([row + first, q_column + A])
    if MASKED:
        lse = tl.load(lse_T + row + t, mask=t < queries, other=float("inf"))
        delta = tl.load(delta_T + row + t, mask=t < queries, other=0.0)
        q1 = tl.where((t < queries)[:, None], q1, 0.0)
        q2 = tl.where((t < queries)[:, None], q2, 0.0)
        d_o = tl.where((t < queries)[:, None], d_o, 0.0)
    else:
        lse = tl.load(lse_T + row + t)
        delta = tl.load(delta_T + row + t)
    s = tl.dot(k1, q1.T, input_precision=PRECISION)
    if B > 0:
        s = tl.dot(k2, q2.T, s, input_precision=PRECISION)
    d_p = tl.dot(v, d_o.T, input_precision=PRECISION)
    p = tl.exp2(s * (scale * LOG2E) - (lse * LOG2E)[None, :])
    if MASKED:
        seen = (t < queries)[None, :]
        if CAUSAL:
            seen = seen & (positions[:, None] <= (t + shift)[None, :])
        p = tl.where(seen, p, 0.0)
    d_v = tl.dot(p.to(d_o.dtype), d_o, d_v, input_precision=PRECISION)
    d_s = (p * (d_p - delta[None, :])).to(q1.dtype)
    d_k1 = tl.dot(d_s, q1, d_k1, input_precision=PRECISION)
    if B > 0:
        d_k2 = tl.dot(d_s, q2, d_k2, input_precision=PRECISION)
    return d_k1, d_k2, d_v


@triton.jit(do_not_specialize=RUNTIME)
def keys_kernel(
    q1_desc, q2_desc, k1_desc, k2_desc, v_desc, d_o_desc, lse_HT, delta_HT, d_k_SHQ, d_v_SHV, table_X5,
    tiles, heads, tokens, k_width, v_width, o_width, scale,
    M: tl.constexpr, C: tl.constexpr, A: tl.constexpr, B: tl.constexpr, V: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of C keys. A row of the table: first key row, keys of the sequence, index of the first key in it,
    first query row, queries of the sequence."""
    pid = tl.program_id(0)
    h = pid // tiles
    entry = table_X5 + (pid % tiles) * 5
    key_row = tl.load(entry)
    keys = tl.load(entry + 1)
    index = tl.load(entry + 2)
    row = tl.load(entry + 3)
    queries = tl.load(entry + 4)
    shift = keys - queries
    positions = index + tl.arange(0, C)
    k1 = k1_desc.load([key_row, h * k_width])
    v = v_desc.load([key_row, h * v_width])
    k2 = k1
    if B > 0:
        k2 = k2_desc.load([key_row, h * k_width + A])
    lse_T = lse_HT + h.to(tl.int64) * tokens
    delta_T = delta_HT + h.to(tl.int64) * tokens
    start = 0
    whole = 0
    if CAUSAL:
        start = tl.maximum(index - shift, 0) // M * M
        # From here on every query sees every key of the tile.
        whole = tl.maximum(index + C - 1 - shift, 0)
        whole = (whole + M - 1) // M * M
    # Keys past the sequence's end only spoil their own rows, which are not stored.
    whole = tl.minimum(whole, queries)
    last = tl.maximum(queries // M * M, whole)
    d_k1 = tl.zeros([C, A], tl.float32)
    d_k2 = tl.zeros([C, B if B > 0 else 16], tl.float32)
    d_v = tl.zeros([C, V], tl.float32)
    for first in tl.range(start, whole, M, num_stages=STAGES):
        d_k1, d_k2, d_v = _keys_tile(
            d_k1, d_k2, d_v, k1, k2, v, q1_desc, q2_desc, d_o_desc, lse_T, delta_T,
            first, row, queries, h * (A + B), h * o_width, positions, shift, scale,
            M, A, B, True, CAUSAL, PRECISION,
        )  # fmt: skip
    for first in tl.range(whole, last, M, num_stages=STAGES):
        d_k1, d_k2, d_v = _keys_tile(
            d_k1, d_k2, d_v, k1, k2, v, q1_desc, q2_desc, d_o_desc, lse_T, delta_T,
            first, row, queries, h * (A + B), h * o_width, positions, shift, scale,
            M, A, B, False, CAUSAL, PRECISION,
        )  # fmt: skip
    for first in tl.range(last, queries, M, num_stages=STAGES):
        d_k1, d_k2, d_v = _keys_tile(
            d_k1, d_k2, d_v, k1, k2, v, q1_desc, q2_desc, d_o_desc, lse_T, delta_T,
            first, row, queries, h * (A + B), h * o_width, positions, shift, scale,
            M, A, B, True, CAUSAL, PRECISION,
        )  # fmt: skip
    at = ((key_row + tl.arange(0, C)).to(tl.int64) * heads + h)[:, None]
    inside = (positions < keys)[:, None]
    at_k = d_k_SHQ + at * (A + B) + tl.arange(0, A)[None, :]
    tl.store(at_k, (d_k1 * scale).to(d_k_SHQ.dtype.element_ty), mask=inside)
    if B > 0:
        at_k = d_k_SHQ + at * (A + B) + A + tl.arange(0, B)[None, :]
        tl.store(at_k, (d_k2 * scale).to(d_k_SHQ.dtype.element_ty), mask=inside)
    tl.store(d_v_SHV + at * V + tl.arange(0, V)[None, :], d_v.to(d_v_SHV.dtype.element_ty), mask=inside)


@triton.jit
def _queries_tile(
    d_q1, d_q2, q1, q2, d_o, lse, delta, k1_desc, k2_desc, v_desc,
    first, key_row, keys, k_column, v_column, positions, scale,
    C: tl.constexpr, A: tl.constexpr, B: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    k1 = k1_desc.load([key_row + first, k_column])
    v = v_desc.load([key_row + first, v_column])
    k2 = k1
    if B > 0:
        k2 = k2_desc.load([key_row + first, k_column + A])
    columns = first + tl.arange(0, C)
    if MASKED:
        k1 = tl.where((columns < keys)[:, None], k1, 0.0)
        k2 = tl.where((columns < keys)[:, None], k2, 0.0)
        v = tl.where((columns < keys)[:, None], v, 0.0)
    s = tl.dot(q1, k1.T, input_precision=PRECISION)
    if B > 0:
        s = tl.dot(q2, k2.T, s, input_precision=PRECISION)
    d_p = tl.dot(d_o, v.T, input_precision=PRECISION)
    p = tl.exp2(s * (scale * LOG2E) - lse[:, None])
    if MASKED:
        seen = columns[None, :] < keys
        if CAUSAL:
            seen = seen & (columns[None, :] <= positions[:, None])
        p = tl.where(seen, p, 0.0)
    d_s = (p * (d_p - delta[:, None])).to(k1.dtype)
    d_q1 = tl.dot(d_s, k1, d_q1, input_precision=PRECISION)
    if B > 0:
        d_q2 = tl.dot(d_s, k2, d_q2, input_precision=PRECISION)
    return d_q1, d_q2


@triton.jit(do_not_specialize=RUNTIME)
def queries_kernel(
    q1_desc, q2_desc, k1_desc, k2_desc, v_desc, d_o_desc, lse_HT, delta_HT, d_q_THQ, table_X5,
    tiles, heads, tokens, k_width, v_width, o_width, scale,
    M: tl.constexpr, C: tl.constexpr, A: tl.constexpr, B: tl.constexpr, V: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of M queries; the table is the forward kernel's."""
    pid = tl.program_id(0)
    h = pid // tiles
    entry = table_X5 + (pid % tiles) * 5
    row = tl.load(entry)
    row_end = tl.load(entry + 1)
    key_row = tl.load(entry + 2)
    keys = tl.load(entry + 3)
    position = tl.load(entry + 4)
    q1 = q1_desc.load([row, h * (A + B)])
    d_o = d_o_desc.load([row, h * o_width])
    q2 = q1
    if B > 0:
        q2 = q2_desc.load([row, h * (A + B) + A])
    rows = row + tl.arange(0, M)
    positions = position + tl.arange(0, M)
    inside = rows < row_end
    lse = tl.load(lse_HT + h.to(tl.int64) * tokens + rows, mask=inside, other=float("inf")) * LOG2E
    delta = tl.load(delta_HT + h.to(tl.int64) * tokens + rows, mask=inside, other=0.0)
    if CAUSAL:
        whole = (position + 1) // C * C
        end = tl.minimum(keys, position + M)
    else:
        whole = keys // C * C
        end = keys
    d_q1 = tl.zeros([M, A], tl.float32)
    d_q2 = tl.zeros([M, B if B > 0 else 16], tl.float32)
    for first in tl.range(0, whole, C, num_stages=STAGES):
        d_q1, d_q2 = _queries_tile(
            d_q1, d_q2, q1, q2, d_o, lse, delta, k1_desc, k2_desc, v_desc,
            first, key_row, keys, h * k_width, h * v_width, positions, scale, C, A, B, False, CAUSAL, PRECISION,
        )  # fmt: skip
    for first in tl.range(whole, end, C, num_stages=STAGES):
        d_q1, d_q2 = _queries_tile(
            d_q1, d_q2, q1, q2, d_o, lse, delta, k1_desc, k2_desc, v_desc,
            first, key_row, keys, h * k_width, h * v_width, positions, scale, C, A, B, True, CAUSAL, PRECISION,
        )  # fmt: skip
    at = (rows.to(tl.int64) * heads + h)[:, None] * (A + B)
    d_q = d_q_THQ.dtype.element_ty
    tl.store(d_q_THQ + at + tl.arange(0, A)[None, :], (d_q1 * scale).to(d_q), mask=inside[:, None])
    if B > 0:
        tl.store(d_q_THQ + at + A + tl.arange(0, B)[None, :], (d_q2 * scale).to(d_q), mask=inside[:, None])
