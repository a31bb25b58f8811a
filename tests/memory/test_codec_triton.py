"""The codec's kernels give the bits of the plain one on a GPU, and nearly those in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from triton_cpu import CUDA, DEVICE

from perilune.memory import codec, codec_triton

BLOCK = codec.BLOCK


def hard(numbers: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers of many magnitudes with zeros, infinities, NaN, and the midpoints where ties break to even."""
    generator = torch.Generator().manual_seed(numbers)
    x = torch.randn(numbers, generator=generator) * 10.0 ** torch.randint(-6, 6, (numbers,), generator=generator)
    x[: numbers // 4] = 0
    if numbers > 300:
        x[140], x[141], x[270] = float("inf"), float("-inf"), float("nan")
        x[-50:] = torch.arange(50) * 8.0 + 4.0
        x[-1] = 448.0
    return x.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal numbers, NaN where NaN is; in the interpreter, which cuts bf16 off instead of rounding, one unit less."""
    if CUDA:
        return bool(((a.isnan() & b.isnan()) | (a == b)).all())
    near = (a.double() - b.double()).abs() <= b.double().abs() * (2**-7 if b.dtype == torch.bfloat16 else 0)
    return bool((b.isnan() | near).all())


def agree(code: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal E4M3 bytes, whatever NaN's sign.

    The interpreter casts carelessly: it has no NaN, breaks ties upwards, cuts subnormal numbers off, and loses a carry
    into the exponent. There neighbours are let pass, and what these flaws explain; a GPU must give the bits.
    """
    raw, right = ((c.view(torch.uint8) & 127).int() for c in (code, expected))
    less = right - raw
    same_sign = code.view(torch.uint8) >> 7 == expected.view(torch.uint8) >> 7
    if CUDA:
        return bool(((less == 0) & (same_sign | (right == 127))).all())
    flaw = (right == 127) | ((right <= 8) & (less > 0)) | ((right % 8 == 0) & (less == 8))
    return bool(((less.abs() <= 1) & same_sign | flaw).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numbers", [1, 127, 129, 1000, 64 * BLOCK, 64 * BLOCK + 5])
def test_blocks(dtype: torch.dtype, numbers: int) -> None:
    x = hard(numbers, dtype)
    expected = codec.encode(x)
    blocks = expected.numel() // (BLOCK + 4)
    got = torch.full_like(expected, 0xAB, device=DEVICE)
    code, scale_B = got[: blocks * BLOCK].view(torch.float8_e4m3fn), got[blocks * BLOCK :].view(torch.float32)
    codec_triton.encode_blocks(x.to(DEVICE), code, scale_B)
    assert torch.equal(got[blocks * BLOCK :].cpu(), expected[blocks * BLOCK :])
    assert agree(code.cpu(), expected[: blocks * BLOCK])
    code.copy_(expected[: blocks * BLOCK].view(torch.float8_e4m3fn))
    out = torch.full((numbers + 3,), 7.0, dtype=dtype, device=DEVICE)
    codec_triton.decode_blocks(code, scale_B, out[:numbers])
    assert same(out[:numbers].cpu(), codec.decode(expected, numbers, dtype))
    assert out[numbers:].tolist() == [7.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 60), (70, 300)])
@pytest.mark.parametrize("turned", [False, True])
def test_tiles(dtype: torch.dtype, shape: tuple[int, int], turned: bool) -> None:
    x_RC = hard(shape[0] * shape[1], dtype).view(shape)
    x_RC = x_RC.t() if turned else x_RC
    expected, scales = codec.encode_tiles(x_RC)
    code_RC, scale_rc = torch.empty_like(expected, device=DEVICE), torch.full_like(scales, -1, device=DEVICE)
    # The same strides on the device.
    codec_triton.encode_tiles(x_RC.t().to(DEVICE).t() if turned else x_RC.to(DEVICE), code_RC, scale_rc)
    assert torch.equal(scale_rc.cpu(), scales)
    assert agree(code_RC.cpu(), expected)
    code_RC.copy_(expected)
    out_RC = torch.empty(x_RC.shape, dtype=dtype, device=DEVICE)
    codec_triton.decode_tiles(code_RC, scale_rc, out_RC)
    assert same(out_RC.cpu(), codec.decode_tiles(expected, scales, dtype))


def test_tiles_of_a_transpose_are_the_transposed_tiles() -> None:
    x_RC = hard(130 * 300, torch.float32).view(130, 300)
    (code, scale), (code_t, scale_t) = codec.encode_tiles(x_RC), codec.encode_tiles(x_RC.t())
    assert torch.equal(code.view(torch.uint8).t(), code_t.view(torch.uint8))
    assert torch.equal(scale.t(), scale_t)


def test_coded_again_is_the_same() -> None:
    """What is computed again from decoded numbers and coded again has the same bytes: decode is exact in fp32."""
    x = torch.randn(40 * BLOCK, generator=torch.Generator().manual_seed(0))
    once = codec.encode(x)
    assert torch.equal(codec.encode(codec.decode(once, x.numel(), x.dtype)), once)
