"""FP8 blocks against a loop in float64 that knows only the format's table of numbers."""

from __future__ import annotations

import pytest
import torch

from perilune import Error
from perilune.memory.codec import BLOCK, coded_bytes, decode, encode

# Every finite E4M3 number, from its bits: sign, 4 exponent bits with bias 7, 3 fraction bits, no infinity.
TABLE = sorted(
    sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))
    for sign in (1, -1)
    for exponent in range(16)
    for fraction in range(8)
    if (exponent, fraction) != (15, 7)
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numbers", [0, 1, 127, 128, 129, 1000])
def test_nearest_number_of_the_table(dtype: torch.dtype, numbers: int) -> None:
    x = (torch.randn(numbers, generator=torch.Generator().manual_seed(numbers)) * 3).to(dtype)
    codes = encode(x)
    assert codes.nbytes == coded_bytes(numbers)
    got = decode(codes, numbers, dtype)
    assert got.dtype == dtype
    assert got.shape == x.shape
    table = torch.tensor(TABLE, dtype=torch.float64)
    for begin in range(0, numbers, BLOCK):
        block = x[begin : begin + BLOCK].double()
        scale = (block.abs().max().float() / 448).double()
        nearest = (block[:, None] / scale - table).abs().min(1).values * scale
        error = (got[begin : begin + BLOCK].double() - block).abs()
        # One more rounding to the tensor's dtype, and the scale's own in float32.
        assert (error <= nearest + block.abs() * 2 * max(torch.finfo(dtype).eps, 2**-23)).all()


def test_saturation_zeros_and_nan() -> None:
    x = torch.zeros(3 * BLOCK)
    x[0], x[1] = float("inf"), 7.0
    x[BLOCK], x[BLOCK + 1] = float("nan"), -2.0
    got = decode(encode(x), x.numel(), x.dtype)
    assert got[:3].tolist() == [7.0, 7.0, 0.0]
    assert got[BLOCK].isnan()
    assert got[BLOCK + 1] == -2.0
    assert not got[BLOCK + 2 :].any()


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_error_bound(scale: float) -> None:
    x = torch.randn(64 * BLOCK, generator=torch.Generator().manual_seed(3)) * scale
    got = decode(encode(x), x.numel(), x.dtype)
    block_scale = (x.view(-1, BLOCK).abs().amax(1, keepdim=True) / 448).expand(-1, BLOCK).reshape(-1)
    assert ((got - x).abs() <= (x.abs() * 2**-4 * 1.0001).maximum(block_scale * 2**-10 * 1.0001)).all()


@pytest.mark.parametrize("x", [torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2)])
def test_other_tensors_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(Error, match="must be floating-point and flat"):
        encode(x)
