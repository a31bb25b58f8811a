"""`routes.source_of` and `routes.arrivals` as kernels: counted by block, then written, with nothing read back.

Legend: R ranks, G groups, B slots, T tokens, J choices a token, n choices, P payloads (token, destination rank),
K blocks of tokens; W = 2 R + 3 + B numbers that a rank tells; JP, KP: J and K rounded up to a power of two.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from perilune.parallel.expert.plan import Plan
from perilune.parallel.expert.rows_triton import destination_rows

# Choices that one program places.
CHOICES = 1024


def write_source(
    plan: Plan, ids_TJ: torch.Tensor, earlier_CE: torch.Tensor, refused: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of a `routes.Source`."""
    (T, J), ranks, slots = ids_TJ.shape, plan.ranks, plan.slots_RB.shape[1]
    # Rank and row in one number, which no row of a buffer reaches.
    room = (2**31 - 1) // ranks
    dst_TJ = destination_rows(plan, ids_TJ, earlier_CE, rank, room)
    JP = triton.next_power_of_2(J)
    BT = max(CHOICES // JP, 1)
    blocks = max(triton.cdiv(T, BT), 1)
    new = dst_TJ.new_empty
    counts_2RK = new(2 * ranks, blocks)
    place_n, token_P, tell_n2 = new(T * J), new(T * J), new(T * J, 2)
    told = new(2 * ranks + 3 + slots, dtype=torch.int64)
    _tally[(blocks,)](dst_TJ, counts_2RK, T, room, ranks, blocks, J=J, JP=JP, BT=BT, num_warps=4)
    _write_source[(blocks,)](
        dst_TJ,
        counts_2RK,
        refused,
        plan.ends_RG,
        plan.slots_RB,
        place_n,
        token_P,
        tell_n2,
        told,
        T,
        room,
        rank,
        ranks,
        plan.home,
        slots,
        blocks,
        J=J,
        JP=JP,
        BT=BT,
        KP=triton.next_power_of_2(blocks),
        BP=triton.next_power_of_2(max(slots, 1)),
        num_warps=4,
    )
    return place_n, token_P, tell_n2, told


def write_arrivals(
    tell_n2: torch.Tensor, told: torch.Tensor, rank: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(row_n, origin_n). told [R, W]."""
    n = tell_n2.shape[0]
    both_2n = tell_n2.new_empty(2, n)
    if n:
        ranks, width = told.shape
        _write_arrivals[(triton.cdiv(n, 1024),)](
            tell_n2, told, both_2n, n, rank, ranks, width, J=top_k, BLOCK=1024, num_warps=4
        )
    return both_2n[0], both_2n[1]


@triton.jit
def _tally(dst_ptr, counts_ptr, T, room, ranks, blocks, J: tl.constexpr, JP: tl.constexpr, BT: tl.constexpr):
    """Payloads, then choices, of a block of tokens for each rank."""
    block = tl.program_id(0)
    t, j = block * BT + tl.arange(0, BT), tl.arange(0, JP)
    dst = tl.load(dst_ptr + t[:, None] * J + j[None, :], mask=(t < T)[:, None] & (j < J)[None, :], other=-1)
    for d in range(0, ranks):
        hit = ((dst >= d * room) & (dst - d * room < room) & (dst >= 0)).to(tl.int32)
        each = tl.sum(hit, 1)
        tl.store(counts_ptr + d * blocks + block, tl.sum((each > 0).to(tl.int32), 0))
        tl.store(counts_ptr + (ranks + d) * blocks + block, tl.sum(each, 0))


@triton.jit
def _write_source(
    dst_ptr,
    counts_ptr,
    refused_ptr,
    ends_ptr,
    slots_ptr,
    place_ptr,
    token_ptr,
    tell_ptr,
    told_ptr,
    T,
    room,
    rank,
    ranks,
    home,
    slots,
    blocks,
    J: tl.constexpr,
    JP: tl.constexpr,
    BT: tl.constexpr,
    KP: tl.constexpr,
    BP: tl.constexpr,
):
    """Place a block's choices after those of the blocks before it, rank by rank; the first one tells what is known."""
    block = tl.program_id(0)
    t, j, k = block * BT + tl.arange(0, BT), tl.arange(0, JP), tl.arange(0, KP)
    at = t[:, None] * J + j[None, :]
    inside = (t < T)[:, None] & (j < J)[None, :]
    dst = tl.load(dst_ptr + at, mask=inside, other=-1)
    tl.store(place_ptr + at, tl.full((BT, JP), -1, tl.int32), mask=inside & (dst < 0))
    first_payload = 0
    first_choice = 0
    for d in range(0, ranks):
        hit = (dst >= d * room) & (dst - d * room < room) & (dst >= 0)
        one = hit.to(tl.int32)
        each = tl.sum(one, 1)
        has = (each > 0).to(tl.int32)
        payloads = tl.load(counts_ptr + d * blocks + k, mask=k < blocks, other=0)
        choices = tl.load(counts_ptr + (ranks + d) * blocks + k, mask=k < blocks, other=0)
        # Counted from the destination's first.
        payload = tl.sum(tl.where(k < block, payloads, 0), 0) + tl.cumsum(has, 0) - has
        choice = tl.sum(tl.where(k < block, choices, 0), 0) + tl.cumsum(each, 0) - each
        place = first_choice + choice[:, None] + tl.cumsum(one, 1) - one
        tl.store(place_ptr + at, place, mask=hit)
        tl.store(tell_ptr + place * 2, dst - d * room, mask=hit)
        tl.store(tell_ptr + place * 2 + 1, payload[:, None] * J + j[None, :], mask=hit)
        tl.store(token_ptr + first_payload + payload, t, mask=has > 0)
        all_payloads, all_choices = tl.sum(payloads, 0), tl.sum(choices, 0)
        if block == 0:
            tl.store(told_ptr + d, all_payloads.to(tl.int64))
            tl.store(told_ptr + ranks + d, all_choices.to(tl.int64))
        first_payload += all_payloads
        first_choice += all_choices
    if block == 0:
        told_ptr += 2 * ranks
        tl.store(told_ptr, tl.load(refused_ptr))
        ends_ptr += rank * (home + slots)
        tl.store(told_ptr + 1, tl.load(ends_ptr + home - 1).to(tl.int64))
        tl.store(told_ptr + 2, tl.load(ends_ptr + home + slots - 1).to(tl.int64))
        b = tl.arange(0, BP)
        tl.store(told_ptr + 3 + b, tl.load(slots_ptr + rank * slots + b, mask=b < slots, other=-1), mask=b < slots)


@triton.jit
def _write_arrivals(tell_ptr, told_ptr, out_ptr, n, rank, ranks, width, J: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Choices and payloads of the sources before the one that choice i came from.
    end = tl.zeros((), tl.int64)
    payloads = tl.zeros((), tl.int64)
    before = tl.zeros((BLOCK,), tl.int64)
    for s in range(0, ranks):
        end += tl.load(told_ptr + s * width + ranks + rank)
        payloads += tl.load(told_ptr + s * width + rank)
        before = tl.where(i >= end, payloads, before)
    row = tl.load(tell_ptr + i * 2, mask=i < n, other=0)
    payload = tl.load(tell_ptr + i * 2 + 1, mask=i < n, other=0)
    tl.store(out_ptr + i, row, mask=i < n)
    tl.store(out_ptr + n + i, payload + (before * J).to(tl.int32), mask=i < n)


__all__ = ["write_arrivals", "write_source"]
