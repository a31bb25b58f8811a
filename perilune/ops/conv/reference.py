"""The short convolution in front of KDA's q, k and v: depthwise, causal, width 4, SiLU after.

Each document is laid out as its window (three earlier inputs) followed by its tokens, and the sum over taps runs over
that whole array in blocks of rows that stay in cache. Products and sums are separate operations in a fixed order,
and SiLU is formed from exp, so a token's bits depend on its own four inputs alone.

Legend: T tokens, N sequences, C channels, W taps (4), E rows of the laid-out array (T + 3 N).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from perilune.ops.sequences import Sequences

WIDTH = 4
_ROWS = 256


def short_conv(
    u_TC: torch.Tensor, w_CW: torch.Tensor, sequences: Sequences, window_N3C: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`conv.short_conv`."""
    if window_N3C is None:
        window_N3C = u_TC.new_zeros(sequences.count, WIDTH - 1, u_TC.shape[1])
    dtype = torch.float64 if torch.float64 in (u_TC.dtype, w_CW.dtype) else torch.float32
    y_TC: torch.Tensor
    y_TC, after_N3C = _ShortConv.apply(  # type: ignore[no-untyped-call]
        u_TC.to(dtype), w_CW.to(dtype), window_N3C.to(dtype), _layout(sequences.to(u_TC.device))
    )
    return y_TC.to(u_TC.dtype), after_N3C.to(u_TC.dtype)


@dataclass(frozen=True)
class _Layout:
    """outputs_T: row whose four inputs end at token t. before, after: rows of each document's window and of its last.

    gaps: for each block of rows, those whose four inputs belong to two documents (or None).
    """

    outputs_T: torch.Tensor
    before_N3: torch.Tensor
    after_N3: torch.Tensor
    gaps: tuple[torch.Tensor | None, ...]


@lru_cache(maxsize=16)
def _layout(sequences: Sequences) -> _Layout:
    halo = WIDTH - 1
    taps = torch.arange(halo, device=sequences.device)
    starts_N = sequences.cu_seqlens.long() + halo * torch.arange(sequences.count + 1, device=sequences.device)
    outputs_T = torch.arange(sequences.total, device=sequences.device) + halo * sequences.ids_T
    rows = max(sequences.total + halo * (sequences.count - 1), 0)
    gap_E = torch.ones(rows, dtype=torch.bool, device=sequences.device)
    gap_E[outputs_T] = False
    blocks = [block.nonzero()[:, 0] for block in gap_E.split(_ROWS)]
    gaps = tuple(block if len(block) else None for block in blocks)
    return _Layout(outputs_T, starts_N[:-1, None] + taps, starts_N[1:, None] - halo + taps, gaps)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, u_TC: torch.Tensor, w_CW: torch.Tensor, window_N3C: torch.Tensor, layout: _Layout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (T, C), N = u_TC.shape, window_N3C.shape[0]
        x_EC = u_TC.new_empty(T + (WIDTH - 1) * N, C)
        x_EC[layout.outputs_T + WIDTH - 1] = u_TC
        x_EC[layout.before_N3] = window_N3C
        w_WC = w_CW.t().contiguous()
        y_EC = u_TC.new_empty(max(x_EC.shape[0] - WIDTH + 1, 0), C)
        for first in range(0, y_EC.shape[0], _ROWS):
            y = y_EC[first : first + _ROWS]
            z = _taps(x_EC[first:], w_WC, y.shape[0])
            torch.mul(z, _logistic(z), out=y)
        ctx.save_for_backward(x_EC, w_WC)
        ctx.layout = layout
        y_TC = y_EC if N == 1 else y_EC.index_select(0, layout.outputs_T)
        return y_TC, x_EC[layout.after_N3]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        dy_TC, dafter_N3C = grads
        x_EC, w_WC = ctx.saved_tensors
        layout: _Layout = ctx.layout
        rows, C = max(x_EC.shape[0] - WIDTH + 1, 0), x_EC.shape[1]
        dy_EC = dy_TC
        if rows != len(dy_TC):
            dy_EC = dy_TC.new_zeros(rows, C)
            dy_EC[layout.outputs_T] = dy_TC
        dx_EC, dw_WRC = torch.zeros_like(x_EC), x_EC.new_zeros(WIDTH, min(_ROWS, rows), C)
        for first, gap in zip(range(0, rows, _ROWS), layout.gaps, strict=False):
            dy = dy_EC[first : first + _ROWS]
            n = dy.shape[0]
            z = _taps(x_EC[first:], w_WC, n)
            s = _logistic(z)
            # silu'(z) = s (1 + z (1 - s))
            dz = z.mul_(1 - s).add_(1).mul_(s).mul_(dy)
            if gap is not None:
                # A row between two documents belongs to neither, whatever they hold.
                dz.index_fill_(0, gap, 0.0)
            for j in range(WIDTH):
                dw_WRC[j, :n].addcmul_(dz, x_EC[first + j : first + j + n])
                dx_EC[first + j : first + j + n].addcmul_(dz, w_WC[j])
        dw_WC = dw_WRC.sum(1)
        # The windows before and after may share rows with each other; each adds its own part.
        dx_EC.index_add_(0, layout.after_N3.flatten(), dafter_N3C.flatten(0, 1))
        return dx_EC[layout.outputs_T + WIDTH - 1], dw_WC.t(), dx_EC[layout.before_N3], None


def _taps(x_EC: torch.Tensor, w_WC: torch.Tensor, rows: int) -> torch.Tensor:
    """The weighted sum of four neighbouring rows, oldest first, for the first `rows` rows."""
    z = x_EC[:rows] * w_WC[0]
    product = torch.empty_like(z)
    for j in range(1, WIDTH):
        z += torch.mul(x_EC[j : j + rows], w_WC[j], out=product)
    return z


def _logistic(z: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-z), without torch.sigmoid, whose bits depend on a value's place in the tensor."""
    return torch.neg(z).exp_().add_(1).reciprocal_()


__all__ = ["WIDTH", "short_conv"]
