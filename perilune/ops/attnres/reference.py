"""Attention residuals, the mixing step (Kimi-K3 report; "Attention Residuals", block form).

s_i = sum_c (w_n w_q)_c V_ic / sqrt(mean_c V_i^2 + eps);  p = softmax_i(s);  h = sum_i p_i V_i.
The weighted sum is of the un-normalised sources and there is no 1/sqrt(D).

Legend: T tokens, D model width, n sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from perilune.ops.activation import sigmoid_forward
from perilune.ops.attnres.partial import Partial
from perilune.ops.linear import dot_exact
from perilune.ops.norm.reference import rms_norm
from perilune.ops.pieces import row_pieces
from perilune.ops.precision import widen


def mix(sources: Sequence[torch.Tensor], norm_w_D: torch.Tensor, query_w_D: torch.Tensor, eps: float) -> torch.Tensor:
    """`attnres.mix`."""
    h_TD: torch.Tensor = _Mix.apply(norm_w_D, query_w_D, eps, *sources)  # type: ignore[no-untyped-call]
    return h_TD


def mix_norm(
    sources: Sequence[torch.Tensor],
    norm_w_D: torch.Tensor,
    query_w_D: torch.Tensor,
    eps: float,
    out_w_D: torch.Tensor,
    out_eps: float,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """`attnres.mix_norm`; autograd adds the gradients of the sources."""
    return rms_norm(mix(sources, norm_w_D, query_w_D, eps), out_w_D, out_eps), list(sources)


def mix_completed(
    sources: Sequence[torch.Tensor], norm_w_D: Sequence[torch.Tensor], query_w_D: Sequence[torch.Tensor], eps: float
) -> list[Partial]:
    """`attnres.mix_completed`."""
    partials = []
    for norm_w, query_w in zip(norm_w_D, query_w_D, strict=True):
        s_nT = [_score(source, norm_w, query_w, eps) for source in sources]
        p_nT = _softmax(s_nT)
        h_TD = widen(sources[0]) * p_nT[0].unsqueeze(-1)
        for source, p_T in zip(sources[1:], p_nT[1:], strict=True):
            h_TD.addcmul_(widen(source), p_T.unsqueeze(-1))
        largest_T = torch.stack(s_nT).amax(0)
        z_T = _sum([(s_T - largest_T).exp_() for s_T in s_nT])
        partials.append(Partial(h_TD.to(sources[0].dtype), z_T.log_() + largest_T))
    return partials


def merge_norm(
    partial: Partial,
    live_TD: torch.Tensor,
    norm_w_D: torch.Tensor,
    query_w_D: torch.Tensor,
    eps: float,
    out_w_D: torch.Tensor,
    out_eps: float,
) -> torch.Tensor:
    """`attnres.merge_norm`."""
    p_T = sigmoid_forward(_score(live_TD, norm_w_D, query_w_D, eps) - partial.lse_T)
    wide_TD = widen(partial.h_TD)
    h_TD = wide_TD + (widen(live_TD) - wide_TD) * p_T.unsqueeze(-1)
    return rms_norm(h_TD.to(live_TD.dtype), out_w_D, out_eps)


def _score(x_TD: torch.Tensor, norm_w_D: torch.Tensor, query_w_D: torch.Tensor, eps: float) -> torch.Tensor:
    """s_T of one source, as in the forward pass below."""
    wide_TD, w_D = widen(x_TD), _product(norm_w_D, query_w_D, x_TD)
    norm_T = torch.linalg.vector_norm(wide_TD, dim=-1)
    r_T: torch.Tensor = (norm_T * norm_T / w_D.shape[0] + eps).rsqrt()
    return dot_exact(wide_TD, w_D) * r_T


def _product(norm_w_D: torch.Tensor, query_w_D: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
    """The one vector that both weights act through, in the dtype that the sources are computed in."""
    return (widen(norm_w_D) * widen(query_w_D)).to(widen(x_TD[:0]).dtype)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, norm_w: torch.Tensor, query_w: torch.Tensor, eps: float, *sources: torch.Tensor
    ) -> torch.Tensor:
        w_D = _product(norm_w, query_w, sources[0])
        s_nT, r_nT = [], []
        for source in sources:
            x_TD = widen(source)
            norm_T = torch.linalg.vector_norm(x_TD, dim=-1)
            r_nT.append(norm_T.mul_(norm_T).div_(w_D.shape[0]).add_(eps).rsqrt_())
            s_nT.append(dot_exact(x_TD, w_D).mul_(r_nT[-1]))
        p_nT = _softmax(s_nT)
        h_TD = widen(sources[0]) * p_nT[0].unsqueeze(-1)
        for source, p_T in zip(sources[1:], p_nT[1:], strict=True):
            h_TD.addcmul_(widen(source), p_T.unsqueeze(-1))
        ctx.save_for_backward(norm_w, query_w, *p_nT, *s_nT, *r_nT, *sources)
        return h_TD.to(sources[0].dtype)

    @staticmethod
    def backward(ctx: Any, d_h: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        norm_w, query_w, *rest = ctx.saved_tensors
        n = len(rest) // 4
        p_nT, s_nT, r_nT, sources = (rest[i * n : (i + 1) * n] for i in range(4))
        w_D = _product(norm_w, query_w, sources[0])
        d_w_D = torch.zeros_like(w_D)
        needed = ctx.needs_input_grad[3:]
        d_sources = [torch.empty_like(x) if need else None for x, need in zip(sources, needed, strict=True)]
        for rows in row_pieces(d_h):
            d_TD = widen(d_h[rows])
            x_nTD = [widen(source[rows]) for source in sources]
            d_p_nT = [(x_TD * d_TD).sum(-1) for x_TD in x_nTD]
            mean_T = _sum([d_p_T * p_T[rows] for d_p_T, p_T in zip(d_p_nT, p_nT, strict=True)])
            for i, x_TD in enumerate(x_nTD):
                # s = r <w, x>, so ds/dx = r w - s r^2 x / D.
                on_w_T = (d_p_nT[i] - mean_T).mul_(p_nT[i][rows]).mul_(r_nT[i][rows])
                on_x_T = (on_w_T * r_nT[i][rows]).mul_(s_nT[i][rows]).div_(-w_D.shape[0])
                d_w_D.addmv_(x_TD.t(), on_w_T)
                d_source = d_sources[i]
                if d_source is not None:
                    d_x_TD = d_TD * p_nT[i][rows].unsqueeze(-1)
                    d_x_TD.addcmul_(x_TD, on_x_T.unsqueeze(-1)).addcmul_(w_D, on_w_T.unsqueeze(-1))
                    d_source[rows] = d_x_TD
        d_norm_w = (d_w_D * query_w).to(norm_w.dtype)
        d_query_w = (d_w_D * norm_w).to(query_w.dtype)
        return d_norm_w, d_query_w, None, *d_sources


def _softmax(s_nT: list[torch.Tensor]) -> list[torch.Tensor]:
    """Over the list; every token's numbers in one written order, unlike a reduction over a dimension."""
    largest_T = s_nT[0]
    for s_T in s_nT[1:]:
        largest_T = torch.maximum(largest_T, s_T)
    e_nT = [(s_T - largest_T).exp_() for s_T in s_nT]
    z_T = _sum(e_nT)
    return [e_T.div_(z_T) for e_T in e_nT]


def _sum(x_nT: list[torch.Tensor]) -> torch.Tensor:
    total_T = x_nT[0].clone()
    for x_T in x_nT[1:]:
        total_T += x_T
    return total_T


__all__ = ["merge_norm", "mix", "mix_completed", "mix_norm"]
