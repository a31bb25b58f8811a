"""MXFP4 and MXFP8 on a GPU: `reference` bit for bit, from fp32, bf16 or fp16 values.

A program takes NB blocks of 32 values. Scaling by a power of two, the division by the spacing of the elements and the
rounding are exact in fp32; exponents are handled as integers.

Legend: K values along the last dimension; NB blocks of a program.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from perilune.ops.mx.reference import BLOCK, E2M1, E4M3, MIX, Element, keys

# Blocks of a program; the fastest on an H200 of 16 to 128.
_BLOCKS, _DECODED = 64, 128
_ELEMENTS = {"mxfp4": E2M1, "mxfp8": E4M3}
_MIX0, _MIX1 = tl.constexpr(MIX[0]), tl.constexpr(MIX[1])


def encode_mxfp4(w: torch.Tensor, rule: str, seed: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed uint8 [..., K/2], scale uint8 [..., K/32])."""
    packed = torch.empty(*w.shape[:-1], w.shape[-1] // 2, dtype=torch.uint8, device=w.device)
    return packed, _encode(w, packed, E2M1, rule, seed)


def encode_mxfp8(x: torch.Tensor, rule: str, seed: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(elements float8_e4m3fn [..., K], scale uint8 [..., K/32])."""
    elements = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return elements.view(torch.float8_e4m3fn), _encode(x, elements, E4M3, rule, seed)


def decode_mxfp4(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """w [..., K]."""
    w = packed.new_empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=dtype) if out is None else out
    return _decode(packed, scale, w, four=True)


def decode_mxfp8(elements: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [..., K]."""
    return _decode(elements.view(torch.uint8), scale, elements.new_empty(elements.shape, dtype=dtype), four=False)


def fake_quantize(x: torch.Tensor, format: str, rule: str, seed: int | None, out: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] through "mxfp4" or "mxfp8" and back, in x's dtype."""
    x = x.contiguous()
    y = torch.empty_like(x) if out is None else out
    if x.numel():
        _fake_kernel[_grid(x)](x, y, x.numel() // BLOCK, *_keys(seed), **_rounding(_ELEMENTS[format], rule, seed))
    return y


def _encode(w: torch.Tensor, codes: torch.Tensor, element: Element, rule: str, seed: int | None) -> torch.Tensor:
    w = w.contiguous()
    scale = torch.empty(*w.shape[:-1], w.shape[-1] // BLOCK, dtype=torch.uint8, device=w.device)
    if w.numel():
        _encode_kernel[_grid(w)](
            w, codes, scale, scale.numel(), *_keys(seed), FOUR=element is E2M1, **_rounding(element, rule, seed)
        )
    return scale


def _decode(codes: torch.Tensor, scale: torch.Tensor, w: torch.Tensor, four: bool) -> torch.Tensor:
    if w.numel():
        grid = (triton.cdiv(scale.numel(), _DECODED),)
        _decode_kernel[grid](codes.contiguous(), scale.contiguous(), w, scale.numel(), FOUR=four, NB=_DECODED)
    return w


def _grid(w: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(w.numel(), BLOCK * _BLOCKS),)


def _keys(seed: int | None) -> tuple[int, int]:
    """The keys of the seed as signed numbers of 32 bits."""
    first, second = (0, 0) if seed is None else keys(seed)
    return first - (first >> 31 << 32), second - (second >> 31 << 32)


def _rounding(element: Element, rule: str, seed: int | None) -> dict[str, int | float | bool]:
    threshold, strictly = element.doubled_past(rule)
    return {
        "NB": _BLOCKS, "EMIN": element.emin, "EMAX": element.emax, "MANTISSA_BITS": element.mantissa_bits,
        "LARGEST": element.largest, "DOUBLED_FROM": int((threshold - 1) * 2**23) + strictly, "RANDOM": seed is not None,
    }  # fmt: skip


@triton.jit
def _power(field):
    """2^(field - 127) for 0 <= field <= 254; field 0 is the subnormal 2^-127."""
    bits = tl.where(field > 0, field << 23, 0x00400000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _mixed(h):
    h = (h ^ (h >> 16)) * tl.full([1], _MIX0, tl.uint32)
    h = (h ^ (h >> 13)) * tl.full([1], _MIX1, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def _random(place, key0, key1):
    """[0, 1) for every place (int64)."""
    first = (tl.full([1], 0, tl.int32) + key0).to(tl.uint32, bitcast=True)
    second = (tl.full([1], 0, tl.int32) + key1).to(tl.uint32, bitcast=True)
    h = _mixed((place & 0xFFFFFFFF).to(tl.uint32) ^ first)
    h = _mixed(h ^ (place >> 32).to(tl.uint32) ^ second)
    return (h >> 8).to(tl.float32) * 0.000000059604644775390625


@triton.jit
def _quantised(
    x, place, key0, key1, EMIN: tl.constexpr, EMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr,
    LARGEST: tl.constexpr, DOUBLED_FROM: tl.constexpr, RANDOM: tl.constexpr,
):  # fmt: skip
    """(magnitudes on the element grid [NB, 32] fp32, signs [NB, 32] bool, scale bytes [NB] int32) of x [NB, 32]."""
    bits = x.to(tl.int32, bitcast=True)
    amax = tl.max(bits & 0x7FFFFFFF, 1)
    doubled = ((amax & 0x7FFFFF) >= DOUBLED_FROM).to(tl.int32)
    byte = tl.minimum(tl.maximum((amax >> 23) - EMAX + doubled, 0), 254)
    broken = amax >= 0x7F800000
    scaled = tl.where(broken[:, None], 0.0, tl.abs(x) * _power(254 - byte)[:, None])
    exponent = tl.maximum((scaled.to(tl.int32, bitcast=True) >> 23) - 127, EMIN)
    steps = scaled * _power(127 + MANTISSA_BITS - exponent)
    if RANDOM:
        whole = tl.floor(steps)
        whole += (_random(place, key0, key1) < steps - whole).to(tl.float32)
    else:
        # Past 2^23 fp32 has no fraction: the addition rounds to the nearest even whole number.
        whole = (steps + 8388608.0) - 8388608.0
    magnitude = tl.minimum(whole * _power(127 - MANTISSA_BITS + exponent), LARGEST)
    return magnitude, (bits < 0) & (broken[:, None] == 0), tl.where(broken, 255, byte)


@triton.jit
def _signed(magnitude, negative):
    """By its bit: 0 - 0 is not -0."""
    bits = magnitude.to(tl.int32, bitcast=True) | (negative.to(tl.int32) << 31)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _factor(byte):
    """The scale of a byte, fp32; 255 is NaN."""
    return tl.where(byte == 255, float("nan"), _power(tl.minimum(byte, 254)))


@triton.jit
def _places(blocks, NB: tl.constexpr):
    """(block numbers [NB], places of values [NB, 32], which exist [NB]), in int64."""
    block = tl.program_id(0).to(tl.int64) * NB + tl.arange(0, NB)
    return block, block[:, None] * 32 + tl.arange(0, 32)[None, :], block < blocks


@triton.jit
def _fake_kernel(
    x, y, blocks, key0, key1, NB: tl.constexpr, EMIN: tl.constexpr, EMAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, LARGEST: tl.constexpr, DOUBLED_FROM: tl.constexpr, RANDOM: tl.constexpr,
):  # fmt: skip
    _, place, exists = _places(blocks, NB)
    value = tl.load(x + place, mask=exists[:, None], other=0.0).to(tl.float32)
    magnitude, negative, byte = _quantised(
        value, place, key0, key1, EMIN, EMAX, MANTISSA_BITS, LARGEST, DOUBLED_FROM, RANDOM
    )
    out = _signed(magnitude, negative) * _factor(byte)[:, None]
    tl.store(y + place, out.to(y.dtype.element_ty), mask=exists[:, None])


@triton.jit
def _encode_kernel(
    x, codes, scale, blocks, key0, key1, FOUR: tl.constexpr, NB: tl.constexpr, EMIN: tl.constexpr,
    EMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, LARGEST: tl.constexpr, DOUBLED_FROM: tl.constexpr,
    RANDOM: tl.constexpr,
):  # fmt: skip
    block, place, exists = _places(blocks, NB)
    value = tl.load(x + place, mask=exists[:, None], other=0.0).to(tl.float32)
    magnitude, negative, byte = _quantised(
        value, place, key0, key1, EMIN, EMAX, MANTISSA_BITS, LARGEST, DOUBLED_FROM, RANDOM
    )
    tl.store(scale + block, byte.to(tl.uint8), mask=exists)
    # A normal element's exponent and mantissa are fp32's with another bias; a subnormal one counts its steps.
    normal = (magnitude.to(tl.int32, bitcast=True) >> (23 - MANTISSA_BITS)) - ((126 + EMIN) << MANTISSA_BITS)
    subnormal = (magnitude * _power(tl.full([1], 127 + MANTISSA_BITS - EMIN, tl.int32))).to(tl.int32)
    least = _power(tl.full([1], 127 + EMIN, tl.int32))
    code = tl.where(magnitude < least, subnormal, normal) | (negative.to(tl.int32) << (3 if FOUR else 7))
    if FOUR:
        low, high = tl.split(code.reshape(NB, 16, 2))
        half = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(codes + half, (low | (high << 4)).to(tl.uint8), mask=exists[:, None])
    else:
        tl.store(codes + place, code.to(tl.uint8), mask=exists[:, None])


@triton.jit
def _element(code, EMIN: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """The value of the magnitude bits of an element."""
    normal = (code + ((126 + EMIN) << MANTISSA_BITS)) << (23 - MANTISSA_BITS)
    subnormal = code.to(tl.float32) * _power(tl.full([1], 127 + EMIN - MANTISSA_BITS, tl.int32))
    return tl.where(code >> MANTISSA_BITS == 0, subnormal, normal.to(tl.float32, bitcast=True))


@triton.jit
def _element4(code):
    return _signed(_element(code & 7, 0, 1), code & 8 != 0)


@triton.jit
def _decode_kernel(codes, scale, w, blocks, FOUR: tl.constexpr, NB: tl.constexpr):
    block, place, exists = _places(blocks, NB)
    factor = _factor(tl.load(scale + block, mask=exists, other=0).to(tl.int32))
    if FOUR:
        half = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        pair = tl.load(codes + half, mask=exists[:, None], other=0).to(tl.int32)
        value = tl.join(_element4(pair & 15), _element4(pair >> 4)).reshape(NB, 32)
    else:
        code = tl.load(codes + place, mask=exists[:, None], other=0).to(tl.int32)
        value = _element(code & 127, -6, 3)
        value = tl.where(code & 127 == 127, float("nan"), value)
        value = _signed(value, code & 128 != 0)
    tl.store(w + place, (value * factor[:, None]).to(w.dtype.element_ty), mask=exists[:, None])


__all__ = ["decode_mxfp4", "decode_mxfp8", "encode_mxfp4", "encode_mxfp8", "fake_quantize"]
