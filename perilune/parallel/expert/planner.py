"""Which rank computes how many rows of which expert: the planner in obvious loops, the specification of the others.

Every rank runs it on the same count matrix and gets the same answer; none is special. Rank h is the home of experts
h M .. h M + M - 1. The excess of a rank is what it has above its capacity, the deficit what it lacks.

`exact` takes the first rule that fits M copies on every rank:
 1. multi-donor: the largest excess gives to the largest deficit until one of them is gone. A donor never falls below
    its capacity, so exactly the excess moves, the least that can.
 2. capped fan-in: as 1, but a receiver with d rows to go and s free slots takes at least d / s rows a slot, even
    where that pushes the donor below its capacity (it then becomes a receiver). A donor has more than its capacity
    in M experts, so its largest holds at least capacity / M >= d / s: this always fits.
 3. one-donor (MoonEP): a receiver is filled completely from the rank with the largest excess. It has at most the M
    experts of one home, so this fits too; it is used where it moves fewer rows than 2.
Ties go to the lowest index everywhere.

Legend: R ranks, E experts, M = E / R experts at home, B slots for copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perilune.errors import Error
from perilune.parallel.expert.policy import PARTS, Policy

RULES = ("home", "multi-donor", "capped fan-in", "one-donor", "budget")


@dataclass(frozen=True)
class Allocation:
    """alloc_RE int64: rows of expert e computed on rank r; its sum over r is the sum of the counts over r.

    rule int64 [1]: the index in RULES of the rule that was used ("home" where nothing moved).
    """

    alloc_RE: torch.Tensor
    rule: torch.Tensor


Moves = list[tuple[int, int, int]]  # (expert, receiver, rows)


def plan_reference(counts_RE: torch.Tensor, policy: Policy, domains: Sequence[int] | None = None) -> Allocation:
    """Allocate rows from counts_RE int64: how many (token, choice) pairs of each source rank chose each expert.

    domains: a number a rank; ranks with the same one share a fast link, and multi-donor serves deficits from inside a
    domain before it crosses. Raises Error when E is not a multiple of R or domains has another length than R.
    """
    ranks, experts = check(counts_RE, domains)
    home = experts // ranks
    load = counts_RE.sum(0).tolist()
    moves, rule = _moves(load, ranks, home, policy, domains or [0] * ranks)
    alloc = [[load[e] if e // home == r else 0 for e in range(experts)] for r in range(ranks)]
    for e, u, rows in moves:
        alloc[e // home][e] -= rows
        alloc[u][e] += rows
    return Allocation(
        torch.tensor(alloc, dtype=torch.int64, device=counts_RE.device).view(ranks, experts),
        torch.tensor([RULES.index(rule if moves else "home")], device=counts_RE.device),
    )


def check(counts_RE: torch.Tensor, domains: Sequence[int] | None) -> tuple[int, int]:
    """(R, E) of a count matrix that can be planned; Error otherwise."""
    if counts_RE.dim() != 2 or counts_RE.dtype != torch.int64:
        raise Error(f"counts_RE is {counts_RE.dtype} {tuple(counts_RE.shape)}; must be int64 [ranks, experts]")
    ranks, experts = counts_RE.shape
    if experts == 0 or experts % ranks:
        raise Error(f"experts is {experts}; must be a multiple of the {ranks} ranks: every rank is home to as many")
    if domains is not None and len(domains) != ranks:
        raise Error(f"domains has {len(domains)} numbers; must have one for each of the {ranks} ranks")
    return ranks, experts


def capacities(load_R: Sequence[int]) -> list[int]:
    """Equal shares; where they do not divide, the ranks with most rows at home take one more (least to move)."""
    share, extra = divmod(sum(load_R), len(load_R))
    largest = sorted(range(len(load_R)), key=lambda r: (-load_R[r], r))[:extra]
    return [share + (r in largest) for r in range(len(load_R))]


def _moves(load: list[int], ranks: int, home: int, policy: Policy, domains: Sequence[int]) -> tuple[Moves, str]:
    load_R = [sum(load[r * home : r * home + home]) for r in range(ranks)]
    even = [have - want for have, want in zip(load_R, capacities(load_R), strict=True)]
    if policy.kind == "off":
        return [], "home"
    if policy.kind == "one_donor":
        return _split(_pair_one(even), load, home), "one-donor"
    if policy.kind == "budget":
        assert policy.slots is not None
        return _greedy(even, load, home, policy.slots, press=False), "budget"
    over = even
    if policy.kind == "tolerant":
        limit = -(-sum(load) * policy.parts(ranks) // (ranks * PARTS))
        over = [have - limit for have in load_R]
    # Keeping to domains may cost slots; the same without them is tried before a rule that moves more.
    for near in (domains, [0] * ranks):
        many = [move for move in _split(_pair_many(over, near), load, home) if move[2] >= policy.min_rows]
        if all(sum(u == r for _, u, _ in many) <= home for r in range(ranks)):
            return many, "multi-donor"
    capped, one = _greedy(even, load, home, home, press=True), _split(_pair_one(even), load, home)
    if sum(rows for *_, rows in capped) <= sum(rows for *_, rows in one):
        return capped, "capped fan-in"
    return one, "one-donor"


def _pair_many(balance: list[int], domains: Sequence[int]) -> list[list[int]]:
    """quota[h][u]: rows that rank h gives to rank u, multi-donor; first inside domains, then across."""
    ranks = range(len(balance))
    excess, deficit = [max(b, 0) for b in balance], [max(-b, 0) for b in balance]
    quota = [[0] * len(balance) for _ in ranks]
    for across in (False, True):
        while True:
            ways = [
                (h, u)
                for h in ranks
                for u in ranks
                if excess[h] and deficit[u] and (across or domains[h] == domains[u])
            ]
            if not ways:
                break
            h, u = min(ways, key=lambda way: (-excess[way[0]], way[0], -deficit[way[1]], way[1]))
            rows = min(excess[h], deficit[u])
            quota[h][u] += rows
            excess[h] -= rows
            deficit[u] -= rows
    return quota


def _pair_one(balance: list[int]) -> list[list[int]]:
    """quota[h][u] with one donor for each receiver."""
    balance = list(balance)
    quota = [[0] * len(balance) for _ in balance]
    while max(balance) > 0:
        h, u = balance.index(max(balance)), balance.index(min(balance))
        quota[h][u] = -balance[u]
        balance[h] += balance[u]
        balance[u] = 0
    return quota


def _split(quota: list[list[int]], load: list[int], home: int) -> Moves:
    """Fill the quotas of each donor: the largest one left with the expert that has most rows left."""
    moves: Moves = []
    for h, wanted in enumerate(quota):
        left, wanted = load[h * home : h * home + home], list(wanted)
        while any(wanted):
            e, u = left.index(max(left)), wanted.index(max(wanted))
            rows = min(left[e], wanted[u])
            moves.append((h * home + e, u, rows))
            left[e] -= rows
            wanted[u] -= rows
    return moves


def _greedy(balance: list[int], load: list[int], home: int, slots: int, press: bool) -> Moves:
    """Largest deficit with a free slot from the largest excess, one expert a slot; `press` is capped fan-in."""
    balance, left, free = list(balance), list(load), [slots] * len(balance)
    moves: Moves = []
    while True:
        deficit = [-b if b < 0 and s else 0 for b, s in zip(balance, free, strict=True)]
        lacking, excess = max(deficit), max(balance)
        if lacking == 0 or excess <= 0:
            return moves
        u, h = deficit.index(lacking), balance.index(excess)
        own = left[h * home : h * home + home]
        e = h * home + own.index(max(own))
        least = -(-lacking // free[u]) if press else 0
        rows = min(lacking, left[e], max(excess, least))
        moves.append((e, u, rows))
        left[e] -= rows
        balance[h] -= rows
        balance[u] += rows
        free[u] -= 1


__all__ = ["RULES", "Allocation", "capacities", "check", "plan_reference"]
