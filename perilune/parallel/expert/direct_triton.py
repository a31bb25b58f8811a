"""Kernels that write rows, weights and results into other ranks' memory.

A rank's memory is reached through a table of addresses, int64 [R]: buffers of virtual ranks in one process, or
symmetric memory of several GPUs. Rows beyond a rank's last group are neither read nor written.

Legend: R ranks, E experts, M experts at home, B slots, G groups, T tokens, J choices a token, N rows of a buffer,
L width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# What sums are added up in.
WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def _at(table_ptr, rank, like_ptr):
    """The address of `rank`'s memory as a pointer of like_ptr's type; buffers begin at multiples of 16 bytes."""
    return tl.multiple_of(tl.load(table_ptr + rank).to(like_ptr.dtype), 16)


@triton.jit
def hold(nanoseconds):
    """Do nothing for so long."""
    start = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - start < nanoseconds:
        pass


@triton.jit
def push_counts(counts_ptr, table_ptr, rank, experts, BLOCK: tl.constexpr):
    """This rank's counts [E] to row `rank` of every rank's [R, E]. Grid (R, blocks of E)."""
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = _at(table_ptr, tl.program_id(0), counts_ptr)
    tl.store(to + rank * experts + e, tl.load(counts_ptr + e, mask=e < experts, other=0), mask=e < experts)


@triton.jit
def push_rows(
    x_ptr,
    weights_ptr,
    dst_ptr,
    rows_table_ptr,
    origin_table_ptr,
    back_table_ptr,
    weights_table_ptr,
    index_like_ptr,
    first_choice,
    rows,
    width,
    top_k,
    ROUTE: tl.constexpr,
    JP: tl.constexpr,
    LP: tl.constexpr,
):
    """Program t: token t's row once to each rank that computes it.

    With ROUTE also, for each choice: the row that holds its payload there, where its result goes (first_choice plus its
    number), and its weight.
    """
    t = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, JP)
    column = tl.arange(0, LP)
    x = tl.load(x_ptr + t * width + column, mask=column < width)
    dst = tl.load(dst_ptr + t * top_k + j, mask=j < top_k, other=-1)
    routed = dst >= 0
    rank, row = dst // rows, dst % rows
    same = (rank[:, None] == rank[None, :]) & routed[None, :]
    first = tl.min(tl.where(same, j[None, :], JP), 1)
    primary = tl.sum(tl.where(first[:, None] == j[None, :], row[None, :], 0), 1)
    if ROUTE:
        origin_at = tl.load(origin_table_ptr + rank, mask=routed, other=0).to(index_like_ptr.dtype)
        tl.store(origin_at + row, primary, mask=routed)
        back_at = tl.load(back_table_ptr + rank, mask=routed, other=0).to(index_like_ptr.dtype)
        tl.store(back_at + row, first_choice + t.to(tl.int32) * top_k + j, mask=routed)
        weights_at = tl.load(weights_table_ptr + rank, mask=routed, other=0).to(weights_ptr.dtype)
        weight = tl.load(weights_ptr + t * top_k + j, mask=routed, other=0)
        tl.store(weights_at + row, weight, mask=routed)
    payload = tl.where(routed & (first == j), dst, -1)
    for i in range(0, top_k):
        to = tl.sum(tl.where(j == i, payload, 0), 0)
        if to >= 0:
            base = _at(rows_table_ptr, to // rows, x_ptr)
            tl.store(base + (to % rows).to(tl.int64) * width + column, x, mask=column < width)


@triton.jit
def mark_padding(ends_ptr, counts_ptr, origin_ptr, back_ptr, weights_ptr, BLOCK: tl.constexpr):
    """Program g: the padding of group g has no payload, no result and no weight."""
    g = tl.program_id(0)
    end = tl.load(ends_ptr + g)
    start = tl.load(ends_ptr + g - 1, mask=g > 0, other=0)
    row = start + tl.load(counts_ptr + g).to(tl.int32) + tl.arange(0, BLOCK)
    tl.store(origin_ptr + row, -1, mask=row < end)
    tl.store(back_ptr + row, -1, mask=row < end)
    tl.store(weights_ptr + row, 0.0, mask=row < end)


@triton.jit
def expand(
    rows_ptr,
    copied_ptr,
    origin_ptr,
    weights_ptr,
    copied_weights_ptr,
    ends_ptr,
    home,
    groups,
    width,
    WEIGHTS: tl.constexpr,
    LP: tl.constexpr,
):
    """Program n: row n from where its token's payload arrived; rows of copied experts go to a buffer from its row 0."""
    n = tl.program_id(0)
    if n < tl.load(ends_ptr + groups - 1):
        origin = tl.load(origin_ptr + n)
        cut = tl.load(ends_ptr + home - 1)
        column = tl.arange(0, LP)
        if (origin != n) | (n >= cut):
            x = tl.load(rows_ptr + origin.to(tl.int64) * width + column, mask=(column < width) & (origin >= 0), other=0)
            if n < cut:
                tl.store(rows_ptr + n.to(tl.int64) * width + column, x, mask=column < width)
            else:
                tl.store(copied_ptr + (n - cut).to(tl.int64) * width + column, x, mask=column < width)
        if WEIGHTS and n >= cut:
            tl.store(copied_weights_ptr + n - cut, tl.load(weights_ptr + n))


@triton.jit
def return_rows(out_ptr, copied_ptr, back_ptr, table_ptr, ends_ptr, home, groups, choices, width, LP: tl.constexpr):
    """Program n: the result of row n, of own or of copied experts, to the rank and choice that it is for."""
    n = tl.program_id(0)
    if n < tl.load(ends_ptr + groups - 1):
        to = tl.load(back_ptr + n)
        cut = tl.load(ends_ptr + home - 1)
        column = tl.arange(0, LP)
        if to >= 0:
            if n < cut:
                x = tl.load(out_ptr + n.to(tl.int64) * width + column, mask=column < width)
            else:
                x = tl.load(copied_ptr + (n - cut).to(tl.int64) * width + column, mask=column < width)
            base = _at(table_ptr, to // choices, out_ptr)
            tl.store(base + (to % choices).to(tl.int64) * width + column, x, mask=column < width)


@triton.jit
def return_numbers(own_ptr, copied_ptr, back_ptr, table_ptr, ends_ptr, home, groups, choices, BLOCK: tl.constexpr):
    """The same for one number a row."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end, cut = tl.load(ends_ptr + groups - 1), tl.load(ends_ptr + home - 1)
    to = tl.load(back_ptr + n, mask=n < end, other=-1)
    own = tl.load(own_ptr + n, mask=(to >= 0) & (n < cut), other=0)
    copied = tl.load(copied_ptr + n - cut, mask=(to >= 0) & (n >= cut), other=0)
    base = tl.load(table_ptr + to // choices, mask=to >= 0, other=0).to(own_ptr.dtype)
    tl.store(base + to % choices, tl.where(n < cut, own, copied), mask=to >= 0)


@triton.jit
def sum_choices(y_ptr, results_ptr, dst_ptr, width, top_k, WIDE: tl.constexpr, LP: tl.constexpr):
    """Program t: y_t = sum of the results of its routed choices, in order; cast once."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, LP)
    total = tl.zeros((LP,), WIDE)
    for j in range(0, top_k):
        if tl.load(dst_ptr + t * top_k + j) >= 0:
            at = results_ptr + (t * top_k + j) * width + column
            total += tl.load(at, mask=column < width, other=0).to(WIDE)
    tl.store(y_ptr + t * width + column, total.to(y_ptr.dtype.element_ty), mask=column < width)


@triton.jit
def list_copies(slots_ptr, jobs_ptr, slot_ptr, rank, ranks, home, slots, BLOCK: tl.constexpr):
    """jobs: how many of rank's experts are copied, then where to (rank B + slot). slot [M, R]: -1 or its slot there."""
    m_r = tl.arange(0, BLOCK)
    for start in range(0, home * ranks, BLOCK):
        tl.store(slot_ptr + start + m_r, -1, mask=start + m_r < home * ranks)
    tl.debug_barrier()
    number = 0
    for start in range(0, ranks * slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        e = tl.load(slots_ptr + i, mask=i < ranks * slots, other=-1).to(tl.int32)
        mine = (e >= 0) & (e // home == rank)
        tl.store(jobs_ptr + number + tl.cumsum(mine.to(tl.int32), 0), i, mask=mine)
        tl.store(slot_ptr + (e - rank * home) * ranks + i // slots, i % slots, mask=mine)
        number += tl.sum(mine.to(tl.int32), 0)
    tl.store(jobs_ptr, number)


@triton.jit
def push_experts(own_ptr, slots_ptr, jobs_ptr, table_ptr, rank, home, slots, words, BLOCK: tl.constexpr):
    """Own weights, `words` numbers an expert, to the slots in the job list. Any grid."""
    pieces = (words + BLOCK - 1) // BLOCK
    total = tl.load(jobs_ptr) * pieces
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        job = tl.load(jobs_ptr + 1 + work // pieces)
        e = tl.load(slots_ptr + job).to(tl.int64) - rank * home
        i = (work % pieces) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(own_ptr + e * words + i, mask=i < words)
        to = _at(table_ptr, job // slots, own_ptr)
        tl.store(to + (job % slots).to(tl.int64) * words + i, x, mask=i < words)


@triton.jit
def add_copies(own_ptr, slot_ptr, table_ptr, ranks, home, words, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients of own experts plus those of their copies in order of rank, in place, cast once. Any grid."""
    pieces = (words + BLOCK - 1) // BLOCK
    for m in range(0, home):
        any_copy = False
        for r in range(0, ranks):
            any_copy = any_copy | (tl.load(slot_ptr + m * ranks + r) >= 0)
        if any_copy:
            for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
                i = piece * BLOCK + tl.arange(0, BLOCK)
                total = tl.load(own_ptr + i, mask=i < words).to(WIDE)
                for r in range(0, ranks):
                    slot = tl.load(slot_ptr + m * ranks + r)
                    if slot >= 0:
                        base = _at(table_ptr, r, own_ptr)
                        total += tl.load(base + slot.to(tl.int64) * words + i, mask=i < words).to(WIDE)
                tl.store(own_ptr + i, total.to(own_ptr.dtype.element_ty), mask=i < words)
        own_ptr += words


__all__ = [
    "WIDE",
    "add_copies",
    "expand",
    "hold",
    "list_copies",
    "mark_padding",
    "push_counts",
    "push_experts",
    "push_rows",
    "return_numbers",
    "return_rows",
    "sum_choices",
]
