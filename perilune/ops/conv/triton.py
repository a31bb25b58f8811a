"""The short convolution on the GPU in Triton: one read of every input and one write of every output.

Kept for the backward pass: the inputs alone; the convolution is formed again.

Legend: T tokens, N sequences, C channels, P spans of the backward pass.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from perilune.ops.conv.triton_kernels import (
    conv_backward_kernel,
    conv_kernel,
    window_after_kernel,
    window_gradient_kernel,
)
from perilune.ops.sequences import Sequences

# Tokens of a span, channels of a block and its warps.
TOKENS, CHANNELS, WARPS = 64, 128, 1
SPAN, BACKWARD_CHANNELS, BACKWARD_WARPS = 128, 256, 1


def short_conv(
    u_TC: torch.Tensor, w_CW: torch.Tensor, sequences: Sequences, window_N3C: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`conv.short_conv`."""
    y_TC, after_N3C = _ShortConv.apply(u_TC, w_CW, window_N3C, sequences.to(u_TC.device))  # type: ignore[no-untyped-call]
    return y_TC, after_N3C


@lru_cache(maxsize=16)
def _table(sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    """int32: the sequence of each token [T]; the first row of its document and the row after its last [2, T]."""
    ids_T = sequences.ids_T
    bounds_2T = torch.stack((sequences.cu_seqlens[ids_T], sequences.cu_seqlens[ids_T + 1]))
    return ids_T.int(), bounds_2T


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, u_TC: torch.Tensor, w_CW: torch.Tensor, window_N3C: torch.Tensor | None, sequences: Sequences
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (T, C), N = u_TC.shape, sequences.count
        u_TC = u_TC if u_TC.stride(1) == 1 else u_TC.contiguous()
        w_CW = w_CW.contiguous()
        window_N3C = None if window_N3C is None else window_N3C.contiguous()
        WINDOW = window_N3C is not None
        ids_T, bounds_2T = _table(sequences)
        y_TC, after_N3C = u_TC.new_empty(T, C), u_TC.new_empty(N, 3, C)
        if T and C:
            conv_kernel[(triton.cdiv(T, TOKENS), triton.cdiv(C, CHANNELS))](
                u_TC, w_CW, window_N3C, ids_T, bounds_2T, y_TC, T, C, u_TC.stride(0),
                S=TOKENS, B=CHANNELS, WINDOW=WINDOW, num_warps=WARPS,
            )  # fmt: skip
        if N and C:
            window_after_kernel[(N, triton.cdiv(C, 512))](
                u_TC, window_N3C, sequences.cu_seqlens, after_N3C, C, u_TC.stride(0),
                B=512, WINDOW=WINDOW, num_warps=4,
            )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(u_TC, w_CW, window_N3C, ids_T, bounds_2T, sequences.cu_seqlens)
        return y_TC, after_N3C

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_y_TC: torch.Tensor | None, d_after_N3C: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        u_TC, w_CW, window_N3C, ids_T, bounds_2T, cu_N = ctx.saved_tensors
        (T, C), N = u_TC.shape, len(cu_N) - 1
        d_y_TC = torch.zeros_like(u_TC) if d_y_TC is None else d_y_TC if d_y_TC.stride(1) == 1 else d_y_TC.contiguous()
        AFTER, WINDOW = d_after_N3C is not None, window_N3C is not None
        d_after_N3C = d_after_N3C.contiguous() if d_after_N3C is not None else None
        d_u_TC = u_TC.new_empty(T, C)
        P = triton.cdiv(T, SPAN)
        d_w_P4C = u_TC.new_empty(P, 4, C, dtype=torch.float32)
        if T and C:
            conv_backward_kernel[(P, triton.cdiv(C, BACKWARD_CHANNELS))](
                u_TC, w_CW, window_N3C, ids_T, bounds_2T, d_y_TC, d_after_N3C, d_u_TC, d_w_P4C,
                T, C, u_TC.stride(0), d_y_TC.stride(0),
                S=SPAN, B=BACKWARD_CHANNELS, WINDOW=WINDOW, AFTER=AFTER, num_warps=BACKWARD_WARPS,
            )  # fmt: skip
        d_window_N3C = None
        if window_N3C is not None and ctx.needs_input_grad[2]:
            d_window_N3C = torch.empty_like(window_N3C)
            if N and C:
                window_gradient_kernel[(N, triton.cdiv(C, 128))](
                    u_TC, w_CW, window_N3C, cu_N, d_y_TC, d_after_N3C, d_window_N3C,
                    C, u_TC.stride(0), d_y_TC.stride(0), B=128, AFTER=AFTER, num_warps=1,
                )  # fmt: skip
        return d_u_TC, d_w_P4C.sum(0).t().to(w_CW.dtype), d_window_N3C, None


__all__ = ["short_conv"]
