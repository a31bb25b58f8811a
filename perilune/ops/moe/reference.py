"""Routing of tokens to experts, and the way to expert rows and back.

Legend: T tokens, E experts, J experts per token, R = T J rows sorted by expert, L latent width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from perilune.errors import Error
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


def route(logits_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int, scale: float, renormalize: bool = True) -> Routing:
    """Sigmoid routing with a selection bias (Kimi-K3 report; DeepSeek-V3's auxiliary-loss-free form).

    s = sigmoid(logits) in fp32 (fp64 for fp64 logits); the top_k of s + bias are chosen; the weights are
    s / (sum of the chosen s + 1e-20) * scale, or s * scale without renormalize. The bias only selects: neither
    weights nor gradients see it. Bitwise-batch on CPU. Raises Error unless 1 <= top_k <= E and bias_E is [E].
    """
    experts = logits_TE.shape[-1]
    if not 1 <= top_k <= experts:
        raise Error(f"route: top_k is {top_k}; must be in 1..{experts}")
    if bias_E.shape != (experts,):
        raise Error(f"route: bias_E has shape {tuple(bias_E.shape)}; must be ({experts},)")
    scores_TE = sigmoid(widen(logits_TE))
    # A stable sort, since topk leaves the order of equal scores undefined.
    biased_TE = scores_TE.detach() + bias_E.detach()
    ranked_TE, ids_TE = biased_TE.sort(dim=-1, descending=True, stable=True)
    ids_TJ = ids_TE[:, :top_k].contiguous()
    weights_TJ = scores_TE.gather(-1, ids_TJ)
    if renormalize:
        weights_TJ = weights_TJ / (weights_TJ.sum(-1, keepdim=True) + 1e-20)
    threshold_T = ranked_TE[:, top_k].clone() if top_k < experts else None
    return Routing(ids_TJ, weights_TJ * scale, scores_TE, threshold_T)


def permute(ids_TJ: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order that groups rows by expert: (order_R int64, offs_E int32).

    Row r of the grouped layout is choice order_R[r] of the flattened ids_TJ, that is token order_R[r] // J; within
    an expert, rows keep the order of tokens. Expert e owns rows offs_E[e-1]:offs_E[e] (from 0 for e = 0).
    """
    flat_R = ids_TJ.reshape(-1)
    order_R = torch.argsort(flat_R, stable=True)
    offs_E = torch.bincount(flat_R, minlength=experts).cumsum(0).to(torch.int32)
    return order_R, offs_E


def dispatch(x_TL: torch.Tensor, order_R: torch.Tensor, top_k: int) -> torch.Tensor:
    """rows_RL: each token's input copied to its top_k rows. The gradient adds a token's rows in choice order."""
    rows_RL: torch.Tensor = _Dispatch.apply(x_TL, order_R, top_k)  # type: ignore[no-untyped-call]
    return rows_RL


def combine(rows_RL: torch.Tensor, order_R: torch.Tensor, weights_TJ: torch.Tensor) -> torch.Tensor:
    """y_TL = sum_j weights_TJ[:, j] * (token's row of choice j), added in choice order in max(fp32, dtype), cast once.

    rows_RL may be longer than T J: what lies past the routed rows is neither read nor given a gradient but zero.
    """
    y_TL: torch.Tensor = _Combine.apply(rows_RL, order_R, weights_TJ)  # type: ignore[no-untyped-call]
    return y_TL


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TL: torch.Tensor, order_R: torch.Tensor, top_k: int) -> torch.Tensor:
        ctx.save_for_backward(order_R)
        ctx.top_k = top_k
        return x_TL.index_select(0, order_R // top_k)

    @staticmethod
    def backward(ctx: Any, d_RL: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order_R,) = ctx.saved_tensors
        row_TJ = _row_of_choice(order_R).view(-1, ctx.top_k)
        d_TL = widen(d_RL.index_select(0, row_TJ[:, 0]))
        for j in range(1, ctx.top_k):
            d_TL += d_RL.index_select(0, row_TJ[:, j])
        return d_TL.to(d_RL.dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RL: torch.Tensor, order_R: torch.Tensor, weights_TJ: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows_RL, order_R, weights_TJ)
        row_TJ = _row_of_choice(order_R).view(weights_TJ.shape)
        y_TL = widen(rows_RL.index_select(0, row_TJ[:, 0])) * weights_TJ[:, :1]
        for j in range(1, weights_TJ.shape[1]):
            y_TL += widen(rows_RL.index_select(0, row_TJ[:, j])) * weights_TJ[:, j : j + 1]
        return y_TL.to(rows_RL.dtype)

    @staticmethod
    def backward(ctx: Any, d_TL: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        rows_RL, order_R, weights_TJ = ctx.saved_tensors
        routed = order_R.shape[0]
        d_routed_RL = widen(d_TL).index_select(0, order_R // weights_TJ.shape[1])
        d_weights_R = (d_routed_RL * rows_RL[:routed]).sum(-1)
        d_weights_TJ = torch.empty_like(weights_TJ.reshape(-1)).index_copy_(
            0, order_R, d_weights_R.to(weights_TJ.dtype)
        )
        d_routed_RL *= weights_TJ.reshape(-1).index_select(0, order_R).unsqueeze(-1)
        if routed == rows_RL.shape[0]:
            return d_routed_RL.to(rows_RL.dtype), None, d_weights_TJ.view_as(weights_TJ)
        d_RL = torch.zeros_like(rows_RL)
        d_RL[:routed] = d_routed_RL
        return d_RL, None, d_weights_TJ.view_as(weights_TJ)


def _row_of_choice(order_R: torch.Tensor) -> torch.Tensor:
    """The inverse permutation: the grouped row of each flattened (token, choice)."""
    return torch.empty_like(order_R).scatter_(0, order_R, torch.arange(order_R.shape[0], device=order_R.device))


__all__ = ["Routing", "combine", "dispatch", "permute", "route"]
