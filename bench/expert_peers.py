"""Planners of others on equal counts: counts -> rows of each expert on each rank.

Our own short readings of published rules, planned on the counts alone; none of their code runs here. MoonEP's one-donor
rule is `perilune.parallel.expert.one_donor`.

Legend: R ranks, E experts, M = E / R experts at home.
"""

from __future__ import annotations

import numpy as np
import torch

from perilune.parallel import expert


def llep(counts_RE: torch.Tensor, alpha: float = 1.0, min_rows: int = 1024, ratio: float = 1.3) -> torch.Tensor:
    """Least-loaded: below `ratio` plain expert parallelism; else the largest experts first, native rank first."""
    ranks, experts = counts_RE.shape
    home, load = experts // ranks, counts_RE.sum(0).tolist()
    pending = [sum(load[r * home : r * home + home]) for r in range(ranks)]
    alloc = np.zeros((ranks, experts), dtype=np.int64)
    limit = alpha * sum(load) / ranks
    if max(pending) < ratio * sum(load) / ranks:
        return expert.plan_reference(counts_RE, expert.off()).alloc_RE
    assigned = [0] * ranks
    for e in sorted(range(experts), key=lambda e: (-load[e], e)):
        h, left = e // home, load[e]
        pending[h] -= left
        keep = min(left, max(0, int(limit - assigned[h] - pending[h])))
        keep = left if left - keep < min_rows else keep
        assigned[h] += keep
        alloc[h, e] += keep
        left -= keep
        while left:
            u = min((r for r in range(ranks) if r != h), key=lambda r: (assigned[r] + pending[r], r))
            rows = min(left, max(min_rows, int(limit - assigned[u] - pending[u])))
            assigned[u] += rows
            alloc[u, e] += rows
            left -= rows
    return torch.from_numpy(alloc)


def eplb(counts_RE: torch.Tensor, past_RE: torch.Tensor, extra: int = 2) -> torch.Tensor:
    """Replicas by load per replica from a past batch, `extra` more a rank, packed with equal numbers; tokens split."""
    ranks, experts = counts_RE.shape
    past, load = past_RE.sum(0).double().numpy(), counts_RE.sum(0).numpy()
    copies = np.ones(experts, dtype=np.int64)
    for _ in range(ranks * extra):
        copies[int(np.argmax(past / copies))] += 1
    pieces = sorted(((past[e] / copies[e], e) for e in range(experts) for _ in range(copies[e])), reverse=True)
    weight, number = np.zeros(ranks), np.zeros(ranks, dtype=np.int64)
    alloc, dealt = np.zeros((ranks, experts), dtype=np.int64), np.zeros(experts, dtype=np.int64)
    for size, e in pieces:
        r = min((r for r in range(ranks) if number[r] < experts // ranks + extra), key=lambda r: (weight[r], r))
        weight[r] += size
        number[r] += 1
        alloc[r, e] += load[e] // copies[e] + (dealt[e] < load[e] % copies[e])
        dealt[e] += 1
    return torch.from_numpy(alloc)


def quota(counts_RE: torch.Tensor, slots: int, eps: float = 0.01, min_rows: int = 1024) -> torch.Tensor:
    """The lowest load threshold, by binary search, at which every rank's excess finds a slot; best target first."""
    ranks, experts = counts_RE.shape
    home, load = experts // ranks, counts_RE.sum(0).tolist()
    load_R = [sum(load[r * home : r * home + home]) for r in range(ranks)]

    def attempt(limit: int) -> np.ndarray | None:
        alloc = np.zeros((ranks, experts), dtype=np.int64)
        for e in range(experts):
            alloc[e // home, e] = load[e]
        free, slack = [slots] * ranks, [limit - x for x in load_R]
        for h in sorted(range(ranks), key=lambda r: slack[r]):
            for e in sorted(range(h * home, h * home + home), key=lambda e: -load[e]):
                while slack[h] < 0 and alloc[h, e] > 0:
                    u = max(range(ranks), key=lambda r: (slack[r] if free[r] and not alloc[r, e] else -1, -r))
                    rows = min(-slack[h], int(alloc[h, e]), slack[u] if free[u] and not alloc[u, e] else 0)
                    if rows < min(min_rows, -slack[h]) or rows <= 0:
                        break
                    alloc[h, e] -= rows
                    alloc[u, e] += rows
                    slack[h] += rows
                    slack[u] -= rows
                    free[u] -= 1
            if slack[h] < 0:
                return None
        return alloc

    low, high = -(-sum(load) // ranks), max(load_R)
    best = attempt(high)
    while high - low > eps * sum(load) / ranks:
        middle = (low + high) // 2
        found = attempt(middle)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    return torch.from_numpy(best)
