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

With a seed, elements are rounded to one of their two neighbours at random, the nearer the likelier, so that the mean
is the value itself (below saturation). The random number of an element is a hash of the seed and of its place in the
tensor: no state, and the same bits on every device.

Legend: K values along the last dimension; [..., K/32] scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

RULES = ("even", "floor", "rceil", "ceil")
BLOCK = 32
MIX = (0x85EBCA6B, 0xC2B2AE35)

_BIAS = 127
_NAN_SCALE = 255
_U32 = 0xFFFFFFFF
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Half-way points between neighbouring magnitudes; a tie goes to the even code, so upwards before codes 2, 4 and 6.
_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_TIE_UP = (False, True, False, True, False, True, False)


@dataclass(frozen=True)
class Element:
    """A small float: powers emin (the least normal one) to emax, `mantissa_bits`, and its largest value."""

    emin: int
    emax: int
    mantissa_bits: int
    largest: float

    def doubled_past(self, rule: str) -> tuple[float, bool]:
        """(m, whether m itself is not past it): the mantissa of a block's amax past which the scale is doubled."""
        return {
            "floor": (2.0, False),
            "even": (2 - 2.0 ** -(self.mantissa_bits + 1), False),
            "rceil": (self.largest * 2.0**-self.emax, True),
            "ceil": (1.0, True),
        }[rule]


E2M1 = Element(emin=0, emax=2, mantissa_bits=1, largest=6.0)
E4M3 = Element(emin=-6, emax=8, mantissa_bits=3, largest=448.0)


def encode_mxfp4(w: torch.Tensor, rule: str = "even", seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed uint8 [..., K/2], scale uint8 [..., K/32]) of w [..., K], in the layout of `mxfp4-pack-quantized`.

    Byte b of a row holds element 2b in its low nibble and 2b+1 in its high nibble; a nibble is sign (bit 3) and E2M1
    magnitude.
    """
    blocks, scale = _scaled_blocks(w, rule, E2M1)
    if seed is not None:
        blocks = _rounded_at_random(blocks, E2M1, seed)
    code = torch.bucketize(blocks.abs(), _e2m1_bounds(blocks), out_int32=True).to(torch.uint8)
    code |= blocks.signbit().to(torch.uint8) << 3
    code = code.flatten(-2)
    return code[..., 0::2] | (code[..., 1::2] << 4), scale


def decode_mxfp4(
    packed: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """w [..., K] in `dtype` from packed uint8 [..., K/2] and scale uint8 [..., K/32].

    Exact in fp32 unless |w| >= 2^128 (scale byte 253 and above), which becomes infinite; then one rounding to dtype."""
    element = _e2m1_pairs(packed.device).index_select(0, packed.reshape(-1).int())
    w = _times_scale(element.view(*scale.shape, BLOCK), scale, dtype)
    return w if out is None else out.copy_(w)


def encode_mxfp8(x: torch.Tensor, rule: str = "even", seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(elements float8_e4m3fn [..., K], scale uint8 [..., K/32]) of x [..., K]; elements saturate at 448."""
    blocks, scale = _scaled_blocks(x, rule, E4M3)
    if seed is not None:
        blocks = _rounded_at_random(blocks, E4M3, seed)
    return blocks.clamp(-E4M3.largest, E4M3.largest).to(torch.float8_e4m3fn).flatten(-2), scale


def decode_mxfp8(elements: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """x [..., K] in `dtype` from elements float8_e4m3fn [..., K] and scale uint8 [..., K/32]."""
    return _times_scale(elements.to(torch.float32).view(*scale.shape, BLOCK), scale, dtype)


def fake_quantize(x: torch.Tensor, format: str, rule: str, seed: int | None, out: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] through "mxfp4" or "mxfp8" and back, in x's dtype."""
    if format == "mxfp4":
        y = decode_mxfp4(*encode_mxfp4(x, rule, seed), x.dtype)
    else:
        y = decode_mxfp8(*encode_mxfp8(x, rule, seed), x.dtype)
    return y if out is None else out.copy_(y)


def _scaled_blocks(w: torch.Tensor, rule: str, element: Element) -> tuple[torch.Tensor, torch.Tensor]:
    """(w / scale [..., K/32, 32] in max(fp32, dtype), scale bytes uint8 [..., K/32]); broken blocks are zeroed."""
    wide = w.detach() if w.dtype == torch.float64 else w.detach().float()
    blocks = wide.reshape(*w.shape[:-1], w.shape[-1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(-1)
    # frexp gives [0.5, 1): double the mantissa, lower the exponent.
    half, exponent = torch.frexp(amax)
    byte = exponent - 1 - element.emax + _BIAS
    threshold, strictly = element.doubled_past(rule)
    byte += (2 * half > threshold) if strictly else (2 * half >= threshold)
    byte = torch.where(amax == 0, 0, byte.clamp(0, _NAN_SCALE - 1))
    broken = ~amax.isfinite()
    byte.masked_fill_(broken, _NAN_SCALE)
    blocks = torch.where(broken.unsqueeze(-1), 0, blocks / _scales(byte, wide.dtype).unsqueeze(-1))
    return blocks, byte.to(torch.uint8)


def _rounded_at_random(blocks: torch.Tensor, element: Element, seed: int) -> torch.Tensor:
    """Each magnitude moved to the element below or above it; saturation is left to the encoder."""
    magnitude = blocks.abs()
    _, exponent = torch.frexp(magnitude)
    ulp = torch.ldexp(torch.ones_like(magnitude), (exponent - 1).clamp(min=element.emin) - element.mantissa_bits)
    steps = (magnitude / ulp).floor()
    up = _random(blocks.numel(), seed, blocks.device).view(blocks.shape) < magnitude / ulp - steps
    return torch.copysign((steps + up).mul_(ulp), blocks)


def _random(number: int, seed: int, device: torch.device) -> torch.Tensor:
    """fp32 [number] in [0, 1), multiples of 2^-24: the place, mixed twice with a key of the seed."""
    key = keys(seed)
    place = torch.arange(number, device=device)
    h: torch.Tensor = _mixed(_mixed(place & _U32 ^ key[0]) ^ place >> 32 ^ key[1])
    return (h >> 8).float().mul_(2.0**-24)


def keys(seed: int) -> tuple[int, int]:
    """Two numbers of 32 bits: nearby seeds of up to 64 bits get keys that have nothing in common."""
    first = int(_mixed(seed & _U32 ^ _mixed(seed >> 32 & _U32 ^ MIX[0])))
    return first, int(_mixed(first ^ MIX[1]))


def _mixed(h: Any) -> Any:
    """A bijection of 32-bit numbers in which every input bit reaches every output bit (MurmurHash3's finaliser)."""
    h = (h ^ h >> 16) * MIX[0] & _U32
    h = (h ^ h >> 13) * MIX[1] & _U32
    return h ^ h >> 16


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


__all__ = [
    "BLOCK",
    "E2M1",
    "E4M3",
    "MIX",
    "RULES",
    "Element",
    "decode_mxfp4",
    "decode_mxfp8",
    "encode_mxfp4",
    "encode_mxfp8",
    "fake_quantize",
    "keys",
]
