"""MXFP4 and MXFP8 against compressed-tensors, ml_dtypes and gfloat, and the properties of the four rules."""

from __future__ import annotations

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mx_utils import compress_mx_scale, decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4, unpack_fp4_from_uint8
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from gfloat.formats import (
    format_info_mxfp4_e2m1,
    format_info_mxfp8_e4m3,
    format_info_ocp_e2m1,
    format_info_ocp_e4m3,
    format_info_ocp_e8m0,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune import Error
from perilune.ops.mx import RULES, decode_mxfp4, decode_mxfp8, encode_mxfp4, encode_mxfp8, fake_quantize

ONE = 127  # the scale byte of 2^0


def _gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _round_trip4(w: torch.Tensor, rule: str) -> torch.Tensor:
    return decode_mxfp4(*encode_mxfp4(w, rule), w.dtype)


def _round_trip8(w: torch.Tensor, rule: str) -> torch.Tensor:
    return decode_mxfp8(*encode_mxfp8(w, rule), w.dtype)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


# Code tables, exhaustively


def test_e2m1_codes() -> None:
    packed = torch.tensor([b0 | b1 << 4 for b0 in range(16) for b1 in range(16)], dtype=torch.uint8).view(16, 16)
    got = decode_mxfp4(packed, torch.full((16, 1), ONE, dtype=torch.uint8))
    codes = _nibbles(packed).numpy()
    by_ml_dtypes = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    by_gfloat = np.vectorize(lambda c: gfloat.decode_float(format_info_ocp_e2m1, int(c)).fval)(codes)
    assert np.array_equal(got.numpy(), by_ml_dtypes)
    assert np.array_equal(got.numpy(), by_gfloat)
    assert np.array_equal(np.signbit(got.numpy()), codes >= 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_e8m0_codes(dtype: torch.dtype) -> None:
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1)
    ones = torch.full((256, 16), 0x22, dtype=torch.uint8)  # element 1.0 everywhere
    got = decode_mxfp4(ones, scale, dtype)[:, 0].double().numpy()
    by_ml_dtypes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    by_gfloat = [gfloat.decode_float(format_info_ocp_e8m0, c).fval for c in range(256)]
    assert np.array_equal(got, by_ml_dtypes, equal_nan=True)
    assert np.array_equal(got, np.array(by_gfloat), equal_nan=True)


def test_e4m3_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    got = decode_mxfp8(codes.view(torch.float8_e4m3fn).view(8, 32), torch.full((8, 1), ONE, dtype=torch.uint8))
    by_ml_dtypes = codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    by_gfloat = [gfloat.decode_float(format_info_ocp_e4m3, c).fval for c in range(256)]
    assert np.array_equal(got.flatten().numpy(), by_ml_dtypes, equal_nan=True)
    assert np.array_equal(got.flatten().numpy(), np.array(by_gfloat, dtype=np.float32), equal_nan=True)


def test_nibble_order() -> None:
    w = torch.zeros(32)
    w[0], w[1], w[31] = 6.0, -1.0, 0.5
    packed, scale = encode_mxfp4(w)
    assert packed.tolist() == [0x7 | 0xA << 4, *[0] * 14, 0x1 << 4]
    assert scale.tolist() == [ONE]


# Rounding of elements


def test_e2m1_rounds_like_ml_dtypes_and_saturates() -> None:
    # 1.5 * 2^k in every block fixes the scale at 1 under every rule but "ceil"; the others stay below 6.
    x = torch.cat(
        [torch.linspace(-6, 6, 4801), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5, -0.0])]
    )
    x = torch.cat(
        [x, torch.nextafter(x, torch.tensor(9.0)).clamp(max=6), torch.nextafter(x, torch.tensor(-9.0)).clamp(min=-6)]
    )
    blocks = torch.nn.functional.pad(x, (0, -len(x) % 31)).view(-1, 31)
    blocks = torch.cat([blocks, torch.full((len(blocks), 1), 6.0)], -1)
    packed, scale = encode_mxfp4(blocks, "rceil")
    assert (scale == ONE).all()
    expected = blocks.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(_nibbles(packed).numpy(), expected)
    # FLOOR leaves up to 7.99 in the block; it saturates at 6.
    w = torch.tensor([7.9, -7.9, 5.1] + [0.0] * 29)
    assert _round_trip4(w, "floor")[:3].tolist() == [6.0, -6.0, 6.0]


def test_e4m3_rounds_like_ml_dtypes_and_saturates() -> None:
    x = torch.cat([torch.linspace(-448, 448, 31 * 300), torch.logspace(-12, 8, 31 * 200, base=2)]).view(-1, 31)
    x = torch.cat([x, torch.full((len(x), 1), 448.0)], -1)
    elements, scale = encode_mxfp8(x, "rceil")
    assert (scale == ONE).all()
    expected = x.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(elements.view(torch.uint8).numpy(), expected)
    w = torch.tensor([511.0, -511.0, 460.0] + [0.0] * 29)
    assert _round_trip8(w, "floor")[:3].tolist() == [448.0, -448.0, 448.0]


# The rules


@pytest.mark.parametrize(
    ("amax", "floor", "even", "rceil", "ceil"),
    [
        (4.0, 0, 0, 0, 0),
        (4.0001, 0, 0, 0, 1),
        (6.0, 0, 0, 0, 1),
        (6.0001, 0, 0, 1, 1),
        (6.9999, 0, 0, 1, 1),
        (7.0, 0, 1, 1, 1),
        (7.9999, 0, 1, 1, 1),
        (8.0, 1, 1, 1, 1),
    ],
)
def test_scale_of_a_block(amax: float, floor: int, even: int, rceil: int, ceil: int) -> None:
    w = torch.full((1, 32), 0.1)
    w[0, 17] = -amax
    # An E4M3 element reaches 1.75 2^8 and has three mantissa bits: other thresholds, and 2^6 times smaller scales.
    in_e4m3 = {"floor": amax >= 8, "even": amax >= 7.75, "rceil": amax > 7, "ceil": amax > 4}
    for rule, exponent in {"floor": floor, "even": even, "rceil": rceil, "ceil": ceil}.items():
        for shift in (0, -100, 90):
            shifted = w.double() * 2.0**shift
            assert encode_mxfp4(shifted, rule)[1].item() == ONE + shift + exponent
            assert encode_mxfp8(shifted, rule)[1].item() == ONE + shift - 6 + in_e4m3[rule]


def test_even_is_compressed_tensors_on_fresh_gaussian_weights() -> None:
    """The format's own writer, byte for byte. A round trip of quantised values could not tell the rules apart."""
    for seed, spread in ((0, 1.0), (1, 0.02), (2, 1e-6)):
        w = _gaussian(96, 256, seed=seed) * spread
        packed, scale = encode_mxfp4(w)
        exponents = generate_mx_scales(w.view(96, 8, 32).abs().amax(-1))
        assert torch.equal(scale, exponents.to(torch.uint8))
        float_scale = 2.0 ** (exponents - 127)
        assert torch.equal(compress_mx_scale(float_scale, torch.uint8), scale)
        assert torch.equal(packed, quantize_and_pack_fp4(w, float_scale, group_size=32))


def test_decode_is_compressed_tensors_bit_for_bit() -> None:
    g = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (40, 64), generator=g, dtype=torch.uint8)
    scale = torch.randint(20, 230, (40, 4), generator=g, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        elements = unpack_fp4_from_uint8(packed, 40, 128, dtype=dtype)
        theirs = elements.view(40, 4, 32) * decompress_mx_scale(scale).to(dtype).unsqueeze(-1)
        ours = decode_mxfp4(packed, scale, dtype)
        assert torch.equal(ours, theirs.flatten(-2))
        assert torch.equal(ours.signbit(), theirs.flatten(-2).signbit())


@pytest.mark.parametrize(
    ("encode", "decode", "info"),
    [(encode_mxfp4, decode_mxfp4, format_info_mxfp4_e2m1), (encode_mxfp8, decode_mxfp8, format_info_mxfp8_e4m3)],
    ids=["mxfp4", "mxfp8"],
)
def test_floor_is_gfloats_block_quantiser(encode, decode, info) -> None:  # type: ignore[no-untyped-def]
    w = (_gaussian(12, 32) * torch.logspace(-6, 6, 12).unsqueeze(-1)).double()
    got = decode(*encode(w, "floor"), torch.float64)
    want = np.stack([gfloat.quantize_block(info, row, gfloat.compute_scale_amax) for row in w.numpy()])
    assert np.array_equal(got.numpy(), want)


def test_the_four_rules_on_gaussian_weights() -> None:
    """Known figures for 4096 x 512 values of deviation 0.02; here 1024 x 512, so the last digit may move."""
    w = 0.02 * _gaussian(1024, 512)
    table = {  # relative error, elements past the largest, blocks and elements unlike "even" (per cent)
        "floor": (11.41, 1.89, 14.1, 4.3),
        "even": (11.21, 1.08, 0.0, 0.0),
        "rceil": (11.85, 0.0, 28.3, 7.9),
        "ceil": (13.72, 0.0, 85.9, 25.3),
    }
    even_scale, even_w = encode_mxfp4(w)[1], _round_trip4(w, "even")
    for rule, (error, clipped, blocks, elements) in table.items():
        scale, back = encode_mxfp4(w, rule)[1], _round_trip4(w, rule)
        past = w.view(1024, 16, 32).abs() > 6 * 2.0 ** (scale.float() - 127).unsqueeze(-1)
        figures = [
            (back - w).norm() / w.norm(),
            past.float().mean(),
            (scale != even_scale).float().mean(),
            (back != even_w).float().mean(),
        ]
        for figure, published, tolerance in zip(
            figures, (error, clipped, blocks, elements), (0.05, 0.1, 1.0, 0.3), strict=True
        ):
            assert abs(100 * figure.item() - published) <= tolerance, (rule, figures)


# Properties


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("round_trip", [_round_trip4, _round_trip8], ids=["mxfp4", "mxfp8"])
def test_properties_on_random_blocks(rule: str, round_trip) -> None:  # type: ignore[no-untyped-def]
    w = _gaussian(64, 96, seed=3) * torch.logspace(-9, 9, 64).unsqueeze(-1)
    back = round_trip(w, rule)
    assert torch.equal(round_trip(back, rule), back), "idempotent"
    assert torch.equal(round_trip(-w, rule), -back), "sign-symmetric"
    for k in (-20, -1, 5, 40):
        assert torch.equal(round_trip(w * 2.0**k, rule), back * 2.0**k), "scale-equivariant"
    order = w.view(64, 3, 32).argsort(-1)
    assert (back.view(64, 3, 32).gather(-1, order).diff(dim=-1) >= 0).all(), "monotone within a block"
    assert torch.equal(torch.cat([round_trip(w[:20], rule), round_trip(w[20:], rule)]), back), "rows are independent"
    assert torch.equal(torch.cat([round_trip(w[:, :32], rule), round_trip(w[:, 32:], rule)], -1), back), "blocks too"


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32),
    rule=st.sampled_from(RULES),
)
@settings(max_examples=200, deadline=None)
def test_any_finite_block(values: list[float], rule: str) -> None:
    w = torch.tensor(values, dtype=torch.float64)
    packed, scale = encode_mxfp4(w, rule)
    back = decode_mxfp4(packed, scale, torch.float64)
    step = 2.0 ** (scale.item() - 127)
    assert 0 <= scale.item() <= 254
    # Within half the widest spacing (2) of the elements unless it saturated at 6.
    inside = w.abs() <= 6 * step
    assert ((back - w).abs()[inside] <= step).all()
    assert (back[~inside].abs() == 6 * step).all()
    if rule in ("rceil", "ceil"):
        assert inside.all()


def test_float32_and_bf16_encode_like_float64() -> None:
    w = _gaussian(8, 64).bfloat16()
    for rule in RULES:
        for encode in (encode_mxfp4, encode_mxfp8):
            results = [encode(w.to(dtype), rule) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
            for codes, scale in results[1:]:
                assert torch.equal(codes.view(torch.uint8), results[0][0].view(torch.uint8))
                assert torch.equal(scale, results[0][1])


@pytest.mark.parametrize("rule", RULES)
def test_zero_broken_and_tiny_blocks(rule: str) -> None:
    w = torch.zeros(5, 32)
    w[0, 3] = -0.0
    w[1, 5] = float("nan")
    w[2, 5], w[2, 6] = float("inf"), 3.0
    w[3] = 2.0**-140
    w[4] = 1.0
    for encode, decode in ((encode_mxfp4, decode_mxfp4), (encode_mxfp8, decode_mxfp8)):
        codes, scale = encode(w, rule)
        back = decode(codes, scale)
        assert scale.flatten().tolist()[:4] == [0, 255, 255, 0]
        assert torch.equal(back[0], w[0])
        assert back[0, 3].signbit()
        assert back[1:3].isnan().all()
        assert back[3].isfinite().all()
        assert torch.equal(back[4], w[4])
    # 2^-140 is below half of the least MXFP4 number 2^-128, but MXFP8 holds 2^-136 at least.
    assert torch.equal(_round_trip4(w[3:4], rule), torch.zeros(1, 32))


def test_empty_tensors_and_leading_dimensions() -> None:
    packed, scale = encode_mxfp4(torch.zeros(0, 64))
    assert (packed.shape, scale.shape) == ((0, 32), (0, 2))
    assert decode_mxfp4(packed, scale).shape == (0, 64)
    w = _gaussian(2, 3, 64)
    packed, scale = encode_mxfp4(w)
    assert (packed.shape, scale.shape) == ((2, 3, 32), (2, 3, 2))
    assert torch.equal(decode_mxfp4(packed, scale)[1, 2], _round_trip4(w[1, 2], "even"))


def test_refusals() -> None:
    w = torch.zeros(2, 48)
    for encode in (encode_mxfp4, encode_mxfp8):
        with pytest.raises(Error, match=r"\(2, 48\) must be a multiple of 32"):
            encode(w)
        with pytest.raises(Error, match="rule is 'EVEN'; allowed: 'even', 'floor', 'rceil', 'ceil'"):
            encode(torch.zeros(2, 32), "EVEN")
    packed, scale = encode_mxfp4(torch.zeros(4, 64))
    with pytest.raises(Error, match=r"scale has shape \(4, 1\); codes of shape \(4, 32\) need \(4, 2\)"):
        decode_mxfp4(packed, scale[:, :1])
    with pytest.raises(Error, match="48 values in the last dimension"):
        decode_mxfp4(packed[:, :24], scale)
    with pytest.raises(Error, match=r"codes are torch\.int32"):
        decode_mxfp4(packed.int(), scale)
    elements, scale = encode_mxfp8(torch.zeros(4, 64))
    with pytest.raises(Error, match="scale has shape"):
        decode_mxfp8(elements, scale.t().contiguous())


# Rounding at random


@pytest.mark.parametrize(
    ("encode", "decode", "bits"), [(encode_mxfp4, decode_mxfp4, 1), (encode_mxfp8, decode_mxfp8, 3)]
)
def test_random_rounding_has_the_value_as_its_mean(encode, decode, bits: int) -> None:  # type: ignore[no-untyped-def]
    """Within 5 standard errors of 2048 seeds, each at most spacing / 2 / sqrt(2048)."""
    w = 1 + 4.9 * torch.rand(2, 32, generator=torch.Generator().manual_seed(0))
    w[:, -1] = 6.0
    draws = torch.stack([decode(*encode(w, "rceil", seed)) for seed in range(2048)])
    spacing = 2.0 ** (w.log2().floor() - bits)
    assert ((draws.mean(0) - w).abs() <= 5 * spacing / 2 / 2048**0.5).all()
    assert ((draws - w).abs() < spacing).all()


def test_random_rounding_is_a_function_of_seed_and_place() -> None:
    w = _gaussian(64, 64)
    assert torch.equal(encode_mxfp4(w, "even", 7)[0], encode_mxfp4(w, "even", 7)[0])
    draws = [decode_mxfp4(*encode_mxfp4(w, "even", seed)) for seed in (0, 1, 2**32, 2**33)]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert 0.05 < (a != b).float().mean() < 0.5
    on_the_grid = decode_mxfp4(*encode_mxfp4(w))
    assert torch.equal(decode_mxfp4(*encode_mxfp4(on_the_grid, "even", 3)), on_the_grid)
    same = encode_mxfp4(torch.full((64, 64), 0.7), "even", 5)[0]
    assert len(same.unique()) > 1, "every place draws its own number"


def test_fake_quantize_is_encode_and_decode_and_passes_gradients_through() -> None:
    x = _gaussian(6, 64).requires_grad_()
    slope = _gaussian(6, 64, seed=1)
    for format, encode, decode in (("mxfp4", encode_mxfp4, decode_mxfp4), ("mxfp8", encode_mxfp8, decode_mxfp8)):
        y = fake_quantize(x, format, "rceil", 4)
        assert torch.equal(y, decode(*encode(x, "rceil", 4)))
        assert torch.equal(torch.autograd.grad(y, x, slope)[0], slope)
    with pytest.raises(Error, match="format is 'fp4'; allowed: 'mxfp4', 'mxfp8'"):
        fake_quantize(x, "fp4")
    low = torch.empty(6, 64, dtype=torch.bfloat16)
    assert fake_quantize(x, "mxfp4", out=low) is low
    assert torch.equal(low, decode_mxfp4(*encode_mxfp4(x), torch.bfloat16))
    with pytest.raises(Error, match=r"must be contiguous floats \(6, 64\)"):
        fake_quantize(x, "mxfp4", out=torch.zeros(64, 6))
