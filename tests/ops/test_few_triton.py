"""Products of a handful of rows against float64: sums in fp32 of exact products, so 2^-20 of the sum of magnitudes, and
one rounding of the output where it is bf16."""

from __future__ import annotations

import pytest
import torch
from triton_cpu import DEVICE

from perilune.config import Activation
from perilune.ops import activation as elementwise
from perilune.ops import few
from perilune.ops.few_triton import glu_few, multiply_few

gpu = pytest.mark.gpu
SHAPES = [(1, 50, 7), (2, 64, 1), (3, 1500, 9), (4, 2048, 6)]
MODELS = [
    pytest.param(shape, marks=gpu) for shape in ((1, 2304, 256), (4, 4096, 2304), (2, 7168, 1024), (1, 128, 4096))
]


@pytest.mark.parametrize("shape", [*SHAPES, *MODELS], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, None], ids=str)
def test_products_of_few_rows(shape: tuple[int, int, int], out_dtype: torch.dtype | None) -> None:
    T, D, F = shape
    draw = torch.Generator().manual_seed(T)
    # Rows lie apart, with numbers between them that must not be read.
    x_TD = torch.full((T, D + 8), float("nan"), dtype=torch.bfloat16, device=DEVICE)[:, :D]
    w_FD = torch.full((F, D + 16), float("nan"), dtype=torch.bfloat16, device=DEVICE)[:, :D]
    x_TD.copy_(torch.randn(T, D, generator=draw))
    w_FD.copy_(torch.randn(F, D, generator=draw))
    got = multiply_few(x_TD, w_FD, out_dtype)
    want = x_TD.double() @ w_FD.double().t()
    bound = 2.0**-20 * (x_TD.double().abs() @ w_FD.double().abs().t())
    if got.dtype == torch.bfloat16:
        bound += 2.0**-7 * want.abs()
    assert got.dtype == (out_dtype or torch.bfloat16)
    assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("kind", ["silu", "situ"])
@pytest.mark.parametrize("shape", [*SHAPES, *MODELS], ids=str)
def test_the_gated_activation_of_two_products(shape: tuple[int, int, int], kind: str) -> None:
    """The activation of the products as `multiply_few` rounds them: one bf16 apart at most, as theirs."""
    T, D, F = shape
    draw, activation = torch.Generator().manual_seed(T), Activation(kind)  # type: ignore[arg-type]
    x_TD, gate_FD, up_FD = (
        torch.randn(rows, D, generator=draw).div(D**0.25).bfloat16().to(DEVICE) for rows in (T, F, F)
    )
    got = glu_few(x_TD, gate_FD, up_FD, activation)
    want = elementwise.glu(multiply_few(x_TD, gate_FD), multiply_few(x_TD, up_FD), activation)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)


def test_only_one_or_two_plain_rows_of_a_gpu_without_gradient_fit() -> None:
    x_TD, w_FD = torch.zeros(2, 64, dtype=torch.bfloat16, device=DEVICE), torch.zeros(8, 64).bfloat16().to(DEVICE)
    with torch.no_grad():
        assert few.fits(x_TD, w_FD) == x_TD.is_cuda
        others = [x_TD[:0], x_TD.float(), x_TD[0], torch.cat([x_TD, x_TD]), x_TD.t().contiguous().t(), x_TD.cpu()]
        assert not any(few.fits(other, w_FD) for other in others)
    assert not few.fits(x_TD, w_FD)
