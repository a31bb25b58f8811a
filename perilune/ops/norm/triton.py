"""RMS normalisation on the GPU in Triton: one read of every input and one write of every output.

Kept for the backward pass: the inputs and one fp32 number a row.

Legend: M rows, D width, P programs of the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from perilune.ops.norm.triton_kernels import rms_backward_kernel, rms_kernel

# Programs of the backward pass, for tiles of several rows and of one; rows are fetched STAGES - 1 tiles ahead.
PROGRAMS, WIDE_PROGRAMS, STAGES = 264, 132, 3


def rms_norm(x_TD: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
    """`norm.rms_norm`."""
    y_TD: torch.Tensor = _Norm.apply(x_TD, None, w_D, None, eps)  # type: ignore[no-untyped-call]
    return y_TD


def gated_rms_norm(x_TD: torch.Tensor, w_D: torch.Tensor, gate_TD: torch.Tensor, eps: float) -> torch.Tensor:
    """`norm.gated_rms_norm`."""
    y_TD: torch.Tensor = _Norm.apply(x_TD, None, w_D, gate_TD, eps)  # type: ignore[no-untyped-call]
    return y_TD


def add_rms_norm(
    x_TD: torch.Tensor, added_TD: torch.Tensor, w_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm.add_rms_norm`."""
    y_TD, sum_TD = _Norm.apply(x_TD, added_TD, w_D, None, eps)  # type: ignore[no-untyped-call]
    return sum_TD, y_TD


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, added: torch.Tensor | None, w: torch.Tensor, gate: torch.Tensor | None, eps: float
    ) -> Any:
        x_MD = _rows(x)
        added_MD, gate_MD = (None if t is None else _rows(t) for t in (added, gate))
        M, D = x_MD.shape
        y_MD, r_M = torch.empty_like(x_MD), x.new_empty(M, dtype=torch.float32)
        sum_MD = None if added is None else torch.empty_like(x_MD)
        R, B, num_warps = tile(D)
        if M:
            rms_kernel[(triton.cdiv(M, R),)](
                x_MD, added_MD, gate_MD, w.contiguous(), sum_MD, y_MD, r_M, M, D, eps,
                R=R, B=B, ADD=added is not None, GATE=gate is not None, num_warps=num_warps,
            )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_MD if sum_MD is None else sum_MD, w, gate_MD, r_M)
        ctx.added = added is not None
        y = y_MD.view(x.shape)
        return y if sum_MD is None else (y, sum_MD.view(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor | None, d_sum: torch.Tensor | None = None) -> Any:
        if d_y is None:
            return d_sum, d_sum, None, None, None
        x_MD, w, gate_MD, r_M = ctx.saved_tensors
        M, D = x_MD.shape
        d_x_MD = torch.empty_like(x_MD)
        d_gate_MD = None if gate_MD is None else torch.empty_like(gate_MD)
        R, B, num_warps = tile(D)
        P = min(triton.cdiv(M, R), PROGRAMS if R > 1 else WIDE_PROGRAMS)
        d_w_PD = r_M.new_empty(P, D)
        if M:
            rms_backward_kernel[(P,)](
                x_MD, gate_MD, w.contiguous(), r_M, _rows(d_y), None if d_sum is None else _rows(d_sum),
                d_x_MD, d_gate_MD, d_w_PD, M, D,
                R=R, B=B, ADD=d_sum is not None, GATE=gate_MD is not None, STAGES=STAGES, num_warps=num_warps,
            )  # fmt: skip
        d_x = d_x_MD.view(d_y.shape)
        d_gate = None if d_gate_MD is None else d_gate_MD.view(d_y.shape)
        return d_x, d_x if ctx.added else None, d_w_PD.sum(0).to(w.dtype), d_gate, None


def tile(D: int) -> tuple[int, int, int]:
    """Rows and width of a tile and its warps: at least 4096 numbers, eight to 32 a thread."""
    B = max(16, triton.next_power_of_2(D))
    R = max(1, 4096 // B)
    return R, B, 4 if R * B <= 4096 else 8 if B <= 8192 else 16


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


__all__ = ["add_rms_norm", "gated_rms_norm", "rms_norm"]
