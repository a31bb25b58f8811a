"""The gated units' kernels against the formulas in float64, in Triton's interpreter and on a GPU.

fp32: 1e-6 of each value, about ten roundings (the tanh 1e-6 itself); gradients 1e-5 (relative Frobenius).
"""

from __future__ import annotations

import pytest
import torch
from test_activation import SILU, SITU, _formula
from triton_cpu import DEVICE

from perilune.config import Activation
from perilune.ops import activation_triton as kernels

gpu = pytest.mark.gpu
kinds = pytest.mark.parametrize("act", [SILU, SITU], ids=["silu", "situ"])


def _halves(rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate and up side by side in one tensor, and a slope."""
    g = torch.Generator().manual_seed(0)
    both = (5 * torch.randn(rows, 2 * width, generator=g)).to(DEVICE, dtype)
    gate, up = both.chunk(2, -1)
    return gate, up, torch.randn(rows, width, generator=g).to(DEVICE, dtype)


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def _check(act: Activation, rows: int, width: int, dtype: torch.dtype, limit: float) -> None:
    gate, up, d = _halves(rows, width, dtype)
    exact = [x.double().requires_grad_() for x in (gate, up)]
    want = _formula(*exact, act)
    assert _error(kernels.glu_forward(gate, up, act), want) < limit
    got = kernels.glu_backward(d, gate, up, act)
    assert _error(got, torch.cat(torch.autograd.grad(want, exact, d.double()), -1)) < 4 * limit


@kinds
@pytest.mark.parametrize(("rows", "width"), [(7, 12), (1, 1), (0, 12), (2, 3000)])
def test_values_and_gradients(act: Activation, rows: int, width: int) -> None:
    _check(act, rows, width, torch.float32, 2e-6)


def test_small_arguments_keep_their_digits() -> None:
    gate = torch.logspace(-6, 1, 400, device=DEVICE)[None]
    want = _formula(gate.double(), gate.double(), SITU)
    got = kernels.glu_forward(gate, gate.clone(), SITU)
    assert ((got.double() - want) / want).abs().max() < 3e-6


@kinds
def test_extremes_stay_finite(act: Activation) -> None:
    x = torch.tensor([-1e18, -1e4, -200.0, 0.0, 200.0, 1e4, 1e18], device=DEVICE)
    gate, up = (t.reshape(-1, 1) for t in torch.meshgrid(x, x, indexing="ij"))
    assert kernels.glu_forward(gate, up, act).isfinite().all()
    assert kernels.glu_backward(torch.ones_like(gate), gate, up, act).isfinite().all()


@kinds
def test_a_rows_bits_depend_on_that_row_alone(act: Activation) -> None:
    gate, up, d = _halves(9, 37, torch.float32)
    rows = slice(4, 5)
    assert torch.equal(kernels.glu_forward(gate, up, act)[rows], kernels.glu_forward(gate[rows], up[rows], act))
    part = kernels.glu_backward(d[rows], gate[rows], up[rows], act)
    assert torch.equal(kernels.glu_backward(d, gate, up, act)[rows], part)


@gpu
@kinds
@pytest.mark.parametrize("width", [33792, 6144, 100])
def test_gpu_shipped_widths(act: Activation, width: int) -> None:
    _check(act, 300, width, torch.bfloat16, 4e-3)
