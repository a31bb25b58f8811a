"""The planner as three small kernels: nothing read back, bit-equal to `plan_reference`.

`_loads` adds the counts up; `_pair_and_split` runs one warp a home rank, each of which repeats the whole pairing (at
most R - 1 steps) and then splits its own experts; `_fall_back` is one warp that returns at once where that fits, and
otherwise rewrites the allocation by capped fan-in, one-donor or a budget. Loops end when the work is done, so a plan
with few moves takes few steps.

Counts are added up in int32: all ranks together have fewer than 2^31 rows.

Legend: R ranks, E experts, M = E / R experts at home, A attempts; RP, MP: R and M rounded up to a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from perilune.parallel.expert.planner import RULES, Allocation, check
from perilune.parallel.expert.policy import PARTS, Policy

_HOME = tl.constexpr(RULES.index("home"))
_MULTI = tl.constexpr(RULES.index("multi-donor"))
_CAPPED = tl.constexpr(RULES.index("capped fan-in"))
_ONE = tl.constexpr(RULES.index("one-donor"))
_BUDGET = tl.constexpr(RULES.index("budget"))
_LEAST = tl.constexpr(-(2**31) + 1)


def plan_triton(counts_RE: torch.Tensor, policy: Policy, domains: Sequence[int] | None = None) -> Allocation:
    """`plan_reference` on the device of counts_RE: same arguments, same result, same errors."""
    alloc_RE, rule, _ = allocate(counts_RE, policy, domains)
    return Allocation(alloc_RE, rule)


def allocate(
    counts_RE: torch.Tensor, policy: Policy, domains: Sequence[int] | None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    ranks, experts = check(counts_RE, domains)
    home = experts // ranks
    counts_RE = counts_RE.contiguous()
    new = counts_RE.new_empty
    load_E, load_R = new(experts, dtype=torch.int32), new(ranks, dtype=torch.int32)
    alloc_RE, rule = torch.empty_like(counts_RE), new(1)
    shape = {"RP": triton.next_power_of_2(ranks), "MP": triton.next_power_of_2(home)}
    _loads[(ranks,)](counts_RE, load_E, load_R, ranks, home, **shape, num_warps=4)
    tolerant = policy.kind == "tolerant"
    parts = PARTS + round(policy.eps * PARTS) if tolerant else 0
    # With domains the multi-donor rule has two attempts, the second without them.
    near, domain_R = _numbered(tuple(domains or [0] * ranks), counts_RE.device)
    attempts = ([near] if near > 1 else []) + [1]
    copies_ARR = new(len(attempts), ranks, ranks, dtype=torch.int32)
    if policy.kind in ("exact", "tolerant", "one_donor"):
        for attempt, groups in enumerate(attempts):
            _pair_and_split[(ranks,)](
                load_E,
                load_R,
                domain_R,
                copies_ARR,
                alloc_RE,
                parts,
                policy.min_rows,
                ranks,
                home,
                groups,
                attempt,
                ONE_DONOR=policy.kind == "one_donor",
                TOLERANT=tolerant,
                **shape,
                num_warps=1,
            )
    # Moves are listed before they are applied: capped fan-in is dropped where one-donor moves less.
    slots = home if policy.slots is None else policy.slots
    moves = new(3, max(ranks * slots, 1), dtype=torch.int32)
    _fall_back[(1,)](
        load_E,
        load_R,
        new(experts, dtype=torch.int32),
        copies_ARR,
        alloc_RE,
        moves,
        rule,
        ranks,
        home,
        slots,
        moves.shape[1],
        len(attempts) - 1,
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


@triton.jit
def _loads(counts_ptr, load_ptr, load_R_ptr, ranks, home, RP: tl.constexpr, MP: tl.constexpr):
    """Program h: rows of each of home h's experts, and of all of them."""
    h = tl.program_id(0)
    r, m = tl.arange(0, RP), tl.arange(0, MP)
    inside = (r < ranks)[:, None] & (m < home)[None, :]
    at = counts_ptr + r[:, None] * (ranks * home) + h * home + m[None, :]
    load = tl.sum(tl.load(at, mask=inside, other=0).to(tl.int32), 0)
    tl.store(load_ptr + h * home + m, load, mask=m < home)
    tl.store(load_R_ptr + h, tl.sum(load, 0))


@triton.jit
def _first_max(x, index):
    """(largest value, its lowest index)."""
    most = tl.max(x, 0)
    return most, tl.min(tl.where(x == most, index, 2147483647), 0)


@triton.jit
def _at(x, index, i):
    return tl.sum(tl.where(index == i, x, 0), 0)


# Vectors of the serial loops are loaded, not computed from matrices: so each lane holds its share of them alone.


@triton.jit
def _even(load_R_ptr, ranks, r):
    """Load less capacity: equal shares, one more for the ranks with most rows where they do not divide."""
    load_R = tl.load(load_R_ptr + r, mask=r < ranks, other=0)
    total = tl.sum(load_R, 0)
    position = tl.zeros_like(r)
    for s in range(0, ranks):
        other = tl.load(load_R_ptr + s)
        position += ((other > load_R) | ((other == load_R) & (s < r))).to(tl.int32)
    return tl.where(r < ranks, load_R - total // ranks - (position < total % ranks).to(tl.int32), 0)


@triton.jit
def _pair_and_split(
    load_ptr,
    load_R_ptr,
    domain_ptr,
    copies_ptr,
    alloc_ptr,
    parts,
    min_rows,
    ranks,
    home,
    groups,
    attempt,
    ONE_DONOR: tl.constexpr,
    TOLERANT: tl.constexpr,
    RP: tl.constexpr,
    MP: tl.constexpr,
):
    """Program h: alloc[:, experts of h] and copies[attempt, h, :], unless an earlier attempt fitted."""
    h = tl.program_id(0)
    r, m = tl.arange(0, RP), tl.arange(0, MP)
    fits = False
    if attempt > 0:
        fits = _fits(copies_ptr + (attempt - 1) * ranks * ranks, ranks, home, RP)
    if not fits:
        if TOLERANT:
            load_R = tl.load(load_R_ptr + r, mask=r < ranks, other=0)
            total = tl.sum(load_R, 0).to(tl.int64)
            share = tl.full((), 1000000, tl.int64) * ranks
            limit = ((total * parts + share - 1) // share).to(tl.int32)
            balance = tl.where(r < ranks, load_R - limit, 0)
        else:
            balance = _even(load_R_ptr, ranks, r)
        if ONE_DONOR:
            quota = _pair_one(balance, h, ranks, r)
        else:
            excess, deficit = tl.maximum(balance, 0), tl.maximum(-balance, 0)
            quota = tl.zeros_like(r)
            if groups > 1:
                domain = tl.load(domain_ptr + r, mask=r < ranks, other=-1)
                for group in range(0, groups):
                    excess, deficit, quota = _pair_many(excess, deficit, quota, domain == group, h, r)
            excess, deficit, quota = _pair_many(excess, deficit, quota, r >= 0, h, r)
        copies_row_ptr = copies_ptr + (attempt * ranks + h) * ranks
        _split(quota, load_ptr, copies_row_ptr, alloc_ptr, h, min_rows, ranks, home, r, m)


@triton.jit
def _pair_many(excess, deficit, quota, able, h, r):
    most, donor = _first_max(tl.where(able, excess, 0), r)
    least, receiver = _first_max(tl.where(able, deficit, 0), r)
    while (most > 0) & (least > 0):
        rows = tl.minimum(most, least)
        excess -= tl.where(r == donor, rows, 0)
        deficit -= tl.where(r == receiver, rows, 0)
        quota += tl.where((r == receiver) & (donor == h), rows, 0)
        most, donor = _first_max(tl.where(able, excess, 0), r)
        least, receiver = _first_max(tl.where(able, deficit, 0), r)
    return excess, deficit, quota


@triton.jit
def _pair_one(balance, h, ranks, r):
    """The quotas of donor h; for h = -1 those of all donors, added up for each receiver."""
    quota = tl.zeros_like(r)
    most, donor = _first_max(tl.where(r < ranks, balance, _LEAST), r)
    while most > 0:
        lacking, receiver = _first_max(tl.where(r < ranks, -balance, _LEAST), r)
        balance = tl.where(r == receiver, 0, balance - tl.where(r == donor, lacking, 0))
        quota += tl.where((r == receiver) & ((donor == h) | (h < 0)), lacking, 0)
        most, donor = _first_max(tl.where(r < ranks, balance, _LEAST), r)
    return quota


@triton.jit
def _split(wanted, load_ptr, copies_row_ptr, alloc_ptr, h, min_rows, ranks, home, r, m):
    """Write home h's columns of the allocation: nothing elsewhere, then the moves, then what stays."""
    experts = ranks * home
    first = alloc_ptr + h * home
    inside = (r < ranks)[:, None] & (m < home)[None, :]
    tl.store(first + r[:, None] * experts + m[None, :], 0, mask=inside)
    tl.debug_barrier()
    left = tl.load(load_ptr + h * home + m, mask=m < home, other=0)
    copies, kept = tl.zeros_like(r), left
    want, u = _first_max(wanted, r)
    while want > 0:
        have, e = _first_max(tl.where(m < home, left, -1), m)
        rows = tl.minimum(have, want)
        left -= tl.where(m == e, rows, 0)
        wanted -= tl.where(r == u, rows, 0)
        if rows >= min_rows:
            # A pair of expert and receiver comes once: each step uses one of them up.
            tl.store(first + u * experts + e, rows.to(tl.int64))
            kept -= tl.where(m == e, rows, 0)
            copies += tl.where(r == u, 1, 0)
        want, u = _first_max(wanted, r)
    tl.store(first + h * experts + m, kept.to(tl.int64), mask=m < home)
    tl.store(copies_row_ptr + r, copies, mask=r < ranks)


@triton.jit
def _fits(copies_ptr, ranks, home, RP: tl.constexpr):
    r = tl.arange(0, RP)
    inside = (r < ranks)[:, None] & (r < ranks)[None, :]
    copies = tl.load(copies_ptr + r[:, None] * ranks + r[None, :], mask=inside, other=0)
    return tl.max(tl.sum(copies, 0), 0) <= home


@triton.jit
def _fall_back(
    load_ptr,
    load_R_ptr,
    left_ptr,
    copies_ptr,
    alloc_ptr,
    moves_ptr,
    rule_ptr,
    ranks,
    home,
    slots,
    longest,
    last,
    KIND: tl.constexpr,
    RP: tl.constexpr,
    MP: tl.constexpr,
):
    """The rule; and the allocation where multi-donor did not fit, or was not asked for."""
    r, m = tl.arange(0, RP), tl.arange(0, MP)
    inside = (r < ranks)[:, None] & (r < ranks)[None, :]
    if KIND == "off":
        _reset(load_ptr, alloc_ptr, ranks, home, RP, MP)
        tl.store(rule_ptr, _HOME)
    elif KIND == "one_donor":
        copies = tl.load(copies_ptr + r[:, None] * ranks + r[None, :], mask=inside, other=0)
        tl.store(rule_ptr, tl.where(tl.sum(tl.sum(copies, 0), 0) > 0, _ONE, _HOME).to(tl.int64))
    elif KIND == "budget":
        _reset(load_ptr, alloc_ptr, ranks, home, RP, MP)
        balance = _even(load_R_ptr, ranks, r)
        _copy(load_ptr, left_ptr, ranks * home)
        tl.debug_barrier()
        number, moved = _greedy(balance, left_ptr, moves_ptr, longest, slots, r, m, home, False)
        tl.debug_barrier()
        _apply(alloc_ptr, moves_ptr, longest, number, ranks, home)
        tl.store(rule_ptr, tl.where(number > 0, _BUDGET, _HOME).to(tl.int64))
    else:
        fitted = False
        for attempt in range(0, last + 1):
            if not fitted:
                start = copies_ptr + attempt * ranks * ranks
                if _fits(start, ranks, home, RP):
                    fitted = True
                    copies = tl.load(start + r[:, None] * ranks + r[None, :], mask=inside, other=0)
                    any_copy = tl.sum(tl.sum(copies, 0), 0) > 0
                    tl.store(rule_ptr, tl.where(any_copy, _MULTI, _HOME).to(tl.int64))
        if not fitted:
            balance = _even(load_R_ptr, ranks, r)
            least = tl.sum(_pair_one(balance, -1, ranks, r), 0)
            _copy(load_ptr, left_ptr, ranks * home)
            tl.debug_barrier()
            number, moved = _greedy(balance, left_ptr, moves_ptr, longest, home, r, m, home, True)
            if moved <= least:
                _reset(load_ptr, alloc_ptr, ranks, home, RP, MP)
                tl.debug_barrier()
                _apply(alloc_ptr, moves_ptr, longest, number, ranks, home)
                tl.store(rule_ptr, _CAPPED)
            else:
                for h in range(0, ranks):
                    quota = _pair_one(balance, h, ranks, r)
                    _split(quota, load_ptr, copies_ptr + h * ranks, alloc_ptr, h, 0, ranks, home, r, m)
                tl.store(rule_ptr, _ONE)


@triton.jit
def _copy(from_ptr, to_ptr, n):
    for start in range(0, n, 256):
        i = start + tl.arange(0, 256)
        tl.store(to_ptr + i, tl.load(from_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def _reset(load_ptr, alloc_ptr, ranks, home, RP: tl.constexpr, MP: tl.constexpr):
    """Every row at home."""
    r, m = tl.arange(0, RP), tl.arange(0, MP)
    experts = ranks * home
    inside = (r < ranks)[:, None] & (m < home)[None, :]
    load_RM = tl.load(load_ptr + r[:, None] * home + m[None, :], mask=inside, other=0)
    for u in range(0, ranks):
        here = tl.where(r[:, None] == u, load_RM, 0).to(tl.int64)
        tl.store(alloc_ptr + u * experts + r[:, None] * home + m[None, :], here, mask=inside)


@triton.jit
def _greedy(balance, left_ptr, moves_ptr, longest, slots, r, m, home, PRESS: tl.constexpr):
    """List the moves (expert, receiver, rows); returns their number and all their rows. Uses up left."""
    free = tl.zeros_like(r) + slots
    number, moved = 0, 0
    lacking, u = _first_max(tl.where(free > 0, tl.maximum(-balance, 0), 0), r)
    excess, h = _first_max(balance, r)
    while (lacking > 0) & (excess > 0):
        own = tl.load(left_ptr + h * home + m, mask=m < home, other=-1)
        have, e = _first_max(own, m)
        most = excess
        if PRESS:
            slots_left = _at(free, r, u)
            most = tl.maximum(excess, (lacking + slots_left - 1) // slots_left)
        rows = tl.minimum(tl.minimum(lacking, have), most)
        tl.store(moves_ptr + number, h * home + e)
        tl.store(moves_ptr + longest + number, u)
        tl.store(moves_ptr + 2 * longest + number, rows)
        tl.store(left_ptr + h * home + e, have - rows)
        balance += tl.where(r == u, rows, 0) - tl.where(r == h, rows, 0)
        free -= tl.where(r == u, 1, 0)
        number += 1
        moved += rows
        lacking, u = _first_max(tl.where(free > 0, tl.maximum(-balance, 0), 0), r)
        excess, h = _first_max(balance, r)
        # The next donor may be the same.
        tl.debug_barrier()
    return number, moved


@triton.jit
def _apply(alloc_ptr, moves_ptr, longest, number, ranks, home):
    experts = ranks * home
    for start in range(0, number, 32):
        i = start + tl.arange(0, 32)
        known = i < number
        e = tl.load(moves_ptr + i, mask=known, other=0)
        u = tl.load(moves_ptr + longest + i, mask=known, other=0)
        rows = tl.load(moves_ptr + 2 * longest + i, mask=known, other=0).to(tl.int64)
        tl.atomic_add(alloc_ptr + u * experts + e, rows, mask=known)
        tl.atomic_add(alloc_ptr + (e // home) * experts + e, -rows, mask=known)


__all__ = ["allocate", "plan_triton"]
