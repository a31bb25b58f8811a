"""Router logits and latent vector: against float64 products and their gradients."""

from __future__ import annotations

import pytest
import torch

from perilune import Error
from perilune.ops import moe

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
gpu = pytest.mark.gpu


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.double() - want).norm() / want.norm()).detach())


# Logits and their gradients must be float32's own; z is a product in the input's dtype. The router's weight gradient is
# cast to the weight's dtype (bf16: 2e-3), x's sums two parts each rounded to it.
@pytest.mark.parametrize(
    ("dtype", "logits", "rounded"),
    [(torch.float64, 1e-14, 1e-14), (torch.float32, 1e-6, 1e-6), (torch.bfloat16, 1e-6, 4e-3)],
    ids=str,
)
def test_logits_latent_and_gradients(dtype: torch.dtype, logits: float, rounded: float) -> None:
    plain = [_random(23, 96), _random(11, 96, seed=1) / 10, _random(40, 96, seed=2) / 10]
    leaves = [t.to(DEVICE, dtype).requires_grad_() for t in plain]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    got = moe.project(*leaves)
    want = wide[0] @ wide[1].t(), wide[0] @ wide[2].t()
    assert got[0].dtype == torch.promote_types(dtype, torch.float32)
    assert got[1].dtype == dtype
    assert _error(got[0], want[0]) <= logits
    assert _error(got[1], want[1]) <= rounded
    d = [_random(23, 11, seed=3).to(DEVICE), _random(23, 40, seed=4).to(DEVICE)]
    grads = torch.autograd.grad(got, leaves, [d[0].to(got[0].dtype), d[1].to(dtype)])
    for a, b in zip(grads, torch.autograd.grad(want, wide, d), strict=True):
        assert a.dtype == dtype
        assert _error(a, b) <= rounded


@gpu
def test_logits_on_the_matrix_units_are_float32_logits_at_full_width() -> None:
    x, router = (_random(*s, seed=i).to("cuda", torch.bfloat16) for i, s in enumerate([(512, 7168), (896, 7168)]))
    logits, z = moe.project(x, router, None)
    assert z is x
    want = x.double() @ router.double().t()
    # Sums of 7168 products: what a float32 product of the same numbers loses.
    assert _error(logits, want) <= 2 * max(_error(x.float() @ router.float().t(), want), 5e-7)


def test_without_a_latent_space_and_refusals() -> None:
    x, router = _random(3, 8), _random(5, 8)
    assert moe.project(x, router, None)[1] is x
    with pytest.raises(Error, match="router_ED has width 9; x has 8"):
        moe.project(x, _random(5, 9), None)
    with pytest.raises(Error, match="latent_LD has width 7; x has 8"):
        moe.project(x, router, _random(4, 7))
