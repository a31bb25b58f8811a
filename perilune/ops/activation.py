"""Gated activations of the MLPs: SwiGLU and SiTU-GLU.

SiTU-GLU(g, u) = [beta tanh(g / beta) sigmoid(g)] * [linear_beta tanh(u / linear_beta)], Kimi-K3 report; it
saturates at beta * linear_beta in magnitude. SwiGLU(g, u) = g sigmoid(g) * u.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from perilune.config import Activation
from perilune.errors import Error
from perilune.ops.checks import check_floats
from perilune.ops.implementation import implementation
from perilune.ops.pieces import row_pieces
from perilune.ops.precision import widen


def glu(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The gated unit, elementwise: two tensors of one shape and dtype -> one of that shape and dtype.

    Computed in max(fp32, dtype) and cast once. Only the two inputs are kept for the backward pass.
    Level: bitwise-batch. Raises Error when shapes or dtypes differ, for other dtypes and mixed devices.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or not gate.ndim:
        raise Error(
            f"glu: gate is {gate.dtype} {tuple(gate.shape)} but up is {up.dtype} {tuple(up.shape)}; "
            "they must be equal, of at least one dimension"
        )
    check_floats("glu", gate=gate, up=up)
    out: torch.Tensor = _Glu.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return out


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), an element's bits depending on that element alone (bitwise-batch).

    torch.sigmoid on CPU uses another formula for the last few elements of a buffer, so its bits move with the
    position in the batch; exp does not. Narrow dtypes are computed in fp32 and cast once.
    """
    if x.is_cuda:
        return torch.sigmoid(x)
    out: torch.Tensor = _Sigmoid.apply(x)  # type: ignore[no-untyped-call]
    return out


def glu_forward(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`glu` without autograd."""
    if implementation(gate) == "triton":
        made: torch.Tensor = _triton().glu_forward(gate, up, activation)
        return made
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate_RF, up_RF, out_RF = (x.reshape(-1, gate.shape[-1]) for x in (gate, up, out))
    for rows in row_pieces(gate_RF):
        g, u = widen(gate_RF[rows]), widen(up_RF[rows])
        if activation.kind == "silu":
            torch.mul(sigmoid_forward(g).mul_(g), u, out=out_RF[rows])
        else:
            left = (g / activation.beta).tanh_().mul_(sigmoid_forward(g))
            right = (u / activation.linear_beta).tanh_().mul_(activation.beta * activation.linear_beta)
            torch.mul(left, right, out=out_RF[rows])
    return out


def glu_backward(d_out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The gradients of `glu` side by side in the last dimension, [..., 2F]: first the gate's, then up's."""
    if implementation(gate) == "triton":
        made: torch.Tensor = _triton().glu_backward(d_out, gate, up, activation)
        return made
    width = gate.shape[-1]
    both = torch.empty(*gate.shape[:-1], 2 * width, dtype=gate.dtype, device=gate.device)
    both_R2F = both.view(-1, 2 * width)
    gate_RF, up_RF, d_RF = (x.reshape(-1, width) for x in (gate, up, d_out))
    slope_of = _silu_backward if activation.kind == "silu" else _situ_backward
    for rows in row_pieces(gate_RF):
        d, g, u = widen(d_RF[rows]), widen(gate_RF[rows]), widen(up_RF[rows])
        slope_of(d, g, u, activation, both_R2F[rows, :width], both_R2F[rows, width:])
    return both


def _silu_backward(
    d: torch.Tensor, g: torch.Tensor, u: torch.Tensor, _: Activation, d_gate: torch.Tensor, d_up: torch.Tensor
) -> None:
    s = sigmoid_forward(g)
    torch.mul(s * g, d, out=d_up)
    # d(g s)/dg = s (1 + g (1 - s))
    torch.mul(torch.rsub(s, 1).mul_(g).add_(1).mul_(s).mul_(u), d, out=d_gate)


def _situ_backward(
    d: torch.Tensor, g: torch.Tensor, u: torch.Tensor, act: Activation, d_gate: torch.Tensor, d_up: torch.Tensor
) -> None:
    s = sigmoid_forward(g)
    t = (g / act.beta).tanh_()
    r = (u / act.linear_beta).tanh_()
    # With left = beta t s and right = linear_beta r: d right/du = 1 - r^2 and
    # d left/dg = s (1 - t^2 + beta t (1 - s)).
    left_d = (t * s).mul_(d)
    torch.mul((r * r).neg_().add_(1), left_d.mul_(act.beta), out=d_up)
    slope = torch.rsub(s, 1).mul_(act.beta).sub_(t).mul_(t).add_(1).mul_(s)
    torch.mul(slope.mul_(r), d * act.linear_beta, out=d_gate)


def sigmoid_forward(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) in x's dtype at every step, without autograd."""
    return torch.neg(x).exp_().add_(1).reciprocal_()


def _triton() -> ModuleType:
    """Imported late: Triton is an optional dependency."""
    return importlib.import_module("perilune.ops.activation_triton")


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return glu_forward(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = glu_backward(d_out, gate, up, ctx.activation).chunk(2, -1)
        return d_gate, d_up, None


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = sigmoid_forward(widen(x)).to(x.dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        d_x: torch.Tensor = widen(d_y) * widen(y) * (1 - widen(y))
        return d_x.to(y.dtype)


__all__ = ["glu", "glu_backward", "glu_forward", "sigmoid", "sigmoid_forward"]
