"""The forward kernel of varlen attention: online softmax over tiles of keys, one tile of queries of one head a program.

The width of queries and keys is A + B with both powers of two (192 = 128 + 64), so that a logit is two products.
Loads go through tensor descriptors (the copy engine on Hopper). Rows of a neighbouring document that share a tile
are masked; values there may be NaN and are replaced by zeros before they meet a zero weight.

Legend: T query tokens, S key tokens, H heads, V value width, A + B query/key width, X tiles, M queries and
C keys a tile.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Not worth a compilation of their own.
RUNTIME = ("tiles", "heads", "tokens")


@triton.jit
def product(a1, a2, b1_desc, b2_desc, row, column, B: tl.constexpr, PRECISION: tl.constexpr):
    """a b^T over both parts of the width; b's rows from `row`, its columns from `column`."""
    A: tl.constexpr = a1.shape[1]
    b1 = b1_desc.load([row, column])
    s = tl.dot(a1, b1.T, input_precision=PRECISION)
    if B > 0:
        b2 = b2_desc.load([row, column + A])
        s = tl.dot(a2, b2.T, s, input_precision=PRECISION)
    return s


@triton.jit
def _tile(
    acc, z, m, q1, q2, k1_desc, k2_desc, v_desc, first, key_row, keys, k_column, v_column, positions, scale,
    C: tl.constexpr, B: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: accumulator, sum of weights and largest raw score of each row; scale is in base 2."""
    s = product(q1, q2, k1_desc, k2_desc, key_row + first, k_column, B, PRECISION)
    v = v_desc.load([key_row + first, v_column])
    if MASKED:
        columns = first + tl.arange(0, C)
        seen = columns[None, :] < keys
        if CAUSAL:
            seen = seen & (columns[None, :] <= positions[:, None])
        s = tl.where(seen, s, float("-inf"))
        v = tl.where((columns < keys)[:, None], v, 0.0)
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = m_new * scale
    p = tl.exp2(s * scale - shift[:, None])
    shrink = tl.exp2(m * scale - shift)
    z = z * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, z, m_new


@triton.jit(do_not_specialize=RUNTIME)
def forward_kernel(
    q1_desc, q2_desc, k1_desc, k2_desc, v_desc, o_THV, lse_HT, max_HX, table_X5,
    tiles, heads, tokens, k_width, v_width, scale,
    M: tl.constexpr, C: tl.constexpr, A: tl.constexpr, B: tl.constexpr, V: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """k_width, v_width: numbers from a head to the next in k and in v (q is k_width wide only if it says so).

    A row of the table: first query row, end of the sequence's query rows, first key row, keys, position of the
    first query among the keys. Tiles of one head run side by side, so that its keys are read from L2.
    """
    pid = tl.program_id(0)
    h = pid // tiles
    entry = table_X5 + (pid % tiles) * 5
    row = tl.load(entry)
    row_end = tl.load(entry + 1)
    key_row = tl.load(entry + 2)
    keys = tl.load(entry + 3)
    position = tl.load(entry + 4)
    k_column = h * k_width
    v_column = h * v_width
    q1 = q1_desc.load([row, h * (A + B)])
    q2 = q1
    if B > 0:
        q2 = q2_desc.load([row, h * (A + B) + A])
    rows = row + tl.arange(0, M)
    positions = position + tl.arange(0, M)
    base2 = scale * LOG2E
    if CAUSAL:
        whole = (position + 1) // C * C
        end = tl.minimum(keys, position + M)
    else:
        whole = keys // C * C
        end = keys
    m = tl.full([M], float("-inf"), tl.float32)
    z = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, V], tl.float32)
    for first in tl.range(0, whole, C, num_stages=STAGES):
        acc, z, m = _tile(
            acc, z, m, q1, q2, k1_desc, k2_desc, v_desc, first, key_row, keys, k_column, v_column, positions, base2,
            C, B, False, CAUSAL, PRECISION,
        )  # fmt: skip
    for first in tl.range(whole, end, C, num_stages=STAGES):
        acc, z, m = _tile(
            acc, z, m, q1, q2, k1_desc, k2_desc, v_desc, first, key_row, keys, k_column, v_column, positions, base2,
            C, B, True, CAUSAL, PRECISION,
        )  # fmt: skip
    inside = rows < row_end
    acc = tl.where((z > 0.0)[:, None], acc / z[:, None], 0.0)
    at = (rows.to(tl.int64) * heads + h) * V
    tl.store(o_THV + at[:, None] + tl.arange(0, V)[None, :], acc.to(o_THV.dtype.element_ty), mask=inside[:, None])
    tl.store(lse_HT + h.to(tl.int64) * tokens + rows, m * scale + tl.log2(z) * LN2, mask=inside)
    tl.store(max_HX + h * tiles + pid % tiles, tl.max(tl.where(inside, m, float("-inf")), 0) * scale)
