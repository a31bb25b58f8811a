"""Quantile Balancing: the selection bias that evens out expert load (Kimi-K3 report).

A token i picks expert j when score_ij + bias_j exceeds its threshold_i (the (J+1)-th biased score). With
r_ij = threshold_i - score_ij, the bias that lets expert j take its share of m J / E of the m tokens is the
ceil(m J / E)-th smallest r_ij: one order statistic an expert, no gradient, no learning rate. The mean over experts
is then taken off, since a common shift selects nothing.

Legend: T = m tokens, E experts, J experts per token, B histogram bins.
"""

from __future__ import annotations

import math

import torch

from perilune.errors import Error


def expert_load(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """int64 [E]: how many (token, choice) pairs went to each expert."""
    return _count(ids.reshape(-1), experts)


def quantile_bias(scores_TE: torch.Tensor, threshold_T: torch.Tensor, top_k: int) -> torch.Tensor:
    """bias_E for the next step, from the exact order statistic over all T tokens.

    Raises Error without tokens or when top_k is not in 1..E-1 (with J = E there is nothing to balance).
    """
    tokens, experts = scores_TE.shape
    rank = _rank(tokens, experts, top_k)
    bias_E = (threshold_T.unsqueeze(-1) - scores_TE.detach()).kthvalue(rank, dim=0).values
    return bias_E - bias_E.mean()


def threshold_histogram(
    scores_TE: torch.Tensor, threshold_T: torch.Tensor, bias_E: torch.Tensor, bins: int = 1000
) -> torch.Tensor:
    """int64 [E, B]: counts of r_ij in equal bins over [min bias - 1, max bias + 1], bias_E being the one routed with.

    Every r_ij lies in that range because scores lie in (0, 1). Integer counts of several ranks or micro-batches add
    up exactly, in any order.
    """
    low, width = _bin_grid(bias_E, bins)
    r_TE = threshold_T.unsqueeze(-1) - scores_TE.detach()
    bin_TE = ((r_TE - low) / width).long().clamp_(0, bins - 1)
    experts = scores_TE.shape[1]
    bin_TE += torch.arange(experts, device=bin_TE.device) * bins
    return _count(bin_TE.reshape(-1), experts * bins).view(experts, bins)


def histogram_bias(counts_EB: torch.Tensor, bias_E: torch.Tensor, top_k: int) -> torch.Tensor:
    """bias_E for the next step from summed `threshold_histogram` counts; bias_E is the one they were routed with.

    The bin holding rank ceil(m J / E) is found and the rank interpolated linearly inside it, so the result lies
    within one bin width of `quantile_bias` (both before the mean is taken off).
    Raises Error without tokens or when top_k is not in 1..E-1.
    """
    experts, bins = counts_EB.shape
    rank = _rank(int(counts_EB[0].sum()), experts, top_k)
    low, width = _bin_grid(bias_E, bins)
    upto_EB = counts_EB.cumsum(-1)
    bin_E1 = (upto_EB < rank).sum(-1, keepdim=True)
    inside_E = counts_EB.gather(-1, bin_E1).squeeze(-1)
    before_E = upto_EB.gather(-1, bin_E1).squeeze(-1) - inside_E
    fraction_E = (rank - before_E).to(bias_E.dtype) / inside_E
    new_E = low + (bin_E1.squeeze(-1).to(bias_E.dtype) + fraction_E) * width
    return new_E - new_E.mean()


def _count(which: torch.Tensor, kinds: int) -> torch.Tensor:
    """int64 [kinds]: how often each number below `kinds` is there."""
    if not which.is_cuda:
        return torch.bincount(which, minlength=kinds)
    # On a GPU `bincount` reads the largest number back to the host.
    which = which.long()
    counts = which.new_zeros(kinds)
    return counts.scatter_add_(0, which, which.new_ones(()).expand_as(which))


def _rank(tokens: int, experts: int, top_k: int) -> int:
    if tokens < 1:
        raise Error(f"quantile balancing: {tokens} tokens; at least 1 is needed")
    if not 1 <= top_k < experts:
        raise Error(f"quantile balancing: top_k is {top_k}; must be in 1..{experts - 1}")
    return math.ceil(tokens * top_k / experts)


def _bin_grid(bias_E: torch.Tensor, bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    low = bias_E.min() - 1
    return low, (bias_E.max() + 1 - low) / bins


__all__ = ["expert_load", "histogram_bias", "quantile_bias", "threshold_histogram"]
