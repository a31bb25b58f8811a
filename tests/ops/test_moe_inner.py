"""Experts whose inner activation is rounded to MXFP8, against autograd through the formula in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf

from perilune import Error
from perilune.config import Activation
from perilune.ops import moe
from perilune.ops.activation import glu
from perilune.ops.mx import RULES, encode_mxfp4, fake_quantize

E, L, F = 5, 64, 32
ENDS = (0, 7, 7, 20, 29)


def _draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["situ", "silu"])
def test_outputs_and_gradients(kind: str, rule: str) -> None:
    """Same order of rounding, so 1e-12 in float64: a value at a tie may not move."""
    act = Activation(kind, 4.0, 25.0)  # type: ignore[arg-type]
    leaves = [
        _draw(ENDS[-1] + 3, L, seed=0),
        _draw(E, 2 * F, L, seed=1) / 8,
        _draw(E, L, F, seed=2) / 6,
        _draw(ENDS[-1] + 3, seed=3).abs(),
    ]
    ours, theirs = ([x.clone().requires_grad_() for x in leaves] for _ in range(2))
    offs_E = torch.tensor(ENDS, dtype=torch.int32)
    x, gate_up, down, w = ours
    y = moe.experts(x, moe.Dense(gate_up, down), offs_E, act, row_weights_R=w, inner_rule=rule)
    x2, gate_up2, down2, w2 = theirs
    rows = []
    for e, (start, end) in enumerate(zip((0, *ENDS), ENDS, strict=False)):
        gate, up = nnf.linear(x2[start:end], gate_up2[e]).chunk(2, -1)
        a = glu(gate, up, act) * w2[start:end, None]
        rows.append(nnf.linear(fake_quantize(a, "mxfp8", rule), down2[e]))
    want = torch.cat([*rows, torch.zeros(3, L, dtype=torch.float64)])
    assert (y - want).abs().max() <= 1e-12
    slope = _draw(*y.shape, seed=4)
    got = torch.autograd.grad(y, ours, slope)
    for a, b in zip(got, torch.autograd.grad(want, theirs, slope), strict=True):
        assert (a - b).abs().max() <= 1e-12 * max(1.0, float(b.abs().max()))
    plain = moe.experts(x, moe.Dense(gate_up, down), offs_E, act, row_weights_R=w)
    assert 1e-4 < (y - plain).norm() / plain.norm() < 0.1


def test_packed_weights_and_fixed_rows() -> None:
    act, offs_E = Activation("situ", 4.0, 25.0), torch.tensor(ENDS, dtype=torch.int32)
    x = _draw(ENDS[-1], L, seed=0).float()
    packed = moe.Packed(*encode_mxfp4(_draw(E, 2 * F, L, seed=1) / 8), *encode_mxfp4(_draw(E, L, F, seed=2) / 6))
    exact = moe.experts(x, packed, offs_E, act, exact=True, inner_rule="even")
    alone = moe.experts(x[7:9], packed, torch.tensor([0, 0, 0, 2, 2], dtype=torch.int32), act, True, inner_rule="even")
    assert torch.equal(exact[7:9], alone)
    with pytest.raises(Error, match="rule is 'nearest'; allowed"):
        moe.experts(x, packed, offs_E, act, inner_rule="nearest")
