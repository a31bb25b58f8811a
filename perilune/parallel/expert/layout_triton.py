"""Slots and row groups of every rank in one kernel, bit-equal to `plan.lay_out`.

Legend: R ranks, E experts, M experts at home, B slots, G = M + B groups; EP, BP: E and B rounded up to a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from perilune.parallel.expert.plan import Plan, slots_for
from perilune.parallel.expert.planner_triton import allocate
from perilune.parallel.expert.policy import Policy


def plan_and_lay_out(counts_RE: torch.Tensor, policy: Policy, domains: Sequence[int] | None, align: int) -> Plan:
    """`plan.plan` with this planner."""
    alloc_RE, rule, home = allocate(counts_RE, policy, domains)
    ranks, experts = counts_RE.shape
    slots = slots_for(policy, ranks, experts)
    new = counts_RE.new_empty
    slots_RB, rows_RG = new(ranks, slots), new(ranks, home + slots)
    ends_RG = new(ranks, home + slots, dtype=torch.int32)
    starts_RE = new(ranks, experts)
    _lay_out[(ranks,)](
        alloc_RE,
        slots_RB,
        ends_RG,
        rows_RG,
        starts_RE,
        experts,
        home,
        slots,
        align,
        EP=triton.next_power_of_2(experts),
        BP=triton.next_power_of_2(max(slots, 1)),
        num_warps=4,
    )
    return Plan(counts_RE, alloc_RE, rule, slots_RB, ends_RG, rows_RG, starts_RE)


@triton.jit
def _lay_out(
    alloc_ptr,
    slots_ptr,
    ends_ptr,
    rows_ptr,
    starts_ptr,
    experts,
    home,
    slots,
    align,
    EP: tl.constexpr,
    BP: tl.constexpr,
):
    d = tl.program_id(0)
    e, b = tl.arange(0, EP), tl.arange(0, BP)
    inside = e < experts
    groups = home + slots
    rows = tl.load(alloc_ptr + d * experts + e, mask=inside, other=0)
    own = inside & (e // home == d)
    copied = inside & (e // home != d) & (rows > 0)
    padded = ((rows.to(tl.int32) + align - 1) // align) * align
    own_padded, copied_padded = tl.where(own, padded, 0), tl.where(copied, padded, 0)
    own_total, copied_total = tl.sum(own_padded, 0), tl.sum(copied_padded, 0)
    slot = tl.cumsum(copied.to(tl.int32), 0) - 1
    ends = tl.where(own, tl.cumsum(own_padded, 0), own_total + tl.cumsum(copied_padded, 0))
    group = tl.where(own, e - d * home, home + slot)
    held = own | copied
    tl.store(ends_ptr + d * groups + group, ends, mask=held)
    tl.store(rows_ptr + d * groups + group, rows, mask=held)
    tl.store(slots_ptr + d * slots + slot, e.to(tl.int64), mask=copied)
    tl.store(starts_ptr + d * experts + e, tl.where(held, ends - padded, 0).to(tl.int64), mask=inside)
    idle = (b < slots) & (b >= tl.sum(copied.to(tl.int32), 0))
    tl.store(slots_ptr + d * slots + b, -1, mask=idle)
    tl.store(rows_ptr + d * groups + home + b, 0, mask=idle)
    tl.store(ends_ptr + d * groups + home + b, own_total + copied_total, mask=idle)


__all__ = ["plan_and_lay_out"]
