"""linear_exact and dot_exact: right, and the same bits for a row in any company."""

from __future__ import annotations

import pytest
import torch

from perilune import Error
from perilune.ops.linear import dot_exact, linear, linear_exact

DTYPES = [torch.float32, torch.float64]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 31, 72, 128, 512, 513, 700, 1536])
def test_linear_exact_rows_do_not_see_each_other(width: int, dtype: torch.dtype) -> None:
    x_TD, w_FD = _random(130, width, dtype=dtype), _random(70, width, dtype=dtype, seed=1)
    full_TF = linear_exact(x_TD, w_FD)
    for start, length in [(0, 1), (5, 1), (129, 1), (0, 3), (7, 15), (1, 16), (3, 17), (64, 66), (0, 128)]:
        part_TF = linear_exact(x_TD[start : start + length], w_FD)
        assert torch.equal(part_TF, full_TF[start : start + length]), (start, length)
    order = torch.randperm(130, generator=torch.Generator().manual_seed(2))
    assert torch.equal(linear_exact(x_TD[order], w_FD), full_TF[order])


@pytest.mark.parametrize("width", [48, 1100])
def test_linear_against_float64(width: int) -> None:
    x_TD, w_FD = _random(37, width), _random(20, width, seed=1)
    expected = x_TD.double() @ w_FD.double().t()
    # A sum of `width` products in fp32: a few units in the last place of its typical size.
    for op in (linear, linear_exact):
        torch.testing.assert_close(op(x_TD, w_FD).double(), expected, rtol=0, atol=2e-6 * width**0.5)


def test_linear_exact_gradients_and_leading_dimensions() -> None:
    x = _random(2, 3, 600, dtype=torch.float64).requires_grad_()
    w = _random(5, 600, dtype=torch.float64, seed=1).requires_grad_()
    g = _random(2, 3, 5, dtype=torch.float64, seed=2)
    got = torch.autograd.grad(linear_exact(x, w), (x, w), g)
    want = torch.autograd.grad(x @ w.t(), (x, w), g)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_linear_exact_takes_no_rows_and_refuses_other_widths() -> None:
    assert linear_exact(torch.zeros(0, 8), torch.zeros(5, 8)).shape == (0, 5)
    with pytest.raises(Error, match="width 8 but w has 9"):
        linear_exact(torch.zeros(2, 8), torch.zeros(5, 9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 100, 128, 2304])
def test_dot_exact(width: int, dtype: torch.dtype) -> None:
    x_TD, w_D = _random(133, width, dtype=dtype), _random(width, dtype=dtype, seed=1)
    full_T = dot_exact(x_TD, w_D)
    # As above; fp64 leaves nothing to see at this tolerance.
    torch.testing.assert_close(full_T.double(), x_TD.double() @ w_D.double(), rtol=0, atol=2e-6 * width**0.5)
    for start, length in [(0, 0), (0, 1), (132, 1), (2, 15), (3, 16), (1, 50)]:
        assert torch.equal(dot_exact(x_TD[start : start + length], w_D), full_T[start : start + length])
