"""Muon, the choice of optimizer, clipping, QK-clip and the schedule, each against its formula in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from perilune.errors import Error
from perilune.train.config import OptimConfig
from perilune.train.muon import Muon, orthogonalize
from perilune.train.optim import build_optimizers, clip_gradients, set_learning_rates
from perilune.train.qk_clip import qk_clip
from perilune.train.schedule import learning_rate


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16), (1, 24, 24)])
def test_orthogonalize_keeps_directions_and_levels_sizes(shape: tuple[int, int, int]) -> None:
    x = randn(*shape)
    y = orthogonalize(x, 5, torch.float64)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    # The polynomial acts on singular values alone, so U and V diagonalise the result too.
    inner = u.mT @ y @ vt.mT
    off = inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-10
    large = s / s.norm(dim=-1, keepdim=True) > 0.02
    levels = inner.diagonal(dim1=-2, dim2=-1)[large]
    assert levels.min() > 0.6
    assert levels.max() < 1.3


def test_orthogonalize_zero_stays_zero() -> None:
    assert not orthogonalize(torch.zeros(2, 4, 8)).any()


def reference_step(w: torch.Tensor, m: torch.Tensor, g: torch.Tensor, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One Muon step of one matrix, straight from the description, by singular values."""
    m = 0.95 * m + g
    u, s, vt = torch.linalg.svd(g + 0.95 * m, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return w * (1 - lr * 0.1) - lr * 0.2 * math.sqrt(max(w.shape)) * (u @ torch.diag(s) @ vt), m


def test_muon_per_head_and_per_expert_against_single_matrices() -> None:
    plain, heads, experts = (nn.Parameter(randn(*s)) for s in ((8, 12), (3 * 8, 12), (2, 2 * 8, 12)))
    params = [plain, heads, experts]
    blocks = [w.reshape(8, 12) for p in params for w in p.detach().reshape(-1, 8, 12).clone().unbind()]
    averages = [torch.zeros(8, 12, dtype=torch.float64) for _ in blocks]
    groups = [{"params": [p], "heads": n} for p, n in zip(params, (1, 3, 2), strict=True)]
    muon = Muon(groups, lr=0.02, ns_dtype=torch.float64)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = randn(*p.shape, seed=10 * step + i)
        grads = [g for p in params for g in p.grad.reshape(-1, 8, 12).unbind()]  # type: ignore[union-attr]
        muon.step()
        pairs = [reference_step(w, m, g, 0.02) for w, m, g in zip(blocks, averages, grads, strict=True)]
        blocks, averages = [w for w, _ in pairs], [m for _, m in pairs]
    got = [w for p in params for w in p.detach().reshape(-1, 8, 12).unbind()]
    for ours, want in zip(got, blocks, strict=True):
        assert (ours - want).abs().max() < 1e-6  # 1e-7 in the normaliser's epsilon


def test_muon_refuses_what_it_cannot_split() -> None:
    with pytest.raises(Error, match="with 3 heads"):
        Muon([nn.Parameter(torch.zeros(10, 4))], heads=3)
    with pytest.raises(Error, match="2 or 3 dims"):
        Muon([nn.Parameter(torch.zeros(4))])


def test_muon_skips_parameters_without_gradient() -> None:
    p = nn.Parameter(torch.ones(4, 4))
    Muon([p]).step()
    assert torch.equal(p.detach(), torch.ones(4, 4))


def test_build_splits_by_mark_and_decays_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(5, 4), nn.LayerNorm(4))
    params = dict(model.named_parameters())
    config = OptimConfig(weight_decay=0.3, adam_lr=1e-3)
    optimizers = build_optimizers(params, {"0.weight": 2}, config)
    assert [(len(g["params"]), g["heads"]) for g in optimizers["muon"].param_groups] == [(1, 2)]
    decays = {g["weight_decay"]: len(g["params"]) for g in optimizers["adamw"].param_groups}
    assert decays == {0.3: 1, 0.0: 3}
    assert list(build_optimizers(params, {}, config)) == ["adamw"]
    with pytest.raises(Error, match="to take q, which"):
        build_optimizers(params, {"q": 1}, config)
    assert set_learning_rates(optimizers, OptimConfig(lr=1.0, adam_lr=1e-3, warmup=0.0), 0, 10) == 1.0
    assert optimizers["adamw"].param_groups[0]["lr"] == 1e-3


def test_schedule() -> None:
    rates = [learning_rate(i, 200, 2.0, 0.05, 0.1) for i in range(200)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in pairwise(rates[9:]))
    assert rates[104] == pytest.approx(1.1)  # half way: the mean of peak and end
    assert [learning_rate(0, 1, 1.0, 0.01, 0.0)] == [1.0]


def test_clip_gradients() -> None:
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 4)]
    for i, p in enumerate(params):
        p.grad = randn(*p.shape, seed=i, dtype=torch.float32)
    want = torch.cat([p.grad for p in params]).double().norm()  # type: ignore[misc]
    norm = clip_gradients(params, 0.5)
    assert norm.item() == pytest.approx(want.item(), rel=1e-6)
    after = torch.cat([p.grad for p in params]).norm()  # type: ignore[misc]
    assert after.item() == pytest.approx(0.5, rel=1e-6)
    before = [p.grad.clone() for p in params]  # type: ignore[union-attr]
    clip_gradients(params, 10.0)
    assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))  # type: ignore[arg-type]


def test_clip_gradients_of_bfloat16_is_summed_wide() -> None:
    p = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    assert clip_gradients([p], 1e9).item() == 64.0


def test_clip_gradients_without_any() -> None:
    with pytest.raises(Error, match="no parameter has a gradient"):
        clip_gradients([nn.Parameter(torch.zeros(1))], 1.0)


def test_qk_clip_scales_logits_to_the_limit() -> None:
    heads, nope, rope, value, tokens, width = 3, 8, 4, 6, 9, 16
    q_w, kv_w = randn(heads * (nope + rope), width), randn(heads * (nope + value), width, seed=1)
    k_rope, x = randn(tokens, rope, seed=2), randn(tokens, width, seed=3)

    def logits(q_w: torch.Tensor, kv_w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = (x @ q_w.T).view(tokens, heads, nope + rope)
        k, v = (x @ kv_w.T).view(tokens, heads, nope + value).split([nope, value], dim=-1)
        s = torch.einsum("thn,shn->hts", q[..., :nope], k) + torch.einsum("thr,sr->hts", q[..., nope:], k_rope)
        return s, v

    before, v_before = logits(q_w, kv_w)
    top = before.amax(dim=(1, 2))
    limit = float(top.sort().values[0]) + 1e-9  # the smallest head stays, the two others are scaled
    factor = qk_clip(q_w, kv_w, top, nope, rope, limit)
    after, v_after = logits(q_w, kv_w)
    assert torch.allclose(after, before * factor[:, None, None], atol=1e-12)
    assert after.amax() <= limit + 1e-9
    assert (factor < 1).sum() == 2
    assert torch.equal(v_before, v_after)


def test_clip_gradients_takes_an_iterator_and_parts_of_a_parameter() -> None:
    """Parameters that can be read only once are still scaled, and numbers on several ranks count once."""
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))]
    params[0].grad, params[1].grad = torch.full((3,), 2.0), torch.full((4,), 1.0)
    norm = clip_gradients(iter(params), 1.0, copies=iter([1, 4]), add_squares=lambda squares: squares * 4)
    # 4 ranks: the first parameter is cut over them, the second is on all.
    assert norm.item() == pytest.approx((4 * 3 * 4 + 4) ** 0.5)
    assert params[0].grad.tolist() == pytest.approx([2 / norm.item()] * 3)


def test_the_norm_of_short_gradients_does_not_depend_on_how_they_are_split() -> None:
    grad = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    norms = []
    for pieces in (1, 2, 64):
        params = [nn.Parameter(torch.zeros(4096 // pieces, dtype=torch.bfloat16)) for _ in range(pieces)]
        for param, piece in zip(params, grad.chunk(pieces), strict=True):
            param.grad = piece.clone()
        norms.append(clip_gradients(params, 1e9).item())
    assert norms == pytest.approx([grad.double().norm().item()] * 3, rel=1e-6)
