"""Gated activations against the formulas in float64, and their bits."""

from __future__ import annotations

import pytest
import torch

from perilune import Error
from perilune.config import Activation
from perilune.ops.activation import glu, sigmoid

SILU, SITU = Activation("silu"), Activation("situ", beta=4.0, linear_beta=25.0)


def _formula(g: torch.Tensor, u: torch.Tensor, act: Activation) -> torch.Tensor:
    if act.kind == "silu":
        return torch.nn.functional.silu(g) * u
    left = act.beta * torch.tanh(g / act.beta) * torch.sigmoid(g)
    return left * act.linear_beta * torch.tanh(u / act.linear_beta)


def _pair(*shape: int, dtype: torch.dtype = torch.float64, spread: float = 5.0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    a, b = (spread * torch.randn(*shape, generator=g, dtype=torch.float64) for _ in range(2))
    return a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("act", [SILU, SITU], ids=["silu", "situ"])
@pytest.mark.parametrize("shape", [(7, 12), (3, 2, 5), (0, 12), (900, 100)])
def test_values_and_gradients_in_float64(act: Activation, shape: tuple[int, ...]) -> None:
    gate, up = (x.requires_grad_() for x in _pair(*shape))
    d = _pair(*shape, spread=1.0)[0]
    out, expected = glu(gate, up, act), _formula(gate, up, act)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    for got, want in zip(
        torch.autograd.grad(out, (gate, up), d), torch.autograd.grad(expected, (gate, up), d), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("act", [SILU, SITU], ids=["silu", "situ"])
def test_precision_of_narrow_dtypes(act: Activation) -> None:
    gate, up = _pair(64, 33, dtype=torch.bfloat16)
    exact = _formula(gate.double(), up.double(), act)
    # fp32 inside and one rounding: half a unit in the last place of bf16 (2^-8), plus a little of fp32's.
    torch.testing.assert_close(glu(gate, up, act).double(), exact, rtol=2.0**-8 * 1.01, atol=1e-30)
    gate, up = gate.float(), up.float()
    # About ten fp32 roundings.
    torch.testing.assert_close(glu(gate, up, act).double(), exact, rtol=1e-6, atol=1e-30)


def test_situ_saturates_and_extremes_stay_finite() -> None:
    x = torch.tensor([-3e38, -1e4, -200.0, 0.0, 200.0, 1e4, 3e38])
    gate, up = (t.reshape(-1, 1).requires_grad_() for t in torch.meshgrid(x, x, indexing="ij"))
    out = glu(gate, up, SITU)
    assert out.abs().max() == 100.0
    for d in torch.autograd.grad(out.sum(), (gate, up)):
        assert d.isfinite().all()
    gate = torch.tensor([[-200.0, -1e4]], requires_grad=True)
    d_gate, *_ = torch.autograd.grad(glu(gate, torch.ones(1, 2), SILU).sum(), (gate,))
    assert torch.equal(d_gate, torch.zeros(1, 2))


@pytest.mark.parametrize("act", [SILU, SITU], ids=["silu", "situ"])
def test_a_rows_bits_depend_on_that_row_alone(act: Activation) -> None:
    gate, up = _pair(2000, 37, dtype=torch.float32)
    full = glu(gate, up, act)
    for start, length in [(0, 1), (3, 1), (1999, 1), (11, 17), (1, 1500)]:
        rows = slice(start, start + length)
        assert torch.equal(glu(gate[rows].clone(), up[rows].clone(), act), full[rows])
    both = torch.cat([gate, up], -1)
    assert torch.equal(glu(*both.chunk(2, -1), act), full)


def test_sigmoid() -> None:
    x = torch.linspace(-100, 100, 4001, dtype=torch.float64).requires_grad_()
    y = sigmoid(x)
    torch.testing.assert_close(y, torch.sigmoid(x), rtol=1e-14, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(torch.sigmoid(x).sum(), x)[0], rtol=1e-12, atol=1e-16
    )
    small = x.detach().float()
    full = sigmoid(small)
    assert all(torch.equal(sigmoid(small[a : a + n].clone()), full[a : a + n]) for a in (0, 1, 5) for n in (1, 7, 3001))
    assert torch.equal(sigmoid(torch.tensor([-1e30, 1e30])), torch.tensor([0.0, 1.0]))
    assert torch.equal(sigmoid(small.bfloat16()), torch.sigmoid(small.bfloat16()))


def test_shapes_must_be_equal() -> None:
    with pytest.raises(Error, match="must be equal"):
        glu(torch.zeros(2, 3), torch.zeros(2, 4), SILU)
