"""The planner as three small kernels: nothing read back, bit-equal to `plan_reference`.

`loads` adds the counts up. `pair_and_split` runs one warp a home rank, each of which repeats the whole pairing (at most
R - 1 steps) and then splits its own experts. `fall_back` returns at once where that fits; otherwise each of its
programs repeats capped fan-in (or the budget's rule) and writes its own home's columns again, or those of one-donor
where that moves less. Loops end when the work is done, so a plan with few moves takes few steps.

Counts are added up in int32: all ranks together have fewer than 2^31 rows.

Legend: R ranks, E experts, M = E / R experts at home, A attempts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton

from perilune.parallel.expert import planner_kernels as kernels
from perilune.parallel.expert.planner import Allocation, check
from perilune.parallel.expert.policy import Policy


def plan_triton(counts_RE: torch.Tensor, policy: Policy, domains: Sequence[int] | None = None) -> Allocation:
    """`plan_reference` on the device of counts_RE: same arguments, same result, same errors."""
    alloc_RE, rule, _ = allocate(counts_RE, policy, domains)
    return Allocation(alloc_RE, rule)


def allocate(
    counts_RE: torch.Tensor, policy: Policy, domains: Sequence[int] | None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(alloc_RE, rule, M): the fields of an `Allocation`."""
    ranks, experts = check(counts_RE, domains)
    home = experts // ranks
    counts_RE = counts_RE.contiguous()
    new = counts_RE.new_empty
    load_E, load_R = new(experts, dtype=torch.int32), new(ranks, dtype=torch.int32)
    alloc_RE, rule = torch.empty_like(counts_RE), new(1)
    # With domains the multi-donor rule has two attempts, the second without them.
    near, domain_R = _numbered(tuple(domains or [0] * ranks), counts_RE.device)
    attempts = ([near] if near > 1 else []) + [1]
    copies_AR, least = new(len(attempts), ranks, dtype=torch.int32), new(1, dtype=torch.int32)
    table = {"RP": triton.next_power_of_2(ranks), "MP": triton.next_power_of_2(home)}
    kernels.loads[(ranks,)](counts_RE, load_E, load_R, copies_AR, ranks, home, len(attempts), **table, num_warps=4)
    # A whole warp finds a largest value in one instruction, a part of one in several.
    shape = {name: max(32, padded) for name, padded in table.items()}
    if policy.kind in ("exact", "tolerant", "one_donor"):
        parts = policy.parts(ranks) if policy.kind == "tolerant" else 0
        for attempt, groups in enumerate(attempts):
            # The last program adds up what one-donor would move.
            kernels.pair_and_split[(ranks + 1,)](
                load_E,
                load_R,
                domain_R,
                copies_AR,
                least,
                alloc_RE,
                parts,
                policy.min_rows,
                ranks,
                home,
                groups,
                attempt,
                KIND=policy.kind,
                **shape,
                num_warps=1,
            )
    kernels.fall_back[(ranks,)](
        load_E,
        load_R,
        new(ranks, experts, dtype=torch.int32),
        copies_AR,
        least,
        alloc_RE,
        rule,
        ranks,
        home,
        home if policy.slots is None else policy.slots,
        len(attempts),
        KIND=policy.kind,
        **shape,
        num_warps=1,
    )
    return alloc_RE, rule, home


@lru_cache(maxsize=32)
def _numbered(domains: tuple[int, ...], device: torch.device) -> tuple[int, torch.Tensor]:
    """How many domains there are, and int32 [R] with their numbers counted from 0; kept, since making it waits."""
    known = sorted(set(domains))
    return len(known), torch.tensor([known.index(d) for d in domains], dtype=torch.int32, device=device)


__all__ = ["allocate", "plan_triton"]
