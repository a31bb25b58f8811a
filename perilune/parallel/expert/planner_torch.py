"""The planner on tensors: fixed trip counts, nothing read back to the host, bit-equal to `plan_reference`.

Every loop runs to the bound of its rule; steps after the work is done move 0 rows. The bounds: a pairing step empties
a donor or a receiver (R steps); a split step empties a quota or an expert (M + R - 1); a greedy step fills a receiver
or retires a donor (R each) or exhausts an expert of a donor that stays above capacity C. With d donors of loads L the
last happens at most sum M (1 - C / L) <= d M (1 - d / R) <= E / 4 times, the largest experts going first.

Legend: R ranks, E experts, M = E / R experts at home; a trailing 1 is a tensor of one element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from perilune.parallel.expert.planner import RULES, Allocation, check
from perilune.parallel.expert.policy import PARTS, Policy


def plan_torch(counts_RE: torch.Tensor, policy: Policy, domains: Sequence[int] | None = None) -> Allocation:
    """`plan_reference` without a host read: same arguments, same result, same errors."""
    ranks, experts = check(counts_RE, domains)
    load_RM = counts_RE.sum(0).view(ranks, experts // ranks)
    moved_RMR, rule = _moved(load_RM, policy, domains)
    kept_RM = load_RM - moved_RMR.sum(2)
    alloc_RE = moved_RMR.permute(2, 0, 1).reshape(ranks, experts)
    at_home_RR = torch.eye(ranks, dtype=torch.int64, device=load_RM.device)
    alloc_RE = alloc_RE + (at_home_RR.unsqueeze(-1) * kept_RM).view(ranks, experts)
    return Allocation(alloc_RE, rule * (moved_RMR.sum() > 0))


def _moved(load_RM: torch.Tensor, policy: Policy, domains: Sequence[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """moved_RMR[h, m, u]: rows of home h's expert m that go to rank u; and the rule, int64 [1]."""
    ranks, home = load_RM.shape
    load_R = load_RM.sum(1)
    even_R = load_R - _capacities(load_R)
    if policy.kind == "off":
        return load_RM.new_zeros(ranks, home, ranks), _rule("home", load_RM)
    if policy.kind == "one_donor":
        return _split(_pair_one(even_R), load_RM), _rule("one-donor", load_RM)
    if policy.kind == "budget":
        assert policy.slots is not None
        return _greedy(even_R, load_RM, policy.slots, press=False), _rule("budget", load_RM)
    over_R = even_R
    if policy.kind == "tolerant":
        over_R = load_R - _ceil_div(load_R.sum() * policy.parts(ranks), ranks * PARTS)
    moved = _greedy(even_R, load_RM, home, press=True)
    one = _split(_pair_one(even_R), load_RM)
    less = moved.sum() <= one.sum()
    moved = torch.where(less, moved, one)
    rule = torch.where(less, _rule("capped fan-in", load_RM), _rule("one-donor", load_RM))
    # The last that fits wins.
    for near in [None, domains] if domains is not None else [None]:
        many = _split(_pair_many(over_R, near), load_RM)
        many = many * (many >= policy.min_rows)
        fits = ((many > 0).sum((0, 1)) <= home).all()
        moved = torch.where(fits, many, moved)
        rule = torch.where(fits, _rule("multi-donor", load_RM), rule)
    return moved, rule


def _rule(name: str, like: torch.Tensor) -> torch.Tensor:
    return torch.full((1,), RULES.index(name), dtype=torch.int64, device=like.device)


def _capacities(load_R: torch.Tensor) -> torch.Tensor:
    ranks, total = load_R.shape[0], load_R.sum()
    largest_R = torch.argsort(load_R, descending=True, stable=True)
    extra_R = (torch.arange(ranks, device=load_R.device) < total % ranks).to(torch.int64)
    return torch.zeros_like(load_R).scatter(0, largest_R, extra_R) + total // ranks


def _pair_many(balance_R: torch.Tensor, domains: Sequence[int] | None) -> torch.Tensor:
    ranks = balance_R.shape[0]
    excess_R, deficit_R = balance_R.clamp(min=0), (-balance_R).clamp(min=0)
    quota_RR = balance_R.new_zeros(ranks, ranks)
    every_RR = torch.ones(ranks, ranks, dtype=torch.int64, device=balance_R.device)
    passes = [every_RR]
    if domains is not None and len(set(domains)) > 1:
        numbers_R = torch.tensor(list(domains), device=balance_R.device)
        passes = [(numbers_R.unsqueeze(1) == numbers_R).to(torch.int64), every_RR]
    for way_RR in passes:
        for _ in range(ranks):
            able_R = excess_R * ((way_RR * deficit_R).sum(1) > 0)
            h_1 = _first_max(able_R)
            near_R = way_RR.index_select(0, h_1).squeeze(0) * deficit_R
            u_1 = _first_max(near_R)
            rows_1 = torch.minimum(able_R.gather(0, h_1), near_R.gather(0, u_1))
            excess_R = excess_R.scatter_add(0, h_1, -rows_1)
            deficit_R = deficit_R.scatter_add(0, u_1, -rows_1)
            quota_RR.view(-1).scatter_add_(0, h_1 * ranks + u_1, rows_1)
    return quota_RR


def _pair_one(balance_R: torch.Tensor) -> torch.Tensor:
    ranks = balance_R.shape[0]
    quota_RR = balance_R.new_zeros(ranks, ranks)
    for _ in range(ranks - 1):
        h_1, u_1 = _first_max(balance_R), _first_max(-balance_R)
        rows_1 = -balance_R.gather(0, u_1) * (balance_R.gather(0, h_1) > 0)
        balance_R = balance_R.scatter_add(0, h_1, -rows_1).scatter_add(0, u_1, rows_1)
        quota_RR.view(-1).scatter_add_(0, h_1 * ranks + u_1, rows_1)
    return quota_RR


def _split(quota_RR: torch.Tensor, load_RM: torch.Tensor) -> torch.Tensor:
    """All donors at once."""
    ranks, home = load_RM.shape
    moved_RMR = load_RM.new_zeros(ranks, home, ranks)
    for _ in range(home + ranks - 1):
        e_R1, u_R1 = _first_max(load_RM), _first_max(quota_RR)
        rows_R1 = torch.minimum(load_RM.gather(1, e_R1), quota_RR.gather(1, u_R1))
        load_RM = load_RM.scatter_add(1, e_R1, -rows_R1)
        quota_RR = quota_RR.scatter_add(1, u_R1, -rows_R1)
        moved_RMR.view(ranks, -1).scatter_add_(1, e_R1 * ranks + u_R1, rows_R1)
    return moved_RMR


def _greedy(balance_R: torch.Tensor, load_RM: torch.Tensor, slots: int, press: bool) -> torch.Tensor:
    ranks, home = load_RM.shape
    free_R, left_RM = torch.full_like(balance_R, slots), load_RM.clone()
    moved_RMR = load_RM.new_zeros(ranks, home, ranks)
    for _ in range(ranks * home // 4 + 2 * ranks):
        deficit_R = (-balance_R).clamp(min=0) * (free_R > 0)
        u_1, h_1 = _first_max(deficit_R), _first_max(balance_R)
        lacking_1, excess_1 = deficit_R.gather(0, u_1), balance_R.gather(0, h_1)
        own_1M = left_RM.index_select(0, h_1)
        e_1 = _first_max(own_1M).squeeze(0)
        most_1 = excess_1
        if press:
            most_1 = torch.maximum(excess_1, _ceil_div(lacking_1, free_R.gather(0, u_1).clamp(min=1)))
        go_1 = ((lacking_1 > 0) & (excess_1 > 0)).to(torch.int64)
        rows_1 = torch.minimum(torch.minimum(lacking_1, own_1M.squeeze(0).gather(0, e_1)), most_1) * go_1
        balance_R = balance_R.scatter_add(0, h_1, -rows_1).scatter_add(0, u_1, rows_1)
        free_R = free_R.scatter_add(0, u_1, -go_1)
        expert_1 = h_1 * home + e_1
        left_RM.view(-1).scatter_add_(0, expert_1, -rows_1)
        moved_RMR.view(-1).scatter_add_(0, expert_1 * ranks + u_1, rows_1)
    return moved_RMR


def _first_max(x: torch.Tensor) -> torch.Tensor:
    """Index of the largest element of the last axis, kept as an axis of 1; the lowest index of equals.

    The index is packed under the value, since argmax promises no order among equals on every device.
    """
    n = x.shape[-1]
    order = torch.arange(n - 1, -1, -1, device=x.device)
    return n - 1 - (x * n + order).amax(-1, keepdim=True) % n


def _ceil_div(a: torch.Tensor, b: torch.Tensor | int) -> torch.Tensor:
    return -(-a // b)


__all__ = ["plan_torch"]
