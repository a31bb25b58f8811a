"""The MX kernels are the reference bit for bit, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from triton_cpu import CUDA, DEVICE

from perilune.ops.mx import RULES, fake_quantize
from perilune.ops.mx import reference as plain
from perilune.ops.mx import triton as kernels

SEEDS = (None, 0, 12345678901234567)


def _values(blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """Gaussian blocks over the whole range of exponents, and the corners of every rule; NaN lies behind them."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(blocks, 32, generator=g) * 2.0 ** torch.randint(-140, 126, (blocks, 1), generator=g)
    corners = torch.tensor([4, 4.0001, 6, 6.0001, 6.9999, 7, 7.75, 7.9999, 8, 448, 449, 464, 479, 480])
    x[: len(corners), 7] = corners
    x[: len(corners)] = x[: len(corners)].clamp(-500, 500)
    # Ties of E2M1 and E4M3, an empty block, signed zeros, broken blocks, subnormal numbers.
    x[20, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[20, 8:] = 0
    x[21] = -0.0
    x[22], x[22, 3] = 1, torch.nan
    x[23], x[23, 3] = 1, -torch.inf
    x[24] = 2.0**-140
    x[25] = 2.0**-149
    x[26] = 3.4e38
    x[27] = torch.arange(32) / 2.0**9
    x[27, 31] = 448
    if dtype == torch.bfloat16 and not CUDA:
        x[x.abs() < 2.0**-126] = 0  # the interpreter misreads subnormal bfloat16 numbers
    whole = torch.full((blocks + 1, 32), torch.nan, dtype=dtype)
    whole[:-1] = x.to(dtype)
    return whole.to(DEVICE)[:-1].view(-1, 64)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, signs of zero included; any NaN is any other."""
    if a.dtype == torch.bfloat16 and not CUDA:
        # The interpreter truncates to bfloat16; numbers in its normal range are exact either way.
        normal = b.abs().float() >= 2.0**-126
        a, b = torch.where(normal, a, 0), torch.where(normal, b, 0)
    if a.dtype.is_floating_point and a.dtype.itemsize > 1:
        return torch.equal(a.nan_to_num(nan=9.0), b.nan_to_num(nan=9.0)) and torch.equal(
            a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan()
        )
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", RULES)
def test_codes_scales_and_values(rule: str, seed: int | None, dtype: torch.dtype) -> None:
    x = _values(130, dtype)
    for format, encode, decode in (
        ("mxfp4", "encode_mxfp4", "decode_mxfp4"),
        ("mxfp8", "encode_mxfp8", "decode_mxfp8"),
    ):
        want = getattr(plain, encode)(x, rule, seed)
        got = getattr(kernels, encode)(x, rule, seed)
        assert all(a.dtype == b.dtype and _equal(a, b) for a, b in zip(got, want, strict=True))
        for wide in (torch.float32, torch.bfloat16):
            assert _equal(getattr(kernels, decode)(*got, wide), getattr(plain, decode)(*want, wide))
        assert _equal(
            kernels.fake_quantize(x, format, rule, seed, None), plain.fake_quantize(x, format, rule, seed, None)
        )


def test_every_code_with_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    scale = codes.repeat_interleave(16).view(256, 16)
    four = codes.expand(256, 256).contiguous()
    assert _equal(kernels.decode_mxfp4(four, scale, torch.float32), plain.decode_mxfp4(four, scale, torch.float32))
    eight = codes.view(torch.float8_e4m3fn).expand(256, 256).contiguous()
    scale = codes.repeat_interleave(8).view(256, 8)
    assert _equal(kernels.decode_mxfp8(eight, scale, torch.float32), plain.decode_mxfp8(eight, scale, torch.float32))


@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (2, 3, 96), (65, 32)])
def test_shapes_and_strides(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape[:-1], 2 * shape[-1], generator=torch.Generator().manual_seed(1)).to(DEVICE)[..., ::2]
    got, want = kernels.encode_mxfp4(x, "even", None), plain.encode_mxfp4(x, "even", None)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(kernels.decode_mxfp4(*got, torch.float32), plain.decode_mxfp4(*want, torch.float32))


def test_written_over_itself() -> None:
    x = _values(70, torch.float32)[:13].clone()
    want = plain.fake_quantize(x, "mxfp4", "even", None, None)
    assert kernels.fake_quantize(x, "mxfp4", "even", None, x) is x
    assert _equal(x, want)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_gpu_runs_the_kernels_and_passes_gradients_through(format: str) -> None:
    x = torch.randn(77, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    slope = torch.randn_like(x)
    y = fake_quantize(x, format)
    assert torch.equal(y, plain.fake_quantize(x.detach(), format, "even", None, None))
    assert torch.equal(torch.autograd.grad(y, x, slope)[0], slope)
