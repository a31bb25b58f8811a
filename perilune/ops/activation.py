"""Gated activations of the MLPs: SwiGLU and SiTU-GLU.

SiTU-GLU(g, u) = [beta tanh(g / beta) sigmoid(g)] * [linear_beta tanh(u / linear_beta)], Kimi-K3 report; it
saturates at beta * linear_beta in magnitude. SwiGLU(g, u) = g sigmoid(g) * u.
"""

from __future__ import annotations

from typing import Any

import torch

from perilune.config import Activation
from perilune.errors import Error


def glu(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The gated unit, elementwise: two tensors of one shape and dtype -> one of that shape and dtype.

    Computed in max(fp32, dtype) and cast once. Only the two inputs are kept for the backward pass.
    Level: bitwise-batch on CPU. Raises Error when the shapes differ.
    """
    if gate.shape != up.shape:
        raise Error(f"glu: gate has shape {tuple(gate.shape)} but up has {tuple(up.shape)}; they must be equal")
    out: torch.Tensor = _Glu.apply(gate, up, activation)
    return out


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), an element's bits depending on that element alone (bitwise-batch, CPU).

    torch.sigmoid on CPU uses another formula for the last few elements of a buffer, so its bits move with the
    position in the batch; exp does not.
    """
    out: torch.Tensor = _Sigmoid.apply(x)
    return out


def glu_forward(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`glu` without autograd."""
    dtype = gate.dtype
    g, u = _widen(gate), _widen(up)
    if activation.kind == "silu":
        return sigmoid_forward(g).mul_(g).mul_(u).to(dtype)
    beta, linear_beta = activation.beta, activation.linear_beta
    left = (g / beta).tanh_().mul_(sigmoid_forward(g))
    right = (u / linear_beta).tanh_().mul_(beta * linear_beta)
    return left.mul_(right).to(dtype)


def glu_backward(
    d_out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor]:
    """(d_gate, d_up) of `glu`, in the dtype of the inputs."""
    dtype = gate.dtype
    d, g, u = _widen(d_out), _widen(gate), _widen(up)
    s = sigmoid_forward(g)
    if activation.kind == "silu":
        d_up = (s * g).mul_(d)
        # d(g s)/dg = s (1 + g (1 - s))
        slope = torch.rsub(s, 1).mul_(g).add_(1).mul_(s)
        return slope.mul_(u).mul_(d).to(dtype), d_up.to(dtype)
    beta, linear_beta = activation.beta, activation.linear_beta
    t = (g / beta).tanh_()
    r = (u / linear_beta).tanh_()
    # left = beta t s with d left/dg = s (1 - t^2 + beta t (1 - s)); right = linear_beta r with d right/du = 1 - r^2.
    left = (t * s).mul_(beta)
    d_up = torch.addcmul(torch.ones_like(r), r, r, value=-1).mul_(left).mul_(d)
    slope = torch.rsub(s, 1).mul_(beta).sub_(t).mul_(t).add_(1).mul_(s)
    return slope.mul_(r.mul_(linear_beta)).mul_(d).to(dtype), d_up.to(dtype)


def sigmoid_forward(x: torch.Tensor) -> torch.Tensor:
    """`sigmoid` without autograd."""
    return torch.neg(x).exp_().add_(1).reciprocal_()


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return glu_forward(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        return *glu_backward(d_out, *ctx.saved_tensors, ctx.activation), None


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = sigmoid_forward(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return (d_y * y).mul_(1 - y)


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


__all__ = ["glu", "glu_backward", "glu_forward", "sigmoid", "sigmoid_forward"]
