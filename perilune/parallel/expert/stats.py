"""What one plan did, for the progress line and for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perilune.parallel.expert.plan import Plan
from perilune.parallel.expert.planner import RULES


@dataclass(frozen=True)
class Stats:
    """rule: of `RULES`. before, after: largest over mean of the ranks' rows. max_vio: largest expert over mean, less 1.

    copies: expert copies over all ranks. moved, rows: choices computed away from the expert's home, and all.
    residual: rows of the busiest rank above the even share. copy_bytes: weights sent, forward. row_bytes: inputs sent
    to other ranks (once a token and rank) and results returned (one a choice), forward.
    critical_copies: the most copies that one rank sends or receives.
    cross_domain_bytes: the part of both that leaves a domain (0 without a domain map).
    """

    rule: str
    before: float
    after: float
    max_vio: float
    copies: int
    moved: int
    rows: int
    residual: int
    copy_bytes: int
    row_bytes: int
    critical_copies: int
    cross_domain_bytes: int


def measure(
    plan: Plan,
    payloads: Sequence[Sequence[int]],
    choices: Sequence[Sequence[int]],
    domains: Sequence[int] | None,
    row_bytes: int,
    expert_bytes: int,
) -> Stats:
    """payloads[s][d], choices[s][d]: what rank s sends to rank d; bytes of one row and of one expert."""
    ranks, home = plan.ranks, plan.home
    domain = torch.tensor(list(domains) if domains is not None else [0] * ranks)
    alloc_RE, load_E = plan.alloc_RE.cpu(), plan.counts_RE.sum(0).cpu()
    home_E = torch.arange(ranks * home) // home
    remote_RE = (home_E != torch.arange(ranks).unsqueeze(1)) & (alloc_RE > 0)
    copies_RR = remote_RE.view(ranks, ranks, home).sum(2)  # [receiver, home]
    away_RR = 1 - torch.eye(ranks, dtype=torch.int64)
    sent_RR = (torch.tensor(payloads) + torch.tensor(choices)) * away_RR * row_bytes
    across_RR = (domain.unsqueeze(1) != domain).long()
    total, before_R, after_R = int(load_E.sum()), load_E.view(ranks, home).sum(1), alloc_RE.sum(1)
    return Stats(
        rule=RULES[int(plan.rule)],
        before=_peak(before_R),
        after=_peak(after_R),
        max_vio=_peak(load_E) - 1,
        copies=int(copies_RR.sum()),
        moved=int((alloc_RE * remote_RE).sum()),
        rows=total,
        residual=max(int(after_R.max()) - -(-total // ranks), 0),
        copy_bytes=int(copies_RR.sum()) * expert_bytes,
        row_bytes=int(sent_RR.sum()),
        critical_copies=int(torch.maximum(copies_RR.sum(0), copies_RR.sum(1)).max()),
        cross_domain_bytes=int((sent_RR * across_RR).sum()) + int((copies_RR * across_RR).sum()) * expert_bytes,
    )


def _peak(load: torch.Tensor) -> float:
    """Largest over mean; 1 for no load at all."""
    return float(load.max() / load.double().mean()) if int(load.sum()) else 1.0


__all__ = ["Stats", "measure"]
