"""From an allocation to rows: which copies a rank holds, where each expert's rows stand, where each choice goes.

A rank's rows are grouped: its M own experts by id, then its copies by id; each group is padded to a multiple of
`align`. The rows of a split expert are dealt local first (a source keeps what its own rank computes), the rest in
order of source and destination; in a group, the local rows come first.

Legend: R ranks, E experts, M = E / R experts at home, B slots, G = M + B groups, T tokens, J choices a token,
n = T J flattened choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perilune.parallel.expert.planner import Allocation, plan_reference
from perilune.parallel.expert.planner_torch import plan_torch
from perilune.parallel.expert.policy import Policy


@dataclass(frozen=True)
class Plan:
    """What every rank knows about one layer's rows.

    counts_RE, alloc_RE int64: rows of expert e from source rank r, and computed on rank r. rule int64 [1] (`RULES`).
    slots_RB int64: the expert copied to each slot, ascending, -1 for an idle slot at the end.
    ends_RG int32: where each group ends, padding included (the `offs` of `perilune.ops.moe.experts`).
    rows_RG int64: rows in each group, padding excluded.
    starts_RE int64: the first row of expert e on rank r, where it has rows there.
    """

    counts_RE: torch.Tensor
    alloc_RE: torch.Tensor
    rule: torch.Tensor
    slots_RB: torch.Tensor
    ends_RG: torch.Tensor
    rows_RG: torch.Tensor
    starts_RE: torch.Tensor

    @property
    def ranks(self) -> int:
        return self.counts_RE.shape[0]

    @property
    def home(self) -> int:
        """M, the experts every rank is home to."""
        return self.counts_RE.shape[1] // self.ranks


def plan(counts_RE: torch.Tensor, policy: Policy, domains: Sequence[int] | None = None, align: int = 1) -> Plan:
    """Plan from counts_RE int64 [R, E]: the reference planner on CPU, `plan_triton` on CUDA, else `plan_torch`."""
    if counts_RE.device.type == "cuda":
        # Only here: triton is not needed, and on some machines not there, without a GPU.
        from perilune.parallel.expert.layout_triton import plan_and_lay_out

        return plan_and_lay_out(counts_RE, policy, domains, align)
    planner = plan_reference if counts_RE.device.type == "cpu" else plan_torch
    allocation = planner(counts_RE, policy, domains)
    return lay_out(counts_RE, allocation, slots_for(policy, *counts_RE.shape), align)


def slots_for(policy: Policy, ranks: int, experts: int) -> int:
    """B: slots for copies on every rank; never more than there are experts elsewhere."""
    return min(policy.slots_of(experts // ranks), experts - experts // ranks)


def lay_out(counts_RE: torch.Tensor, allocation: Allocation, slots: int, align: int) -> Plan:
    """Slots and row groups of every rank. The allocation has at most `slots` copies on a rank."""
    alloc_RE = allocation.alloc_RE
    ranks, experts = alloc_RE.shape
    expert_E = torch.arange(experts, device=alloc_RE.device)
    own_RM = expert_E.view(ranks, -1)
    remote_RE = (alloc_RE > 0).scatter(1, own_RM, False)
    # The E of an idle slot sorts last and is the spare column below.
    copied_RB = torch.where(remote_RE, expert_E, experts).sort(1).values[:, :slots]
    expert_RG = torch.cat([own_RM, copied_RB], 1)
    spare_RE = torch.cat([alloc_RE, alloc_RE.new_zeros(ranks, 1)], 1)
    rows_RG = spare_RE.gather(1, expert_RG)
    padded_RG = -(-rows_RG // align) * align
    ends_RG = padded_RG.cumsum(1)
    starts_RE = torch.zeros_like(spare_RE).scatter(1, expert_RG, ends_RG - padded_RG)[:, :experts].contiguous()
    slots_RB = torch.where(copied_RB < experts, copied_RB, -1)
    return Plan(counts_RE, alloc_RE, allocation.rule, slots_RB, ends_RG.to(torch.int32), rows_RG, starts_RE)


def destinations(
    plan: Plan, ids_TJ: torch.Tensor, rank: int, earlier_CE: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rank_TJ, row_TJ) int64: where each choice of source `rank` is computed; -1, -1 for an id of -1.

    A pure function of the plan and the rank's own ids (int64, counted in plan.counts_RE), without host reads.
    earlier_CE: what `rows_triton.count_choices` gave for these ids.
    """
    if ids_TJ.numel() == 0:
        return torch.empty_like(ids_TJ), torch.empty_like(ids_TJ)
    if earlier_CE is not None:
        from perilune.parallel.expert.rows_triton import destination_rows

        # Both in one number, which no row of a buffer reaches.
        room = (2**31 - 1) // plan.ranks
        both_TJ = destination_rows(plan, ids_TJ, earlier_CE, rank, room).long()
        routed_TJ = both_TJ >= 0
        return torch.where(routed_TJ, both_TJ // room, -1), torch.where(routed_TJ, both_TJ % room, -1)
    local_RE = torch.minimum(plan.counts_RE, plan.alloc_RE)
    # Where a source's remaining choices begin, and a destination's remaining rows end, on expert e's own number line.
    begin_E = (plan.counts_RE - local_RE)[:rank].sum(0)
    end_RE = (plan.alloc_RE - local_RE).cumsum(0)
    experts = begin_E.shape[0]
    id_n = ids_TJ.reshape(-1)
    routed_n = id_n >= 0
    index_n = _index_in_expert(id_n, experts)
    id_n = id_n.clamp(min=0)
    kept_n = local_RE[rank].gather(0, id_n)
    remote_n = index_n - kept_n + begin_E.gather(0, id_n)
    # One search over the number lines of all experts laid end to end.
    length = plan.counts_RE.sum() + 1
    ends_ER = end_RE.t() + torch.arange(experts, device=id_n.device).unsqueeze(1) * length
    rank_n = torch.searchsorted(ends_ER.reshape(-1), id_n * length + remote_n, right=True) - id_n * plan.ranks
    rank_n = rank_n.clamp(0, plan.ranks - 1)
    at_n = rank_n * experts + id_n
    before_n = (end_RE - (plan.alloc_RE - local_RE)).view(-1).gather(0, at_n)
    row_n = local_RE.view(-1).gather(0, at_n) + remote_n - before_n
    stays_n = index_n < kept_n
    rank_n = torch.where(stays_n, rank, rank_n)
    row_n = torch.where(stays_n, index_n, row_n)
    row_n = row_n + plan.starts_RE.reshape(-1).gather(0, rank_n * experts + id_n)
    return (
        torch.where(routed_n, rank_n, -1).view(ids_TJ.shape),
        torch.where(routed_n, row_n, -1).view(ids_TJ.shape),
    )


def count(ids_TJ: torch.Tensor, experts: int) -> torch.Tensor:
    """int64 [E]: choices of each expert; ids of -1 are not counted."""
    counts_E = torch.zeros(experts + 1, dtype=torch.int64, device=ids_TJ.device)
    return counts_E.scatter_add_(0, ids_TJ.reshape(-1) + 1, torch.ones_like(ids_TJ.reshape(-1)))[1:]


def _index_in_expert(id_n: torch.Tensor, experts: int) -> torch.Tensor:
    """How many earlier choices went to the same expert."""
    order_n = torch.argsort(id_n, stable=True)
    first_E = torch.searchsorted(id_n[order_n], torch.arange(-1, experts, device=id_n.device))
    place_n = torch.arange(id_n.shape[0], device=id_n.device) - first_E[id_n[order_n] + 1]
    return torch.empty_like(id_n).scatter_(0, order_n, place_n)


__all__ = ["Plan", "count", "destinations", "lay_out", "plan"]
