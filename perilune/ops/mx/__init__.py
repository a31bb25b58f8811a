"""Microscaling formats: MXFP4 and MXFP8 with one power-of-two scale per 32 values of the last dimension.

`perilune.ops.mx.reference` says what the bits are; the kernels give the same ones. Rules of the scale: see there.
`rule` is one of RULES and belongs to a model (`QuantConfig.scale_rule`); `seed` rounds at random instead of to the
nearest element.

Legend: K values along the last dimension; leading dimensions may be several.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from perilune.errors import Error
from perilune.ops.checks import check_device, check_floats
from perilune.ops.implementation import Implementation, room
from perilune.ops.implementation import implementation as _implementation
from perilune.ops.mx.reference import BLOCK, RULES

Format = Literal["mxfp4", "mxfp8"]


def encode_mxfp4(w: torch.Tensor, rule: str = "even", seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed uint8 [..., K/2], scale uint8 [..., K/32]) of w [..., K], in the layout of `mxfp4-pack-quantized`.

    Byte b of a row holds element 2b in its low nibble and 2b+1 in its high nibble; a nibble is sign (bit 3) and E2M1
    magnitude. Raises Error unless w is bf16, fp16, fp32 or fp64, K a multiple of 32 and the rule known.
    """
    _check_values("encode_mxfp4", w, rule)
    both: tuple[torch.Tensor, torch.Tensor] = _room(w).encode_mxfp4(w, rule, seed)
    return both


def decode_mxfp4(
    packed: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """w [..., K] in `dtype` from packed uint8 [..., K/2] and scale uint8 [..., K/32], into `out` (contiguous) if given.

    Exact in fp32 unless |w| >= 2^128 (scale byte 253 and above), which becomes infinite; then one rounding to dtype.
    Raises Error when the shapes, dtypes or devices do not fit together.
    """
    _check_codes("decode_mxfp4", packed, torch.uint8, scale, values=2 * packed.shape[-1])
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    if out is not None and (out.shape != shape or out.dtype != dtype or not out.is_contiguous()):
        raise Error(f"decode_mxfp4: out is {out.dtype} {tuple(out.shape)}; must be contiguous {dtype} {shape}")
    if out is not None:
        check_device("decode_mxfp4", "codes", packed, "out", out)
    w: torch.Tensor = _room(packed, dtype).decode_mxfp4(packed, scale, dtype, out)
    return w


def encode_mxfp8(x: torch.Tensor, rule: str = "even", seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(elements float8_e4m3fn [..., K], scale uint8 [..., K/32]) of x [..., K]; elements saturate at 448.

    Raises Error as `encode_mxfp4`.
    """
    _check_values("encode_mxfp8", x, rule)
    both: tuple[torch.Tensor, torch.Tensor] = _room(x).encode_mxfp8(x, rule, seed)
    return both


def decode_mxfp8(elements: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """x [..., K] in `dtype` from elements float8_e4m3fn [..., K] and scale uint8 [..., K/32].

    Raises Error when the shapes, dtypes or devices do not fit together.
    """
    _check_codes("decode_mxfp8", elements, torch.float8_e4m3fn, scale, values=elements.shape[-1])
    x: torch.Tensor = _room(elements, dtype).decode_mxfp8(elements, scale, dtype)
    return x


def fake_quantize(
    x: torch.Tensor, format: Format, rule: str = "even", seed: int | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., K] through `format` and back, in x's dtype; its gradient is the output's (straight-through).

    out: written instead of a new tensor, contiguous and of x's shape, possibly x itself, or in another floating dtype,
    to which the values are rounded once more; no gradient then.
    Raises Error as `encode_mxfp4`, for an unknown format, and for an `out` that does not fit.
    """
    if format not in ("mxfp4", "mxfp8"):
        raise Error(f"fake_quantize: format is {format!r}; allowed: 'mxfp4', 'mxfp8'")
    _check_values("fake_quantize", x, rule)
    if out is not None:
        if out.shape != x.shape or not out.is_floating_point() or not out.is_contiguous():
            raise Error(
                f"fake_quantize: out is {out.dtype} {tuple(out.shape)}; must be contiguous floats {tuple(x.shape)}"
            )
        check_device("fake_quantize", "x", x, "out", out)
        return _fake(x.detach(), format, rule, seed, out)
    y: torch.Tensor = _StraightThrough.apply(x, format, rule, seed)  # type: ignore[no-untyped-call]
    return y


def implementation(x: torch.Tensor) -> Implementation:
    """Which code encodes and fake-quantises x; decoding goes by the dtype that is wanted."""
    return _implementation(x)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, format: Format, rule: str, seed: int | None) -> torch.Tensor:
        return _fake(x, format, rule, seed, None)

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return d_y, None, None, None


def _fake(x: torch.Tensor, format: Format, rule: str, seed: int | None, out: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = _room(x).fake_quantize(x, format, rule, seed, out)
    return y


def _room(x: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
    """dtype: of the decoded values, where x holds codes."""
    return room(__name__, implementation(x if dtype is None else torch.empty(0, dtype=dtype, device=x.device)))


def _check_values(op: str, w: torch.Tensor, rule: str) -> None:
    if rule not in RULES:
        raise Error(f"{op}: rule is {rule!r}; allowed: {', '.join(map(repr, RULES))}")
    if w.dim() < 1 or w.shape[-1] % BLOCK:
        raise Error(f"{op}: the last dimension of shape {tuple(w.shape)} must be a multiple of {BLOCK}")
    check_floats(op, x=w)


def _check_codes(op: str, codes: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor, values: int) -> None:
    if codes.dtype != dtype or scale.dtype != torch.uint8:
        raise Error(f"{op}: codes are {codes.dtype} and scales {scale.dtype}; must be {dtype} and torch.uint8")
    if values % BLOCK:
        raise Error(f"{op}: {values} values in the last dimension; must be a multiple of {BLOCK}")
    expected = (*codes.shape[:-1], values // BLOCK)
    if scale.shape != expected:
        raise Error(f"{op}: scale has shape {tuple(scale.shape)}; codes of shape {tuple(codes.shape)} need {expected}")
    check_device(op, "codes", codes, "scale", scale)


__all__ = [
    "BLOCK",
    "RULES",
    "Format",
    "decode_mxfp4",
    "decode_mxfp8",
    "encode_mxfp4",
    "encode_mxfp8",
    "fake_quantize",
    "implementation",
]
