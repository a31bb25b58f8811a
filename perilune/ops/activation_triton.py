"""`glu` on the GPU in Triton: one read of every input, one write of every output, fp32 inside.

Legend: R rows, F width.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from perilune.config import Activation
from perilune.ops.triton_math import divide, exp, glu, situ_parts

NUMBERS = 2048


def glu_forward(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`activation.glu_forward`."""
    gate_RF, up_RF = _rows(gate), _rows(up)
    R, F = gate_RF.shape
    out_RF = torch.empty(R, F, dtype=gate.dtype, device=gate.device)
    if R and F:
        BF = min(NUMBERS, triton.next_power_of_2(F))
        _forward_kernel[(R, triton.cdiv(F, BF))](
            gate_RF, up_RF, out_RF, gate_RF.stride(0), up_RF.stride(0), F, activation.beta, activation.linear_beta,
            BF=BF, SITU=activation.kind != "silu", num_warps=4,
        )  # fmt: skip
    return out_RF.view(gate.shape)


def glu_backward(d_out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`activation.glu_backward`."""
    d_RF, gate_RF, up_RF = _rows(d_out), _rows(gate), _rows(up)
    R, F = gate_RF.shape
    both_R2F = torch.empty(R, 2 * F, dtype=gate.dtype, device=gate.device)
    if R and F:
        BF = min(NUMBERS, triton.next_power_of_2(F))
        _backward_kernel[(R, triton.cdiv(F, BF))](
            d_RF, gate_RF, up_RF, both_R2F, d_RF.stride(0), gate_RF.stride(0), up_RF.stride(0), F,
            activation.beta, activation.linear_beta, BF=BF, SITU=activation.kind != "silu", num_warps=4,
        )  # fmt: skip
    return both_R2F.view(*gate.shape[:-1], 2 * F)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[R, F] with neighbouring columns side by side; rows may lie apart."""
    x_RF = x.reshape(-1, x.shape[-1])
    return x_RF if x_RF.stride(1) == 1 else x_RF.contiguous()


@triton.jit
def _forward_kernel(
    gate_RF, up_RF, out_RF, gate_stride, up_stride, F, beta, linear_beta, BF: tl.constexpr, SITU: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    inside = f < F
    g = tl.load(gate_RF + r * gate_stride + f, inside, 0.0).to(tl.float32)
    u = tl.load(up_RF + r * up_stride + f, inside, 0.0).to(tl.float32)
    tl.store(out_RF + r * F + f, glu(g, u, beta, linear_beta, SITU).to(out_RF.dtype.element_ty), inside)


@triton.jit
def _backward_kernel(
    d_RF, gate_RF, up_RF, both_R2F, d_stride, gate_stride, up_stride, F, beta, linear_beta,
    BF: tl.constexpr, SITU: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    inside = f < F
    d = tl.load(d_RF + r * d_stride + f, inside, 0.0).to(tl.float32)
    g = tl.load(gate_RF + r * gate_stride + f, inside, 0.0).to(tl.float32)
    u = tl.load(up_RF + r * up_stride + f, inside, 0.0).to(tl.float32)
    if SITU:
        # With left = beta t s and right = linear_beta v: d right/du = 1 - v^2 and
        # d left/dg = s (1 - t^2 + beta t (1 - s)).
        left, right, away = situ_parts(g, u, beta, linear_beta)
        s, t, v = divide(1.0, away), divide(left, left + 2.0), divide(right, right + 2.0)
        d_gate = d * s * (1 - t * t + beta * t * (1 - s)) * linear_beta * v
        d_up = d * beta * t * s * (1 - v * v)
    else:
        # d(g s)/dg = s (1 + g (1 - s))
        s = divide(1.0, 1.0 + exp(tl.minimum(-g, 80.0)))
        d_gate = d * u * s * (1 + g * (1 - s))
        d_up = d * g * s
    row = both_R2F + r * 2 * F
    tl.store(row + f, d_gate.to(both_R2F.dtype.element_ty), inside)
    tl.store(row + F + f, d_up.to(both_R2F.dtype.element_ty), inside)


__all__ = ["glu_backward", "glu_forward"]
