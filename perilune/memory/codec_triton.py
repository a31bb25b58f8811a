"""The FP8 codec on a GPU: one kernel each way, the same bits as the plain one of `codec`.

Legend: B blocks, W = 128 numbers of a block, P blocks of a program; R rows, C columns of a matrix in 128 x 128 tiles.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

# The largest finite E4M3 number.
_LARGEST = tl.constexpr(448.0)
# 8192 numbers a program: four loads of 16 bytes a thread in bf16.
_PROGRAM = 64
_WIDTH = 128


def encode_blocks(flat: torch.Tensor, code: torch.Tensor, scale_B: torch.Tensor) -> None:
    """Fill code (E4M3, B * W numbers) and scale_B (fp32) from a flat tensor; what is missing to whole blocks is 0."""
    grid = (triton.cdiv(scale_B.numel(), _PROGRAM),)
    _encode[grid](flat, code, scale_B, flat.numel(), scale_B.numel(), P=_PROGRAM, W=_WIDTH, num_warps=8)


def decode_blocks(code: torch.Tensor, scale_B: torch.Tensor, out: torch.Tensor) -> None:
    """Fill a flat tensor, no longer than the blocks."""
    grid = (triton.cdiv(scale_B.numel(), _PROGRAM),)
    _decode[grid](code, scale_B, out, out.numel(), scale_B.numel(), P=_PROGRAM, W=_WIDTH, num_warps=8)


def encode_tiles(x_RC: torch.Tensor, code_RC: torch.Tensor, scale_rc: torch.Tensor) -> None:
    """Fill code_RC (E4M3, contiguous) and scale_rc (fp32, one a tile) from a matrix of any strides."""
    (R, C), (rows, columns) = x_RC.shape, scale_rc.shape
    _encode_tiles[(rows * columns,)](x_RC, code_RC, scale_rc, R, C, columns, *x_RC.stride(), W=_WIDTH, num_warps=8)


def decode_tiles(code_RC: torch.Tensor, scale_rc: torch.Tensor, out_RC: torch.Tensor) -> None:
    """Fill out_RC, contiguous."""
    (R, C), (rows, columns) = out_RC.shape, scale_rc.shape
    _decode_tiles[(rows * columns,)](code_RC, scale_rc, out_RC, R, C, columns, W=_WIDTH, num_warps=8)


@triton.jit
def _scale(largest):
    """Of a block whose largest finite magnitude this is. The division rounds as torch's does."""
    scale = tl.div_rn(largest, _LARGEST)
    return tl.where(scale > 0.0, scale, 1.0)


@triton.jit
def _magnitude(x):
    """|x|, 0 where x is infinite or NaN."""
    return tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)


@triton.jit
def _code(x, scale, TYPE: tl.constexpr):
    coded = tl.div_rn(x, scale)
    coded = tl.where(coded > _LARGEST, _LARGEST, tl.where(coded < -_LARGEST, -_LARGEST, coded))
    return coded.to(TYPE)


@triton.jit
def _encode(flat, code, scale_B, numbers, blocks, P: tl.constexpr, W: tl.constexpr):
    b = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    at = b[:, None] * W + tl.arange(0, W)[None, :]
    x = tl.load(flat + at, at < numbers, 0.0).to(tl.float32)
    scale = _scale(tl.max(_magnitude(x), 1))
    tl.store(code + at, _code(x, scale[:, None], code.dtype.element_ty), (b < blocks)[:, None])
    tl.store(scale_B + b, scale, b < blocks)


@triton.jit
def _decode(code, scale_B, out, numbers, blocks, P: tl.constexpr, W: tl.constexpr):
    b = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    at = b[:, None] * W + tl.arange(0, W)[None, :]
    scale = tl.load(scale_B + b, b < blocks, 0.0)
    x = tl.load(code + at, at < numbers).to(tl.float32) * scale[:, None]
    tl.store(out + at, x.to(out.dtype.element_ty), at < numbers)


@triton.jit
def _encode_tiles(x_RC, code_RC, scale_rc, R, C, columns, row_stride, column_stride, W: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    r, c = tile // columns * W + tl.arange(0, W)[:, None], tile % columns * W + tl.arange(0, W)[None, :]
    inside = (r < R) & (c < C)
    x = tl.load(x_RC + r * row_stride + c * column_stride, inside, 0.0).to(tl.float32)
    scale = _scale(tl.max(tl.max(_magnitude(x), 1), 0))
    tl.store(code_RC + r * C + c, _code(x, scale, code_RC.dtype.element_ty), inside)
    tl.store(scale_rc + tile, scale)


@triton.jit
def _decode_tiles(code_RC, scale_rc, out_RC, R, C, columns, W: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    r, c = tile // columns * W + tl.arange(0, W)[:, None], tile % columns * W + tl.arange(0, W)[None, :]
    inside = (r < R) & (c < C)
    x = tl.load(code_RC + r * C + c, inside).to(tl.float32) * tl.load(scale_rc + tile)
    tl.store(out_RC + r * C + c, x.to(out_RC.dtype.element_ty), inside)


__all__ = ["decode_blocks", "decode_tiles", "encode_blocks", "encode_tiles"]
