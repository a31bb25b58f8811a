"""Expert loads of many shapes, for the planner's tests."""

from __future__ import annotations

import torch

KINDS = ("uniform", "lognormal", "one expert", "one rank", "half the ranks", "idle rank", "all remote", "nothing")


def counts(kind: str, ranks: int, home: int, tokens: int, seed: int) -> torch.Tensor:
    """int64 [R, E]: choices of each source; `tokens` sets the scale."""
    generator = torch.Generator().manual_seed(seed)
    experts = ranks * home
    c_RE = torch.randint(0, tokens + 1, (ranks, experts), generator=generator)
    if kind == "lognormal":
        size_E = (2 * torch.randn(experts, generator=generator)).exp() * tokens / 10
        c_RE = size_E.long() + torch.randint(0, 3, (ranks, experts), generator=generator)
    elif kind == "one expert":
        hot = seed % experts
        c_RE = torch.zeros_like(c_RE).index_fill_(1, torch.tensor([hot]), tokens)
    elif kind == "one rank":
        hot = seed % ranks
        keep = torch.arange(experts) // home == hot
        c_RE = c_RE * keep
    elif kind == "half the ranks":
        c_RE = c_RE * (torch.arange(experts) // home < (ranks + 1) // 2)
    elif kind == "idle rank":
        c_RE = torch.full_like(c_RE, tokens)
        c_RE[:, :home] = 0
    elif kind == "all remote":
        c_RE = c_RE * (torch.arange(experts) // home != torch.arange(ranks).unsqueeze(1))
    elif kind == "nothing":
        c_RE = torch.zeros_like(c_RE)
    # Sources of unequal size, one of them empty.
    c_RE[seed % ranks] = 0 if ranks > 2 else c_RE[seed % ranks]
    return c_RE


def away(alloc_RE: torch.Tensor) -> torch.Tensor:
    """The part of an allocation that is not at home, [R, E]."""
    ranks, experts = alloc_RE.shape
    at_home = torch.arange(experts) // (experts // ranks) == torch.arange(ranks).unsqueeze(1)
    return alloc_RE.masked_fill(at_home, 0)
