"""Routing of tokens to experts, and the way to expert rows and back, in plain torch on any device.

`triton_routing` has the same functions for a GPU; `routing` picks.

Legend: T tokens, E experts, J experts per token, R = T J rows sorted by expert, L latent width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perilune.ops.activation import sigmoid
from perilune.ops.precision import widen


@dataclass(frozen=True)
class Routing:
    """Where each token goes.

    ids_TJ: int64, the chosen experts, best first; of equal scores the lowest expert index comes first.
    weights_TJ: fp32, what each expert's output is multiplied by; carries the gradient of the router.
    scores_TE: fp32, sigmoid of the logits, without the bias.
    threshold_T: fp32, the (J+1)-th largest biased score, for Quantile Balancing; None when J = E. No gradient.
    """

    ids_TJ: torch.Tensor
    weights_TJ: torch.Tensor
    scores_TE: torch.Tensor
    threshold_T: torch.Tensor | None


def route(logits_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int, scale: float, renormalize: bool) -> Routing:
    """See `perilune.ops.moe.route`."""
    scores_TE = sigmoid(widen(logits_TE))
    # A stable sort, since topk leaves the order of equal scores undefined.
    biased_TE = scores_TE.detach() + bias_E.detach()
    ranked_TE, ids_TE = biased_TE.sort(dim=-1, descending=True, stable=True)
    ids_TJ = ids_TE[:, :top_k].contiguous()
    weights_TJ = scores_TE.gather(-1, ids_TJ)
    if renormalize:
        weights_TJ = weights_TJ / (weights_TJ.sum(-1, keepdim=True) + 1e-20)
    threshold_T = ranked_TE[:, top_k].clone() if top_k < logits_TE.shape[-1] else None
    return Routing(ids_TJ, weights_TJ * scale, scores_TE, threshold_T)


def permute(ids_TJ: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `perilune.ops.moe.permute`."""
    flat_R = ids_TJ.reshape(-1)
    order_R = torch.argsort(flat_R, stable=True)
    offs_E = torch.bincount(flat_R, minlength=experts).cumsum(0).to(torch.int32)
    return order_R, offs_E


def row_of_choice(order_R: torch.Tensor) -> torch.Tensor:
    """The inverse permutation: the grouped row of each flattened (token, choice)."""
    return torch.empty_like(order_R).scatter_(0, order_R, torch.arange(order_R.shape[0], device=order_R.device))


def spread(x_TL: torch.Tensor, order_R: torch.Tensor, top_k: int) -> torch.Tensor:
    """rows_RL: x of the token of each row."""
    return x_TL.index_select(0, order_R // top_k)


def gather_sum(rows_RL: torch.Tensor, row_TJ: torch.Tensor, weights_TJ: torch.Tensor | None) -> torch.Tensor:
    """y_TL = sum_j w[:, j] rows[row[:, j]], added in order of j in max(fp32, dtype), cast once."""
    y_TL = torch.zeros(row_TJ.shape[0], rows_RL.shape[1], device=rows_RL.device, dtype=widen(rows_RL[:0]).dtype)
    for j in range(row_TJ.shape[1]):
        term_TL = rows_RL.index_select(0, row_TJ[:, j])
        y_TL += term_TL if weights_TJ is None else widen(term_TL) * weights_TJ[:, j : j + 1]
    return y_TL.to(rows_RL.dtype)


def gather_sum_backward(
    d_TL: torch.Tensor, rows_RL: torch.Tensor, order_R: torch.Tensor, weights_TJ: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(d_rows of the R routed rows, d_weights_TJ)."""
    d_wide_RL = widen(d_TL).index_select(0, order_R // weights_TJ.shape[1])
    d_weights_R = (d_wide_RL * rows_RL[: order_R.shape[0]]).sum(-1).to(weights_TJ.dtype)
    d_weights_TJ = torch.empty_like(weights_TJ.reshape(-1)).index_copy_(0, order_R, d_weights_R)
    d_wide_RL *= weights_TJ.reshape(-1).index_select(0, order_R).unsqueeze(-1)
    return d_wide_RL.to(rows_RL.dtype), d_weights_TJ.view_as(weights_TJ)


__all__ = ["Routing", "gather_sum", "gather_sum_backward", "permute", "route", "row_of_choice", "spread"]
