"""Kernels of `planner_triton`: pairing of donors and receivers, splitting of experts, and the rules to fall back on.

Program h writes the columns of home h's experts in the allocation, whichever rule is used. Vectors of the serial loops
are loaded, not computed from matrices: so each lane holds its share of them alone.

Legend: R ranks, E experts, M = E / R experts at home; RP, MP: R and M rounded up to a power of two, in the loops to a
warp at least; h, u: home (donor) and receiver; e: an expert by its place at home.
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.parallel.expert.planner import RULES

_HOME = tl.constexpr(RULES.index("home"))
_MULTI = tl.constexpr(RULES.index("multi-donor"))
_CAPPED = tl.constexpr(RULES.index("capped fan-in"))
_ONE = tl.constexpr(RULES.index("one-donor"))
_BUDGET = tl.constexpr(RULES.index("budget"))
_LEAST = tl.constexpr(-(2**31) + 1)


@triton.jit
def loads(counts_ptr, load_ptr, load_R_ptr, copies_ptr, ranks, home, attempts, RP: tl.constexpr, MP: tl.constexpr):
    """Program h: rows of each of home h's experts, and of all of them; no copies on rank h yet."""
    h = tl.program_id(0)
    r, m = tl.arange(0, RP), tl.arange(0, MP)
    inside = (r < ranks)[:, None] & (m < home)[None, :]
    at = counts_ptr + r[:, None] * (ranks * home) + h * home + m[None, :]
    load = tl.sum(tl.load(at, mask=inside, other=0).to(tl.int32), 0)
    tl.store(load_ptr + h * home + m, load, mask=m < home)
    tl.store(load_R_ptr + h, tl.sum(load, 0))
    for attempt in range(0, attempts):
        tl.store(copies_ptr + attempt * ranks + h, 0)


@triton.jit
def pair_and_split(
    load_ptr,
    load_R_ptr,
    domain_ptr,
    copies_ptr,
    least_ptr,
    alloc_ptr,
    parts,
    min_rows,
    ranks,
    home,
    groups,
    attempt,
    KIND: tl.constexpr,
    RP: tl.constexpr,
    MP: tl.constexpr,
):
    """Program h: alloc[:, experts of h], unless an earlier attempt fitted; program R: rows that one-donor would move.

    copies[attempt, u] counts the copies that rank u would hold.
    """
    h = tl.program_id(0)
    r, m = tl.arange(0, RP), tl.arange(0, MP)
    if h == ranks:
        tl.store(least_ptr, tl.sum(_pair_one(_even(load_R_ptr, ranks, r), -1, ranks, r), 0))
    else:
        fits = False
        if attempt > 0:
            fits = _most_copies(copies_ptr, attempt - 1, ranks, r) <= home
        if not fits:
            if KIND == "tolerant":
                load_R = tl.load(load_R_ptr + r, mask=r < ranks, other=0)
                total = tl.sum(load_R, 0).to(tl.int64)
                share = tl.full((), 1000000, tl.int64) * ranks
                limit = ((total * parts + share - 1) // share).to(tl.int32)
                balance = tl.where(r < ranks, load_R - limit, 0)
            else:
                balance = _even(load_R_ptr, ranks, r)
            if KIND == "one_donor":
                quota = _pair_one(balance, h, ranks, r)
            else:
                excess, deficit = tl.maximum(balance, 0), tl.maximum(-balance, 0)
                quota = tl.zeros_like(r)
                if groups > 1:
                    domain = tl.load(domain_ptr + r, mask=r < ranks, other=-1)
                    for group in range(0, groups):
                        excess, deficit, quota = _pair_many(excess, deficit, quota, domain == group, h, r)
                excess, deficit, quota = _pair_many(excess, deficit, quota, r >= 0, h, r)
            copies = _split(quota, load_ptr, alloc_ptr, h, min_rows, ranks, home, r, m)
            tl.atomic_add(copies_ptr + attempt * ranks + r, copies, mask=copies > 0, sem="relaxed")


@triton.jit
def fall_back(
    load_ptr,
    load_R_ptr,
    left_ptr,
    copies_ptr,
    least_ptr,
    alloc_ptr,
    rule_ptr,
    ranks,
    home,
    slots,
    attempts,
    KIND: tl.constexpr,
    RP: tl.constexpr,
    MP: tl.constexpr,
):
    """The rule; and alloc[:, experts of h] again where multi-donor did not fit, or was not asked for.

    left: R E numbers of scratch.
    """
    h = tl.program_id(0)
    r, m = tl.arange(0, RP), tl.arange(0, MP)
    left_ptr += h * ranks * home
    if KIND == "off":
        _clear(alloc_ptr, h, ranks, home, m)
        tl.debug_barrier()
        _store_row(alloc_ptr, h, tl.load(load_ptr + h * home + m, mask=m < home, other=0), h, ranks, home, m)
        tl.store(rule_ptr, _HOME)
    elif KIND == "one_donor":
        tl.store(rule_ptr, tl.where(_most_copies(copies_ptr, 0, ranks, r) > 0, _ONE, _HOME).to(tl.int64))
    elif KIND == "budget":
        moved = _greedy(load_ptr, load_R_ptr, left_ptr, alloc_ptr, h, slots, ranks, home, r, m, False)
        tl.store(rule_ptr, tl.where(moved > 0, _BUDGET, _HOME).to(tl.int64))
    else:
        # The attempt before the last one that did not fit was not overwritten.
        most = _most_copies(copies_ptr, 0, ranks, r)
        if attempts > 1 and most > home:
            most = _most_copies(copies_ptr, 1, ranks, r)
        if most <= home:
            tl.store(rule_ptr, tl.where(most > 0, _MULTI, _HOME).to(tl.int64))
        else:
            moved = _greedy(load_ptr, load_R_ptr, left_ptr, alloc_ptr, h, home, ranks, home, r, m, True)
            if moved <= tl.load(least_ptr):
                tl.store(rule_ptr, _CAPPED)
            else:
                quota = _pair_one(_even(load_R_ptr, ranks, r), h, ranks, r)
                tl.debug_barrier()
                _split(quota, load_ptr, alloc_ptr, h, 0, ranks, home, r, m)
                tl.store(rule_ptr, _ONE)


@triton.jit
def _first_max(x, index):
    """(largest value, its lowest index)."""
    most = tl.max(x, 0)
    return most, tl.min(tl.where(x == most, index, 2147483647), 0)


@triton.jit
def _at(x, index, i):
    return tl.sum(tl.where(index == i, x, 0), 0)


@triton.jit
def _most_copies(copies_ptr, attempt, ranks, r):
    """The most copies on a rank."""
    return tl.max(tl.load(copies_ptr + attempt * ranks + r, mask=r < ranks, other=0), 0)


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
def _split(wanted, load_ptr, alloc_ptr, h, min_rows, ranks, home, r, m):
    """Home h's columns: nothing elsewhere, then the moves, then what stays. Returns how many copies each rank gets."""
    _clear(alloc_ptr, h, ranks, home, m)
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
            tl.store(alloc_ptr + u * ranks * home + h * home + e, rows.to(tl.int64))
            kept -= tl.where(m == e, rows, 0)
            copies += tl.where(r == u, 1, 0)
        want, u = _first_max(wanted, r)
    _store_row(alloc_ptr, h, kept, h, ranks, home, m)
    return copies


@triton.jit
def _greedy(load_ptr, load_R_ptr, left_ptr, alloc_ptr, h, slots, ranks, home, r, m, PRESS: tl.constexpr):
    """All moves, of which home h's columns are written; returns how many rows move in all."""
    _clear(alloc_ptr, h, ranks, home, m)
    experts = ranks * home
    for start in range(0, experts, 128):
        i = start + tl.arange(0, 128)
        tl.store(left_ptr + i, tl.load(load_ptr + i, mask=i < experts), mask=i < experts)
    balance, free = _even(load_R_ptr, ranks, r), tl.zeros_like(r) + slots
    tl.debug_barrier()
    moved = 0
    lacking, u = _first_max(tl.where(free > 0, tl.maximum(-balance, 0), 0), r)
    excess, donor = _first_max(balance, r)
    while (lacking > 0) & (excess > 0):
        # The load takes longest; what does not need it comes before it is used.
        own = tl.load(left_ptr + donor * home + m, mask=m < home, other=-1)
        most = excess
        if PRESS:
            slots_left = _at(free, r, u)
            most = tl.maximum(excess, (lacking + slots_left - 1) // slots_left)
        have, e = _first_max(own, m)
        rows = tl.minimum(tl.minimum(lacking, have), most)
        # Once for a pair of expert and receiver: one of them, or the donor, is done with this.
        tl.store(alloc_ptr + u * experts + donor * home + e, rows.to(tl.int64), mask=donor == h)
        tl.store(left_ptr + donor * home + e, have - rows)
        balance += tl.where(r == u, rows, 0) - tl.where(r == donor, rows, 0)
        free -= tl.where(r == u, 1, 0)
        moved += rows
        lacking, u = _first_max(tl.where(free > 0, tl.maximum(-balance, 0), 0), r)
        excess, donor = _first_max(balance, r)
        # The next donor may be the same.
        tl.debug_barrier()
    kept = tl.load(left_ptr + h * home + m, mask=m < home, other=0)
    _store_row(alloc_ptr, h, kept, h, ranks, home, m)
    return moved


@triton.jit
def _clear(alloc_ptr, h, ranks, home, m):
    """No rows of home h's experts anywhere."""
    for u in range(0, ranks):
        tl.store(alloc_ptr + u * ranks * home + h * home + m, 0, mask=m < home)


@triton.jit
def _store_row(alloc_ptr, u, rows, h, ranks, home, m):
    """Rows of home h's experts that rank u computes."""
    tl.store(alloc_ptr + u * ranks * home + h * home + m, rows.to(tl.int64), mask=m < home)


__all__ = ["fall_back", "loads", "pair_and_split"]
