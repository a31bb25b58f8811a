"""Normalisations against float64 autograd, their rounding order, and their bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from perilune import Error
from perilune.ops.norm import add_rms_norm, gated_rms_norm, l2_norm, rms_norm

Op = Callable[..., torch.Tensor]


def _rms(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return w * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _cases() -> dict[str, tuple[Op, Op, int]]:
    """name -> (ours, the formula, how many of (x, w, gate) it takes)."""
    return {
        "rms": (lambda x, w: rms_norm(x, w, 1e-3), lambda x, w: _rms(x, w, 1e-3), 2),
        "gated": (
            lambda x, w, g: gated_rms_norm(x, w, g, 1e-3),
            lambda x, w, g: _rms(x, w, 1e-3) * torch.sigmoid(g),
            3,
        ),
        "l2": (lambda x: l2_norm(x, 1e-3), lambda x: x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + 1e-3), 1),
    }


def _inputs(shape: tuple[int, ...], number: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2))
    w = torch.rand(shape[-1], generator=g, dtype=torch.float64) + 0.5
    return [t.to(dtype) for t in (x, w, gate)][:number]


@pytest.mark.parametrize("name", _cases())
@pytest.mark.parametrize("shape", [(5, 24), (3, 4, 32), (0, 8), (700, 130)])
def test_values_and_gradients_in_float64(name: str, shape: tuple[int, ...]) -> None:
    ours, formula, number = _cases()[name]
    inputs = [t.requires_grad_() for t in _inputs(shape, number)]
    out, expected = ours(*inputs), formula(*inputs)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    d = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for got, want in zip(torch.autograd.grad(out, inputs, d), torch.autograd.grad(expected, inputs, d), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", _cases())
def test_float32_is_near_float64(name: str) -> None:
    ours, formula, number = _cases()[name]
    inputs = [t.requires_grad_() for t in _inputs((50, 96), number, torch.float32)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    out, expected = ours(*inputs), formula(*wide)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-7)
    grads, wants = (torch.autograd.grad(y.sum(), xs) for y, xs in ((out, inputs), (expected, wide)))
    for got, want in zip(grads, wants, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_rms_norm_rounds_before_the_weight_and_the_gated_form_after() -> None:
    x, w, gate = _inputs((40, 64), 3, torch.bfloat16)
    normal = torch.nn.functional.rms_norm(x.float(), (64,), eps=1e-5)
    assert torch.equal(rms_norm(x, w, 1e-5), normal.to(torch.bfloat16) * w)
    fused = (normal * w.float() * torch.sigmoid(gate.float())).double()
    # One rounding to bf16, half a unit in the last place, plus fp32's.
    torch.testing.assert_close(gated_rms_norm(x, w, gate, 1e-5).double(), fused, rtol=2.0**-8 * 1.01, atol=0)
    assert rms_norm(x, w.float(), 1e-5).dtype == torch.bfloat16


def test_l2_epsilon_is_on_the_sum() -> None:
    x = torch.full((1, 128), 1e-3)
    expected = 1e-3 / (128e-6 + 1e-6) ** 0.5
    torch.testing.assert_close(l2_norm(x), torch.full((1, 128), expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", _cases())
@pytest.mark.parametrize("width", [7, 33, 128])
def test_a_rows_bits_depend_on_that_row_alone(name: str, width: int) -> None:
    ours, _, number = _cases()[name]
    x, *rest = (t.requires_grad_() for t in _inputs((1111, width), number, torch.float32))
    d = torch.randn(1111, width, generator=torch.Generator().manual_seed(1))
    full = ours(x, *rest)
    (d_full,) = torch.autograd.grad(full, (x,), d)
    for start, length in [(0, 1), (5, 1), (1110, 1), (17, 16), (2, 1000)]:
        rows = slice(start, start + length)
        part_x = x.detach()[rows].clone().requires_grad_()
        part = ours(part_x, *(t[rows] if t.dim() == 2 else t for t in rest))
        assert torch.equal(part, full[rows])
        assert torch.equal(torch.autograd.grad(part, part_x, d[rows])[0], d_full[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm_is_the_addition_and_the_norm_bit_for_bit(dtype: torch.dtype) -> None:
    x, w, added = _inputs((40, 64), 3, dtype)
    total, y = add_rms_norm(x, added, w, 1e-5)
    assert torch.equal(total, x + added)
    assert torch.equal(y, rms_norm(x + added, w, 1e-5))
    with pytest.raises(Error, match=r"added is torch.float64 \(40, 64\)"):
        add_rms_norm(x, added.double(), w, 1e-5)


def test_widths_must_match() -> None:
    with pytest.raises(Error, match=r"needs \(8,\)"):
        rms_norm(torch.zeros(2, 8), torch.zeros(9), 1e-5)
    with pytest.raises(Error, match="gate has shape"):
        gated_rms_norm(torch.zeros(2, 8), torch.zeros(8), torch.zeros(2, 9), 1e-5)
