"""Balancer: micro-batches add up to one step, exact and by histogram; the bias reaches the router."""

from __future__ import annotations

import pytest
import torch
from train_tiny import tiny_model

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.model import Transformer, initialize
from perilune.ops.moe import route
from perilune.train.balance import Balancer, imbalance
from perilune.train.config import BalanceConfig


@pytest.fixture
def model() -> Transformer:
    return initialize(Transformer(ModelConfig.from_hf(tiny_model())))


def skewed(tokens: int, seed: int, bias_E: torch.Tensor) -> dict[int, object]:
    logits = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(seed)) + torch.linspace(-1, 1, 8)
    return {1: route(logits, bias_E, 2, 1.0)}


@pytest.mark.parametrize("bins", [0, 1000])
def test_next_step_is_even(model: Transformer, bins: int) -> None:
    balancer = Balancer(model, BalanceConfig(bins=bins))
    before = []
    for step in range(12):
        for micro in range(3):
            balancer.add(skewed(500, 10 * step + micro, model.layers[1].ffn.router.bias_E))  # type: ignore[arg-type, union-attr]
        before.append(imbalance(balancer.update()[1]))
    assert before[0] > 2
    assert sum(before[-4:]) / 4 < 1.12  # 1,500 tokens: an expert's share fluctuates by about 5 per cent
    assert abs(model.layers[1].ffn.router.bias_E.mean()) < 1e-6  # type: ignore[union-attr, arg-type]


def test_micro_batches_equal_one_batch(model: Transformer) -> None:
    results = []
    whole = skewed(600, 3, torch.zeros(8))[1]
    for parts in (1, 3):
        balancer = Balancer(model, BalanceConfig(bins=0))
        with torch.no_grad():
            model.layers[1].ffn.router.bias_E.zero_()  # type: ignore[union-attr, operator]
        for i in range(parts):
            rows = slice(i * 600 // parts, (i + 1) * 600 // parts)
            piece = type(whole)(*(t[rows] for t in vars(whole).values()))
            balancer.add({1: piece})  # type: ignore[dict-item]
        load = balancer.update()[1]
        results.append((load, model.layers[1].ffn.router.bias_E.clone()))  # type: ignore[union-attr, operator]
    assert torch.equal(results[0][0], results[1][0])
    assert int(results[0][0].sum()) == 1200
    assert torch.equal(results[0][1], results[1][1])


def test_ema_keeps_a_share(model: Transformer) -> None:
    balancers = [Balancer(model, BalanceConfig(bins=0, ema=ema)) for ema in (0.0, 0.75)]
    found = []
    for balancer in balancers:
        balancer.bias[1].zero_()
        balancer.add(skewed(400, 1, torch.zeros(8)))  # type: ignore[arg-type]
        balancer.update()
        found.append(balancer.bias[1].clone())
    assert torch.allclose(found[1], 0.25 * found[0])


def test_imbalance() -> None:
    assert imbalance(torch.tensor([5, 5, 5, 5])) == 1.0
    assert imbalance(torch.tensor([0, 0, 8, 0])) == 4.0
    assert imbalance(torch.zeros(4)) == 1.0


def test_negative_bins_are_refused() -> None:
    with pytest.raises(Error, match=r"balance\.bins is -1"):
        BalanceConfig(bins=-1)
