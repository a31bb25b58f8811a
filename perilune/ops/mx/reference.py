"""MXFP4 (E2M1 elements) and MXFP8 (E4M3 elements): blocks of 32 along the last dimension with an E8M0 scale each.

A scale byte s stands for 2^(s - 127); 255 is NaN. A value is element * scale. (OCP Microscaling specification 1.0.)
The elements are rounded to nearest, ties to even, and saturate. What differs between libraries is the scale: with
the largest magnitude of the block amax = m 2^e, 1 <= m < 2, and an element format of largest power 2^emax and p
mantissa bits, the scale is 2^(e - emax), or twice that when m lies past a threshold:

  floor  never doubled (the text of the specification)
  even   m >= 2 - 2^-(p+1): amax rounded to p mantissa bits first (compressed-tensors; the released checkpoints)
  rceil  m > the mantissa of the largest element: the least scale at which nothing saturates
  ceil   m > 1: amax rounded up to a power of two

For E2M1 the threshold of "even" is 1.75; compressed-tensors keeps that number for E4M3 too, where ours is 1.9375.

Blocks of zeros get the smallest scale (byte 0) and zero elements. A block that holds a NaN or an infinity gets the
NaN scale and decodes to NaN throughout: a broken weight stays visible.

Legend: K values along the last dimension; [..., K/32] scales.
"""

from __future__ import annotations

import torch

from perilune.errors import Error

RULES = ("even", "floor", "rceil", "ceil")
BLOCK = 32

_BIAS = 127
_NAN_SCALE = 255
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Half-way points between neighbouring magnitudes; a tie goes to the even code, so upwards before codes 2, 4 and 6.
_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_TIE_UP = (False, True, False, True, False, True, False)
_E4M3_MAX = 448.0


def encode_mxfp4(w: torch.Tensor, rule: str = "even") -> tuple[torch.Tensor, torch.Tensor]:
    """(packed uint8 [..., K/2], scale uint8 [..., K/32]) of w [..., K], in the layout of `mxfp4-pack-quantized`.

    Byte b of a row holds element 2b in its low nibble and 2b+1 in its high nibble; a nibble is sign (bit 3) and E2M1
    magnitude. Raises Error unless K is a multiple of 32 and the rule is known.
    """
    blocks, scale = _scaled_blocks("encode_mxfp4", w, rule, emax=2, mantissa_bits=1, largest=1.5)
    code = torch.bucketize(blocks.abs(), _e2m1_bounds(blocks), out_int32=True).to(torch.uint8)
    code |= blocks.signbit().to(torch.uint8) << 3
    code = code.flatten(-2)
    return code[..., 0::2] | (code[..., 1::2] << 4), scale


def decode_mxfp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """w [..., K] in `dtype` from packed uint8 [..., K/2] and scale uint8 [..., K/32].

    Exact in fp32 unless |w| >= 2^128 (scale byte 253 and above), which becomes infinite; then one rounding to dtype.
    Raises Error when the shapes or dtypes do not fit together.
    """
    _check_codes("decode_mxfp4", packed, torch.uint8, scale, values=2 * packed.shape[-1])
    element = _e2m1_pairs(packed.device).index_select(0, packed.reshape(-1).int())
    return _times_scale(element.view(*scale.shape, BLOCK), scale, dtype)


def encode_mxfp8(x: torch.Tensor, rule: str = "even") -> tuple[torch.Tensor, torch.Tensor]:
    """(elements float8_e4m3fn [..., K], scale uint8 [..., K/32]) of x [..., K]; elements saturate at 448.

    Raises Error unless K is a multiple of 32 and the rule is known.
    """
    blocks, scale = _scaled_blocks("encode_mxfp8", x, rule, emax=8, mantissa_bits=3, largest=1.75)
    return blocks.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2), scale


def decode_mxfp8(elements: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """x [..., K] in `dtype` from elements float8_e4m3fn [..., K] and scale uint8 [..., K/32].

    Raises Error when the shapes or dtypes do not fit together.
    """
    _check_codes("decode_mxfp8", elements, torch.float8_e4m3fn, scale, values=elements.shape[-1])
    return _times_scale(elements.to(torch.float32).view(*scale.shape, BLOCK), scale, dtype)


def _scaled_blocks(
    op: str, w: torch.Tensor, rule: str, emax: int, mantissa_bits: int, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(w / scale [..., K/32, 32] in max(fp32, dtype), scale bytes uint8 [..., K/32]); broken blocks are zeroed."""
    if rule not in RULES:
        raise Error(f"{op}: rule is {rule!r}; allowed: {', '.join(map(repr, RULES))}")
    if w.dim() < 1 or w.shape[-1] % BLOCK:
        raise Error(f"{op}: the last dimension of shape {tuple(w.shape)} must be a multiple of {BLOCK}")
    wide = w.detach() if w.dtype == torch.float64 else w.detach().float()
    blocks = wide.reshape(*w.shape[:-1], w.shape[-1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(-1)
    # frexp gives [0.5, 1): double the mantissa, lower the exponent.
    half, exponent = torch.frexp(amax)
    mantissa = 2 * half
    byte = exponent - 1 - emax + _BIAS
    if rule == "even":
        byte += mantissa >= 2 - 2.0 ** -(mantissa_bits + 1)
    elif rule == "rceil":
        byte += mantissa > largest
    elif rule == "ceil":
        byte += mantissa > 1
    byte = torch.where(amax == 0, 0, byte.clamp(0, _NAN_SCALE - 1))
    broken = ~amax.isfinite()
    byte.masked_fill_(broken, _NAN_SCALE)
    blocks = torch.where(broken.unsqueeze(-1), 0, blocks / _scales(byte, wide.dtype).unsqueeze(-1))
    return blocks, byte.to(torch.uint8)


def _times_scale(element: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (element.to(wide) * _scales(scale, wide).unsqueeze(-1)).flatten(-2).to(dtype)


def _scales(byte: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2^(byte - 127), NaN for 255, from a table: exp2 need not be exact, and 2^-127 is subnormal in fp32."""
    table = torch.tensor([2.0 ** (s - _BIAS) for s in range(_NAN_SCALE)] + [float("nan")], dtype=dtype)
    return table.to(byte.device)[byte.long()]


def _e2m1_bounds(like: torch.Tensor) -> torch.Tensor:
    """The k-th bound is the greatest number that still has code k."""
    ties = torch.tensor(_E2M1_TIES, dtype=like.dtype)
    below = torch.nextafter(ties, torch.zeros_like(ties))
    return torch.where(torch.tensor(_E2M1_TIE_UP), below, ties).to(like.device)


def _e2m1_pairs(device: torch.device) -> torch.Tensor:
    """fp32 [256, 2]: the two elements of every byte."""
    nibble = torch.tensor([*_E2M1, *(-m for m in _E2M1)])
    byte = torch.arange(256)
    return torch.stack([nibble[byte & 15], nibble[byte >> 4]], -1).to(device)


def _check_codes(op: str, codes: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor, values: int) -> None:
    if codes.dtype != dtype or scale.dtype != torch.uint8:
        raise Error(f"{op}: codes are {codes.dtype} and scales {scale.dtype}; must be {dtype} and torch.uint8")
    if values % BLOCK:
        raise Error(f"{op}: {values} values in the last dimension; must be a multiple of {BLOCK}")
    expected = (*codes.shape[:-1], values // BLOCK)
    if scale.shape != expected:
        raise Error(f"{op}: scale has shape {tuple(scale.shape)}; codes of shape {tuple(codes.shape)} need {expected}")


__all__ = ["BLOCK", "RULES", "decode_mxfp4", "decode_mxfp8", "encode_mxfp4", "encode_mxfp8"]
