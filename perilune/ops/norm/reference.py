"""RMS and L2 normalisation over the last dimension, with hand-written backward passes.

All statistics are in max(fp32, dtype). Rounding order as in the released model code: RMSNorm normalises in fp32,
casts to the input dtype and multiplies by the weight in that dtype; the gated form stays in fp32 and casts once.
Every row's bits depend on that row alone (bitwise-batch, CPU), in outputs and input gradients.

Legend: T tokens, D width; leading dimensions may be several.
"""

from __future__ import annotations

from typing import Any

import torch

from perilune.ops.activation import sigmoid_forward
from perilune.ops.linear import dot_exact
from perilune.ops.precision import widen


def rms_norm(x_TD: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
    """`norm.rms_norm`."""
    y_TD: torch.Tensor = _RmsNorm.apply(x_TD, w_D, eps)  # type: ignore[no-untyped-call]
    return y_TD


def add_rms_norm(
    x_TD: torch.Tensor, added_TD: torch.Tensor, w_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm.add_rms_norm`."""
    sum_TD = x_TD + added_TD
    return sum_TD, rms_norm(sum_TD, w_D, eps)


def gated_rms_norm(x_TD: torch.Tensor, w_D: torch.Tensor, gate_TD: torch.Tensor, eps: float) -> torch.Tensor:
    """`norm.gated_rms_norm`."""
    y_TD: torch.Tensor = _GatedRmsNorm.apply(x_TD, w_D, gate_TD, eps)  # type: ignore[no-untyped-call]
    return y_TD


def l2_norm(x_TD: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, in x's dtype. eps is added to the SUM, not the mean."""
    y_TD: torch.Tensor = _L2Norm.apply(x_TD, eps)  # type: ignore[no-untyped-call]
    return y_TD


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _rows(x)
        r = _inverse_norm(wide, wide.shape[-1], eps)
        ctx.save_for_backward(x, w, r)
        return (wide * r).to(x.dtype).mul_(w.to(x.dtype)).view(x.shape)

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, w, r = ctx.saved_tensors
        d_x, d_w = _rms_backward(_rows(d_y), _rows(x), w.to(r.dtype), r)
        return d_x.to(x.dtype).view(x.shape), d_w.to(w.dtype), None


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _rows(x)
        r = _inverse_norm(wide, wide.shape[-1], eps)
        ctx.save_for_backward(x, w, gate, r)
        return (wide * r).mul_(widen(w)).mul_(sigmoid_forward(_rows(gate).to(r.dtype))).to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, w, gate, r = ctx.saved_tensors
        wide_x, wide_w = _rows(x), w.to(r.dtype)
        s = sigmoid_forward(_rows(gate).to(r.dtype))
        d = s * _rows(d_y)
        d_x, d_w = _rms_backward(d, wide_x, wide_w, r)
        # d y/d gate = (x r w) s (1 - s); d already holds d_y s.
        d_gate = d.mul_(s.neg_().add_(1)).mul_(wide_x).mul_(wide_w).mul_(r)
        return d_x.to(x.dtype).view(x.shape), d_w.to(w.dtype), d_gate.to(gate.dtype).view(gate.shape), None


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _rows(x)
        r = _inverse_norm(wide, 1, eps)
        ctx.save_for_backward(x, r)
        return (wide * r).to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, r = ctx.saved_tensors
        wide, d = _rows(x), _rows(d_y)
        # d x = r d - x r^3 <x, d>
        c = (wide * d).sum(-1, keepdim=True).mul_(r * r * r).neg_()
        return (d * r).addcmul_(wide, c).to(x.dtype).view(x.shape), None


def _rms_backward(
    d_y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """d x = r w d_y - x r^3 mean(x w d_y);  d w = sum over rows of x r d_y. All wide, [rows, D]."""
    xd = x * d_y
    d_w = torch.mv(xd.t(), r.view(-1))
    c = dot_exact(xd, w).unsqueeze(-1).mul_(r * r * r / -x.shape[-1])
    return (d_y * w).mul_(r).addcmul_(x, c), d_w


def _inverse_norm(x: torch.Tensor, divisor: int, eps: float) -> torch.Tensor:
    """1 / sqrt(sum(x^2) / divisor + eps), [rows, 1]; the vector norm reads x once and keeps no square."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.mul_(norm).div_(divisor).add_(eps).rsqrt_()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, D] in max(fp32, dtype)."""
    return widen(x).reshape(-1, x.shape[-1])


__all__ = ["add_rms_norm", "gated_rms_norm", "l2_norm", "rms_norm"]
