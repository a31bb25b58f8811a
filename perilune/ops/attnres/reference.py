"""Attention residuals, the mixing step (Kimi-K3 report; "Attention Residuals", block form).

s_i = sum_c (w_n w_q)_c V_ic / sqrt(mean_c V_i^2 + eps);  p = softmax_i(s);  h = sum_i p_i V_i.
The weighted sum is of the un-normalised sources and there is no 1/sqrt(D).

Legend: T tokens, D model width, n sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from perilune.errors import Error
from perilune.ops.linear import dot_exact


def mix(
    sources: Sequence[torch.Tensor], norm_w_D: torch.Tensor, query_w_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """h_TD, the mixture of the sources x_TD, in their dtype; everything inside in max(fp32, dtype).

    No [n, T, D] stack is made, and only [T, n] statistics are kept beside the sources for the backward pass.
    Every token's bits depend on that token alone (bitwise-batch, CPU).
    Raises Error without sources, or when a shape or dtype differs.
    """
    if not sources:
        raise Error("attnres.mix: sources is empty; at least one is needed")
    first = sources[0]
    for i, source in enumerate(sources):
        if source.shape != first.shape or source.dtype != first.dtype:
            raise Error(
                f"attnres.mix: sources[{i}] is {source.dtype} {tuple(source.shape)}, "
                f"sources[0] is {first.dtype} {tuple(first.shape)}; they must be equal"
            )
    for name, w in (("norm_w_D", norm_w_D), ("query_w_D", query_w_D)):
        if w.shape != first.shape[-1:]:
            raise Error(f"attnres.mix: {name} has shape {tuple(w.shape)}; must be ({first.shape[-1]},)")
    h_TD: torch.Tensor = _Mix.apply(norm_w_D, query_w_D, eps, *sources)
    return h_TD


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, norm_w: torch.Tensor, query_w: torch.Tensor, eps: float, *sources: torch.Tensor
    ) -> torch.Tensor:
        width = sources[0].shape[-1]
        w_D = _widen(norm_w) * _widen(query_w)
        r_nT, s_nT = [], []
        for source in sources:
            x_TD = _widen(source)
            norm_T = torch.linalg.vector_norm(x_TD, dim=-1)
            r_T = norm_T.mul_(norm_T).div_(width).add_(eps).rsqrt_()
            r_nT.append(r_T)
            s_nT.append(dot_exact(x_TD, w_D).mul_(r_T))
        p_nT = torch.stack(s_nT, -1).softmax(-1).t()
        h_TD = _widen(sources[0]) * p_nT[0].unsqueeze(-1)
        for source, p_T in zip(sources[1:], p_nT[1:], strict=True):
            h_TD.addcmul_(_widen(source), p_T.unsqueeze(-1))
        ctx.save_for_backward(norm_w, query_w, p_nT, torch.stack(r_nT), torch.stack(s_nT), *sources)
        return h_TD.to(sources[0].dtype)

    @staticmethod
    def backward(ctx: Any, d_h: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        norm_w, query_w, p_nT, r_nT, s_nT, *sources = ctx.saved_tensors
        width = sources[0].shape[-1]
        w_D = _widen(norm_w) * _widen(query_w)
        d_TD = _widen(d_h)
        d_p_nT = torch.stack([(_widen(x) * d_TD).sum(-1) for x in sources])
        d_s_nT = (d_p_nT - (d_p_nT * p_nT).sum(0)).mul_(p_nT)
        # s = r <w, x>, so ds/dx = r w - s r^2 x / D.
        on_w_nT = d_s_nT * r_nT
        on_x_nT = (on_w_nT * r_nT).mul_(s_nT).div_(-width)
        d_w_D = torch.zeros_like(w_D)
        d_sources = []
        for i, source in enumerate(sources):
            x_TD = _widen(source)
            d_w_D += torch.mv(x_TD.t(), on_w_nT[i])
            if not ctx.needs_input_grad[3 + i]:
                d_sources.append(None)
                continue
            d_x_TD = d_TD * p_nT[i].unsqueeze(-1)
            d_x_TD.addcmul_(x_TD, on_x_nT[i].unsqueeze(-1)).addcmul_(w_D, on_w_nT[i].unsqueeze(-1))
            d_sources.append(d_x_TD.to(source.dtype))
        d_norm_w = (d_w_D * query_w).to(norm_w.dtype)
        d_query_w = (d_w_D * norm_w).to(query_w.dtype)
        return d_norm_w, d_query_w, None, *d_sources


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


__all__ = ["mix"]
