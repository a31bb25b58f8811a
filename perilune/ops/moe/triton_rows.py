"""The way to expert rows and back on the GPU: a stable counting sort, and sums over a token's rows in choice order.

The sort is three launches and no host synchronisation: each block of choices counts its experts; counts become
starting rows (experts in order, within an expert blocks in order); each block places its choices. Within a block the
place is the number of earlier choices of the same expert, so the order is that of a stable sort, every time.

Legend: T tokens, J choices a token, E experts, L width, R = T J rows, B choices of a block, P blocks.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_kernel(ids, counts, R, E, B: tl.constexpr, BE: tl.constexpr):
    """counts [P, E]: how many choices of block p go to expert e."""
    p = tl.program_id(0).to(tl.int64)
    i = p * B + tl.arange(0, B)
    e = tl.arange(0, BE)
    choice = tl.load(ids + i, mask=i < R, other=-1).to(tl.int32)
    inside = (choice >= 0) & (choice < E)
    found = tl.histogram(tl.where(inside, choice, 0), BE, mask=inside)
    tl.store(counts + p * E + e, found, mask=e < E)


@triton.jit
def start_kernel(counts, totals, P, E, BP: tl.constexpr, BE: tl.constexpr):
    """counts become the number of choices of the same expert in earlier blocks; totals [E]: of all blocks."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    carry = tl.zeros([BE], tl.int32)
    for first in range(0, P, BP):
        p = first + tl.arange(0, BP)
        at = counts + p.to(tl.int64)[:, None] * E + e[None, :]
        inside = (p < P)[:, None] & (e < E)[None, :]
        found = tl.load(at, mask=inside, other=0)
        tl.store(at, tl.cumsum(found, 0) - found + carry[None, :], mask=inside)
        carry += tl.sum(found, 0)
    tl.store(totals + e, carry, mask=e < E)


@triton.jit
def place_kernel(ids, starts, totals, order, offs, R, E, B: tl.constexpr, BE: tl.constexpr):
    """order [R] and (by the first block) offs [E]."""
    block = tl.program_id(0).to(tl.int64)
    i = block * B + tl.arange(0, B)
    e = tl.arange(0, BE)
    total = tl.load(totals + e, mask=e < E, other=0)
    ends = tl.cumsum(total, 0)
    if block == 0:
        tl.store(offs + e, ends, mask=e < E)
    choice = tl.load(ids + i, mask=i < R, other=-1).to(tl.int32)
    inside = (choice >= 0) & (choice < E)
    # Where this block's first choice of each expert goes.
    base = ends - total + tl.load(starts + block * E + e, mask=e < E, other=0)
    begin = tl.gather(base, tl.where(inside, choice, 0), 0)
    j = tl.arange(0, B)
    other = tl.load(ids + block * B + j, mask=block * B + j < R, other=-1).to(tl.int32)
    earlier = (choice[:, None] == other[None, :]) & (j[None, :] < j[:, None])
    row = begin + tl.sum(earlier.to(tl.int32), 1)
    tl.store(order + row, i.to(tl.int64), mask=inside)


@triton.jit
def sort_kernel(ids, order, offs, R, E, B: tl.constexpr, BE: tl.constexpr):
    """order [R] and offs [E] of at most B choices, by one program: what the three kernels above do, in one launch."""
    i = tl.arange(0, B)
    e = tl.arange(0, BE)
    choice = tl.load(ids + i, mask=i < R, other=E).to(tl.int32)
    inside = (choice >= 0) & (choice < E)
    found = tl.histogram(tl.where(inside, choice, 0), BE, mask=inside)
    tl.store(offs + e, tl.cumsum(found, 0), mask=e < E)
    key = tl.sort(tl.where(inside, choice, E) * B + i)
    tl.store(order + i, (key % B).to(tl.int64), mask=key < E * B)


@triton.jit
def invert_kernel(order, row_of_choice, R, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(row_of_choice + tl.load(order + r, mask=r < R, other=0), r, mask=r < R)


@triton.jit
def dispatch_kernel(x, row_of_choice, rows, L, J: tl.constexpr, BL: tl.constexpr):
    """rows[row of (t, j)] = x[t]: a token is read once and written J times."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BL + tl.arange(0, BL)
    value = tl.load(x + t * L + c, mask=c < L)
    for j in range(J):
        row = tl.load(row_of_choice + t * J + j).to(tl.int64)
        tl.store(rows + row * L + c, value, mask=c < L)


@triton.jit
def combine_kernel(rows, row_of_choice, weights, y, L, J: tl.constexpr, BL: tl.constexpr, WEIGHTED: tl.constexpr):
    """y[t] = sum_j w[t, j] rows[row of (t, j)], added in choice order in fp32, rounded once."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BL + tl.arange(0, BL)
    total = tl.zeros([BL], tl.float32)
    for j in range(J):
        row = tl.load(row_of_choice + t * J + j).to(tl.int64)
        value = tl.load(rows + row * L + c, mask=c < L, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + t * J + j)
        total += value
    tl.store(y + t * L + c, total.to(y.dtype.element_ty), mask=c < L)


@triton.jit
def combine_backward_kernel(d_y, rows, row_of_choice, weights, d_rows, d_weights, L, J: tl.constexpr, BL: tl.constexpr):
    """d_rows = w d_y and d_w = d_y . row, one program a token, which reads its d_y once."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BL)
    d = tl.load(d_y + t * L + c, mask=c < L, other=0.0).to(tl.float32)
    for j in range(J):
        row = tl.load(row_of_choice + t * J + j).to(tl.int64)
        w = tl.load(weights + t * J + j)
        value = tl.load(rows + row * L + c, mask=c < L, other=0.0).to(tl.float32)
        tl.store(d_weights + t * J + j, tl.sum(d * value, 0))
        tl.store(d_rows + row * L + c, (d * w).to(d_rows.dtype.element_ty), mask=c < L)
