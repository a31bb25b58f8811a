"""Tensors as FP8 blocks: E4M3 codes and one float32 scale for every 128 consecutive numbers.

For rows whose width is a multiple of 128 these are blocks of 1 x 128.

Legend: B blocks, W = 128 numbers of a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf

from perilune.errors import Error

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
    numbers = flat.numel()
    missing = -numbers % BLOCK
    x_BW = (nnf.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)
    blocks = x_BW.shape[0]
    codes = torch.empty(blocks * (BLOCK + 4), dtype=torch.uint8, device=flat.device)
    code_BW = codes[: blocks * BLOCK].view(torch.float8_e4m3fn).view(blocks, BLOCK)
    scale_B = codes[blocks * BLOCK :].view(torch.float32)
    for begin in range(0, blocks, _CHUNK):
        rows = slice(begin, begin + _CHUNK)
        wide_BW = x_BW[rows].float()
        finite_BW = torch.where(wide_BW.isfinite(), wide_BW, 0)
        scale_B1 = finite_BW.abs().amax(-1, keepdim=True) / _LARGEST
        scale_B1 = torch.where(scale_B1 > 0, scale_B1, 1)
        code_BW[rows] = (wide_BW / scale_B1).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        scale_B[rows] = scale_B1[:, 0]
    return codes


def decode(codes: torch.Tensor, numbers: int, dtype: torch.dtype) -> torch.Tensor:
    """The flat tensor that `encode` was given, of so many numbers in their dtype."""
    blocks = codes.numel() // (BLOCK + 4)
    code_BW = codes[: blocks * BLOCK].view(torch.float8_e4m3fn).view(blocks, BLOCK)
    scale_B = codes[blocks * BLOCK :].view(torch.float32)
    out_BW = torch.empty(blocks, BLOCK, dtype=dtype, device=codes.device)
    for begin in range(0, blocks, _CHUNK):
        rows = slice(begin, begin + _CHUNK)
        out_BW[rows] = code_BW[rows].float().mul_(scale_B[rows, None])
    return out_BW.view(-1)[:numbers]


__all__ = ["BLOCK", "coded_bytes", "decode", "encode"]
