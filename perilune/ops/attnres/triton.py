"""Attention residuals on the GPU: the mixture and the RMSNorm behind it as one operation, in CUDA C++ (`cuda`) on a
Hopper GPU in bf16 and in Triton elsewhere.

Kept for the backward pass: the sources, which the model keeps anyway, and 2 n + 1 fp32 numbers a token. The mixture is
formed again. The gradients of a source's later uses arrive through the sources that `mix_norm` returns and are added
inside the backward kernel, so autograd makes no sum of its own.

Legend: T tokens, D model width, N sources, P programs of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from perilune.ops.attnres import cuda
from perilune.ops.attnres.triton_kernels import mix_backward_kernel, mix_kernel, weight_gradient_kernel

PROGRAMS = 264
WARPS, BACKWARD_WARPS = 4, 8


def mix(sources: Sequence[torch.Tensor], norm_w_D: torch.Tensor, query_w_D: torch.Tensor, eps: float) -> torch.Tensor:
    """`attnres.mix`."""
    h_TD: torch.Tensor = _Mix.apply(norm_w_D, query_w_D, None, eps, 0.0, *sources)[0]  # type: ignore[no-untyped-call]
    return h_TD


def mix_norm(
    sources: Sequence[torch.Tensor],
    norm_w_D: torch.Tensor,
    query_w_D: torch.Tensor,
    eps: float,
    out_w_D: torch.Tensor,
    out_eps: float,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """`attnres.mix_norm`."""
    both = _Mix.apply(norm_w_D, query_w_D, out_w_D, eps, out_eps, *sources)  # type: ignore[no-untyped-call]
    x_TD, *chained = both
    return x_TD, chained


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        norm_w: torch.Tensor,
        query_w: torch.Tensor,
        out_w: torch.Tensor | None,
        eps: float,
        out_eps: float,
        *sources: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        N, D = len(sources), sources[0].shape[-1]
        rows = [x.reshape(-1, D).contiguous() for x in sources]
        T = rows[0].shape[0]
        norm_w, query_w = norm_w.contiguous(), query_w.contiguous()
        out_w = None if out_w is None else out_w.contiguous()
        s_TN, r_TN = norm_w.new_empty(2, T, N, dtype=torch.float32)
        r_out_T = s_TN.new_empty(T)
        run = cuda.forward if out_w is not None and cuda.why_not(rows, (norm_w, query_w, out_w)) is None else _forward
        y = run(rows, norm_w, query_w, out_w, eps, out_eps, s_TN, r_TN, r_out_T)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(norm_w, query_w, out_w, s_TN, r_TN, r_out_T, *rows)
        return y.view(sources[0].shape), *sources

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor | None, *d_later: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if d_y is None:
            return None, None, None, None, None, *d_later
        norm_w, query_w, out_w, s_TN, r_TN, r_out_T, *rows = ctx.saved_tensors
        D = rows[0].shape[1]
        later = None if all(d is None for d in d_later) else [_rows_of(d, rows[0]) for d in d_later]
        d_rows_y = _rows_of(d_y, rows[0])
        aligned = [*rows, d_rows_y, *(later or ())]
        fast = out_w is not None and cuda.why_not(rows, (norm_w, query_w, out_w), aligned) is None
        run = cuda.backward if fast else _backward
        d_rows, d_w_PD, d_out_w_PD = run(rows, norm_w, query_w, out_w, d_rows_y, s_TN, r_TN, r_out_T, later)
        d_norm_w, d_query_w = torch.empty_like(norm_w), torch.empty_like(query_w)
        d_out_w = None if out_w is None else torch.empty_like(out_w)
        weight_gradient_kernel[(triton.cdiv(D, 64),)](
            d_w_PD, d_out_w_PD, norm_w, query_w, d_norm_w, d_query_w, d_out_w, len(d_w_PD), D,
            B=64, ROWS=32, NORM=out_w is not None, num_warps=4,
        )  # fmt: skip
        needed = zip(d_rows, ctx.needs_input_grad[5:], strict=True)
        return d_norm_w, d_query_w, d_out_w, None, None, *(d.view(d_y.shape) if need else None for d, need in needed)


def _forward(
    rows: list[torch.Tensor],
    norm_w: torch.Tensor,
    query_w: torch.Tensor,
    out_w: torch.Tensor | None,
    eps: float,
    out_eps: float,
    s_TN: torch.Tensor,
    r_TN: torch.Tensor,
    r_out_T: torch.Tensor,
) -> torch.Tensor:
    """As `cuda.forward`; without out_w no norm follows."""
    y = torch.empty_like(rows[0])
    T, D = y.shape
    if T:
        mix_kernel[(T,)](
            tuple(rows), norm_w, query_w, out_w, y, s_TN, r_TN, r_out_T, D, eps, out_eps,
            N=len(rows), B=block(D), NORM=out_w is not None, num_warps=warps(D, WARPS),
        )  # fmt: skip
    return y


def _backward(
    rows: list[torch.Tensor],
    norm_w: torch.Tensor,
    query_w: torch.Tensor,
    out_w: torch.Tensor | None,
    d_y: torch.Tensor,
    s_TN: torch.Tensor,
    r_TN: torch.Tensor,
    r_out_T: torch.Tensor,
    later: list[torch.Tensor] | None,
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """As `cuda.backward`."""
    T, D = d_y.shape
    d_rows = [torch.empty_like(x) for x in rows]
    P = min(T, PROGRAMS)
    d_w_PD = s_TN.new_empty(P, D)
    d_out_w_PD = None if out_w is None else torch.empty_like(d_w_PD)
    if P:
        mix_backward_kernel[(P,)](
            tuple(rows), norm_w, query_w, out_w, d_y, s_TN, r_TN, r_out_T,
            None if later is None else tuple(later), tuple(d_rows), d_w_PD, d_out_w_PD, T, D, len(rows),
            N=len(rows), B=block(D), NORM=out_w is not None, ADD=later is not None, num_warps=warps(D, BACKWARD_WARPS),
        )  # fmt: skip
    return d_rows, d_w_PD, d_out_w_PD


def block(D: int) -> int:
    """The row's width in registers."""
    return max(16, int(triton.next_power_of_2(D)))


def warps(D: int, most: int) -> int:
    """At least eight numbers a thread."""
    return max(1, min(most, block(D) // 256))


def _rows_of(d: torch.Tensor | None, like_TD: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like_TD) if d is None else d.reshape(like_TD.shape).contiguous()


__all__ = ["mix", "mix_norm"]
