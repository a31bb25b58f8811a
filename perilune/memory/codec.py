"""Tensors as FP8 blocks: E4M3 codes and one float32 scale for every 128 consecutive numbers, or for tiles of a matrix.

For rows whose width is a multiple of 128 the former are blocks of 1 x 128. On a GPU one Triton kernel each way does the
work (`codec_triton`), to the same bits.

Legend: B blocks, W = 128 numbers of a block; R rows, C columns, r x c tiles of 128 x 128.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as nnf

from perilune.errors import Error
from perilune.ops.implementation import implementation, room

BLOCK = 128
# Largest finite E4M3 number.
_LARGEST = 448.0
# Blocks that are widened to float32 together.
_CHUNK = 1 << 14


def coded_bytes(numbers: int) -> int:
    """Bytes of `encode`'s codes for so many numbers."""
    return -(-numbers // BLOCK) * (BLOCK + 4)


def encode(flat: torch.Tensor) -> torch.Tensor:
    """A flat floating-point tensor as FP8 blocks: uint8 [B * W + 4 * B], the E4M3 bytes, then the scales' bytes.

    scale = max |x| of the block / 448 in float32, 1 for a block of zeros; codes are x / scale, rounded to nearest even
    and saturated at 448. Infinities become the largest number of their block and NaN stays NaN.
    Relative error of a number: 2^-4 or less of itself, down to 2^-10 * scale. Raises Error for other dtypes.
    """
    if not flat.is_floating_point() or flat.dim() != 1:
        raise Error(f"fp8: tensor is {flat.dtype} with {flat.dim()} dimensions; must be floating-point and flat")
    blocks = -(-flat.numel() // BLOCK)
    codes = torch.empty(blocks * (BLOCK + 4), dtype=torch.uint8, device=flat.device)
    code, scale_B = _parts(codes)
    kernels = _kernels(flat)
    if kernels is not None and blocks:
        kernels.encode_blocks(flat.detach().contiguous(), code, scale_B)
        return codes
    x_BW = nnf.pad(flat, (0, blocks * BLOCK - flat.numel())).view(-1, BLOCK)
    code_BW = code.view(-1, BLOCK)
    for begin in range(0, blocks, _CHUNK):
        rows = slice(begin, begin + _CHUNK)
        code_BW[rows], scale_B[rows] = _coded(x_BW[rows], (-1,))
    return codes


def decode(codes: torch.Tensor, numbers: int, dtype: torch.dtype) -> torch.Tensor:
    """The flat tensor that `encode` was given, of so many numbers in their dtype."""
    code, scale_B = _parts(codes)
    out = torch.empty(numbers, dtype=dtype, device=codes.device)
    kernels = _kernels(out)
    if kernels is not None and numbers:
        kernels.decode_blocks(code, scale_B, out)
        return out
    code_BW, blocks = code.view(-1, BLOCK), scale_B.numel()
    out_BW = torch.empty(blocks, BLOCK, dtype=dtype, device=codes.device)
    for begin in range(0, blocks, _CHUNK):
        rows = slice(begin, begin + _CHUNK)
        out_BW[rows] = code_BW[rows].float().mul_(scale_B[rows, None])
    return out_BW.view(-1)[:numbers]


def encode_tiles(x_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix of any strides as (E4M3 codes [R, C], float32 scales [ceil(R / 128), ceil(C / 128)]), one a tile of
    128 x 128, whose transpose has the same codes: otherwise as `encode`."""
    if not x_RC.is_floating_point() or x_RC.dim() != 2:
        raise Error(f"fp8: tensor is {x_RC.dtype} with {x_RC.dim()} dimensions; must be a floating-point matrix")
    x_RC = x_RC.detach()
    rows, columns = (-(-n // BLOCK) for n in x_RC.shape)
    code_RC = torch.empty(x_RC.shape, dtype=torch.float8_e4m3fn, device=x_RC.device)
    scale_rc = torch.empty(rows, columns, device=x_RC.device)
    kernels = _kernels(x_RC)
    if kernels is not None and x_RC.numel():
        kernels.encode_tiles(x_RC, code_RC, scale_rc)
        return code_RC, scale_rc
    for row in range(rows):
        for column in range(columns):
            tile = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            code_RC[tile], scale_rc[row, column] = _coded(x_RC[tile], (0, 1))
    return code_RC, scale_rc


def decode_tiles(code_RC: torch.Tensor, scale_rc: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix that `encode_tiles` was given, contiguous."""
    out_RC = torch.empty(code_RC.shape, dtype=dtype, device=code_RC.device)
    kernels = _kernels(out_RC)
    if kernels is not None and out_RC.numel():
        kernels.decode_tiles(code_RC, scale_rc, out_RC)
        return out_RC
    wide_RC = scale_rc.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: out_RC.shape[0], : out_RC.shape[1]]
    return out_RC.copy_(code_RC.float() * wide_RC)


def _coded(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes of x, scales over `dims`)."""
    wide = x.float()
    scale = torch.where(wide.isfinite(), wide, 0).abs().amax(dims, keepdim=True) / _LARGEST
    scale = torch.where(scale > 0, scale, 1)
    return (wide / scale).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scale.squeeze(dims)


def _parts(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(E4M3 numbers, scales) in a buffer of codes."""
    blocks = codes.numel() // (BLOCK + 4)
    return codes[: blocks * BLOCK].view(torch.float8_e4m3fn), codes[blocks * BLOCK :].view(torch.float32)


def _kernels(x: torch.Tensor) -> ModuleType | None:
    return room("perilune.memory", "codec_triton") if implementation(x) == "triton" else None


__all__ = ["BLOCK", "coded_bytes", "decode", "decode_tiles", "encode", "encode_tiles"]
