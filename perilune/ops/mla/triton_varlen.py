"""Varlen attention by Triton kernels: tables of tiles, launches, and the autograd function.

Legend: T query tokens, S key tokens, H heads, Q = A + B query/key width, V value width, X tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from perilune.ops.aligned import on_16_bytes
from perilune.ops.mla import varlen_cuda
from perilune.ops.mla.tiles import key_tiles, query_tiles
from perilune.ops.mla.triton_backward import delta_kernel, keys_kernel, queries_kernel
from perilune.ops.mla.triton_forward import forward_kernel
from perilune.ops.sequences import Sequences


@dataclass(frozen=True)
class Tiling:
    """Rows held, rows walked over at a time, warps and pipeline stages of each kernel."""

    forward: tuple[int, int, int, int]
    keys: tuple[int, int, int, int]
    queries: tuple[int, int, int, int]
    precision: str


HALF = Tiling(forward=(128, 64, 8, 3), keys=(128, 32, 8, 2), queries=(128, 64, 8, 3), precision="tf32")
# Full fp32 products: no tensor cores, small tiles.
SINGLE = Tiling(forward=(64, 32, 4, 1), keys=(32, 32, 4, 1), queries=(32, 32, 4, 1), precision="ieee")
_DTYPES = {torch.bfloat16: HALF, torch.float16: HALF, torch.float32: SINGLE}


def parts(width: int) -> tuple[int, int] | None:
    """A and B: width as one power of two from 16 to 256, or as two of them, the larger first; else None."""
    a = 1 << (width.bit_length() - 1)
    b = width - a
    return (a, b) if 16 <= a <= 256 and (b == 0 or (b & (b - 1) == 0 and b >= 16)) else None


def supports(q_THQ: torch.Tensor, k_SHQ: torch.Tensor, v_SHV: torch.Tensor, scale: float) -> bool:
    """Whether the kernels do these dtypes and widths; scale must be positive (the largest score is found unscaled)."""
    width, values = q_THQ.shape[2], v_SHV.shape[2]
    same = q_THQ.dtype == k_SHQ.dtype == v_SHV.dtype and q_THQ.dtype in _DTYPES
    return same and parts(width) is not None and parts(values) == (values, 0) and width <= 256 and scale > 0


def attention(
    q_THQ: torch.Tensor,
    k_SHQ: torch.Tensor,
    v_SHV: torch.Tensor,
    queries: Sequences,
    keys: Sequences,
    scale: float,
    causal: bool,
    cuda: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops.mla.attention`; arguments are checked. cuda: take forward.cu and backward.cu.

    Level: packed = separate bit for bit, also for gradients.
    """
    o_THV, lse_TH, max_logit_H = _Attention.apply(q_THQ, k_SHQ, v_SHV, queries, keys, scale, causal, cuda)
    return o_THV, lse_TH, max_logit_H


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THQ: torch.Tensor,
        k_SHQ: torch.Tensor,
        v_SHV: torch.Tensor,
        queries: Sequences,
        keys: Sequences,
        scale: float,
        causal: bool,
        cuda: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_THQ, k_SHQ, v_SHV = on_16_bytes(q_THQ), aligned(k_SHQ), aligned(v_SHV)
        if cuda:
            table = query_tiles(queries.lengths, keys.lengths, varlen_cuda.TILE, causal, q_THQ.device)
            o_THV, lse_HT, max_logit_H = varlen_cuda.forward(q_THQ, k_SHQ, v_SHV, table, scale, causal)
        else:
            o_THV, lse_HT, max_logit_H = forward(q_THQ, k_SHQ, v_SHV, queries, keys, scale, causal)
        lse_TH = lse_HT.t()
        ctx.save_for_backward(q_THQ, k_SHQ, v_SHV, o_THV, lse_TH)
        ctx.rest = queries, keys, scale, causal, cuda
        ctx.mark_non_differentiable(lse_TH, max_logit_H)
        return o_THV, lse_TH, max_logit_H

    @staticmethod
    def backward(ctx: Any, d_o_THV: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        q_THQ, k_SHQ, v_SHV, o_THV, lse_TH = ctx.saved_tensors
        grads = backward(aligned(d_o_THV), q_THQ, k_SHQ, v_SHV, o_THV, lse_TH.t(), *ctx.rest)
        return *grads, None, None, None, None, None


def forward(
    q_THQ: torch.Tensor,
    k_SHQ: torch.Tensor,
    v_SHV: torch.Tensor,
    queries: Sequences,
    keys: Sequences,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """o_THV, lse_HT, max_logit_H."""
    tiling = _DTYPES[q_THQ.dtype]
    M, C, warps, stages = tiling.forward
    (tokens, heads, width), values = q_THQ.shape, v_SHV.shape[2]
    A, B = parts(width) or (0, 0)
    o_THV = v_SHV.new_empty(tokens, heads, values)
    lse_HT = torch.empty(heads, tokens, dtype=torch.float32, device=q_THQ.device)
    table = query_tiles(queries.lengths, keys.lengths, M, causal, q_THQ.device)
    max_HX = torch.empty(heads, len(table), dtype=torch.float32, device=q_THQ.device)
    if not tokens:
        return o_THV, lse_HT, max_HX.new_full((heads,), float("-inf"))
    forward_kernel[(len(table) * heads,)](
        *_pair(q_THQ, M, A, B),
        *_pair(k_SHQ, C, A, B),
        _rows(v_SHV, C, values),
        o_THV,
        lse_HT,
        max_HX,
        table,
        len(table),
        heads,
        tokens,
        k_SHQ.stride(1),
        v_SHV.stride(1),
        scale,
        M=M,
        C=C,
        A=A,
        B=B,
        V=values,
        CAUSAL=causal,
        PRECISION=tiling.precision,
        STAGES=stages,
        num_warps=warps,
    )
    return o_THV, lse_HT, max_HX.amax(1)


def backward(
    d_o_THV: torch.Tensor,
    q_THQ: torch.Tensor,
    k_SHQ: torch.Tensor,
    v_SHV: torch.Tensor,
    o_THV: torch.Tensor,
    lse_HT: torch.Tensor,
    queries: Sequences,
    keys: Sequences,
    scale: float,
    causal: bool,
    cuda: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """d_q, d_k, d_v in the inputs' dtypes; cuda: by backward.cu."""
    tiling = _DTYPES[q_THQ.dtype]
    (tokens, heads, width), values, device = q_THQ.shape, v_SHV.shape[2], q_THQ.device
    A, B = parts(width) or (0, 0)
    delta_HT = torch.empty_like(lse_HT)
    if tokens:
        grid = (triton.cdiv(tokens, 64), heads)
        delta_kernel[grid](
            o_THV, d_o_THV, delta_HT, heads, tokens, d_o_THV.stride(0), d_o_THV.stride(1), M=64, V=values
        )
    if cuda:
        rows = varlen_cuda.TILE
        tables = (
            key_tiles(queries.lengths, keys.lengths, rows, causal, device),
            query_tiles(queries.lengths, keys.lengths, rows, causal, device),
        )
        return varlen_cuda.backward(d_o_THV, q_THQ, k_SHQ, v_SHV, lse_HT, delta_HT, tables, scale, causal)
    d_q_THQ = torch.empty_like(q_THQ)
    d_k_SHQ = torch.empty(k_SHQ.shape, dtype=k_SHQ.dtype, device=device)
    d_v_SHV = torch.empty(v_SHV.shape, dtype=v_SHV.dtype, device=device)
    sizes = (heads, tokens, k_SHQ.stride(1), v_SHV.stride(1), d_o_THV.stride(1), scale)
    options = {"A": A, "B": B, "V": values, "CAUSAL": causal, "PRECISION": tiling.precision}
    C, M, warps, stages = tiling.keys
    table = key_tiles(queries.lengths, keys.lengths, C, causal, device)
    if len(table):
        keys_kernel[(len(table) * heads,)](
            *_pair(q_THQ, M, A, B),
            *_pair(k_SHQ, C, A, B),
            _rows(v_SHV, C, values),
            _rows(d_o_THV, M, values),
            lse_HT,
            delta_HT,
            d_k_SHQ,
            d_v_SHV,
            table,
            len(table),
            *sizes,
            M=M,
            C=C,
            STAGES=stages,
            num_warps=warps,
            **options,
        )
    M, C, warps, stages = tiling.queries
    table = query_tiles(queries.lengths, keys.lengths, M, causal, device)
    if len(table):
        queries_kernel[(len(table) * heads,)](
            *_pair(q_THQ, M, A, B),
            *_pair(k_SHQ, C, A, B),
            _rows(v_SHV, C, values),
            _rows(d_o_THV, M, values),
            lse_HT,
            delta_HT,
            d_q_THQ,
            table,
            len(table),
            *sizes,
            M=M,
            C=C,
            STAGES=stages,
            num_warps=warps,
            **options,
        )
    return d_q_THQ, d_k_SHQ, d_v_SHV


def aligned(x_THW: torch.Tensor) -> torch.Tensor:
    """x where the copy engine can read it: last dim contiguous, addresses in multiples of 16 bytes; else a copy."""
    size = x_THW.element_size()
    fits = x_THW.stride(2) == 1 and x_THW.data_ptr() % 16 == 0
    fits = fits and all(s > 0 and s * size % 16 == 0 for s in x_THW.stride()[:2])
    return x_THW if fits else on_16_bytes(x_THW)


def _rows(x_THW: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Blocks of rows by columns of x seen as [T, heads side by side]."""
    step, between, _ = x_THW.stride()
    reach = (x_THW.shape[1] - 1) * between + x_THW.shape[2]
    return TensorDescriptor(x_THW, [max(x_THW.shape[0], 1), reach], [step, 1], [rows, columns])


def _pair(x_THQ: torch.Tensor, rows: int, A: int, B: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    return _rows(x_THQ, rows, A), _rows(x_THQ, rows, B or 16)
