"""Kernels of `ExpertParallel` against the torch code that specifies them: routes, messages, and the layer over both.

In Triton's interpreter, and on a GPU where there is one.
"""

from __future__ import annotations

import pytest
import torch
from balanced import ACT, EXPERTS, INNER, TOP_K, WIDTH, Case, gradients
from triton_cpu import CUDA, DEVICE

from perilune import Error
from perilune.ops import moe
from perilune.ops.moe import Dense
from perilune.parallel import expert
from perilune.parallel.expert import ExpertParallel, Local, ids, messages, routes, steps

E, J = 12, 3
MANY, FEW = (37, 0, 300), (9, 0, 17)


def by_kernels(patch: pytest.MonkeyPatch, on: bool) -> None:
    for module in (ids, routes, messages):
        patch.setattr(module, "by_kernels", lambda x: on)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = steps._buffer
    monkeypatch.setattr(steps, "_buffer", lambda like, rows: fresh(like, rows).fill_(float("nan")))


def draw(holes: bool, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Ids of three ranks, most of them of rank 0's experts; with holes some are not routed, and one token's never."""
    generator = torch.Generator().manual_seed(3)
    out = []
    for tokens in sizes:
        p = torch.ones(tokens, E)
        p[:, :4] = 20
        chosen = torch.multinomial(p, J, generator=generator) if tokens else torch.empty(0, J, dtype=torch.int64)
        if holes and tokens:
            chosen[torch.rand(tokens, J, generator=generator) < 0.2] = -1
            chosen[5] = -1
        out.append(chosen.to(DEVICE))
    return out


def planned_by(patch: pytest.MonkeyPatch, on: bool, given: list[torch.Tensor]) -> expert.Planned:
    by_kernels(patch, on)
    return ExpertParallel(Local(3), E, J, 300, align=4).plan(given)


@pytest.mark.parametrize("holes", [False, True])
def test_routes_are_those_of_torch(holes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the bit: they are integers. 300 tokens are two blocks of the kernels, and 0 tokens none."""
    given = draw(holes, MANY)
    want, got = (planned_by(monkeypatch, on, given) for on in (False, True))
    assert any(want.slots)
    for name in ("payloads", "choices", "slots", "own_rows", "all_rows"):
        assert getattr(got, name) == getattr(want, name), name
    for a, b in zip(got.routes, want.routes, strict=True):
        assert (a.choices_sent, a.choices_received) == (b.choices_sent, b.choices_received)
        for name in ("place_n", "token_P", "row_n", "origin_n"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize(
    ("width", "dtype", "of_weights"),
    [
        (20, torch.float32, torch.float32),
        (6, torch.float64, torch.float64),
        (34, torch.bfloat16, torch.float32),
        (5, torch.bfloat16, torch.float32),  # rows of odd size take the way of bytes
    ],
    ids=str,
)
def test_rows_and_weights_arrive_as_by_torch(
    width: int, dtype: torch.dtype, of_weights: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved to the bit, NaN where nothing was written; sums in choice order are the same additions, one rounding."""
    given = draw(True, FEW)
    x, d_y = ([torch.randn(n, width, device=DEVICE).to(dtype) for n in FEW] for _ in range(2))
    w = [torch.rand(n, J, device=DEVICE).to(of_weights) for n in FEW]
    results = []
    for on in (False, True):
        planned = planned_by(monkeypatch, on, given)
        parallel = ExpertParallel(Local(3), E, J, 300, align=4)
        flat: list[torch.Tensor] = []
        for inputs, weights in (([x], None), ([], w), ([x], w), ([x, d_y], w)):
            arrived = parallel.dispatch_together(inputs, weights, planned)
            for buffers, numbers in arrived:
                flat += [*buffers, *([] if numbers is None else [numbers])]
        rows = [buffers[1] for buffers, _ in arrived]
        results.append([*parallel.combine(rows, planned), *flat, *parallel.give_back(rows, planned)])
    assert sum(int(t.isnan().sum()) for t in results[0]) > 0
    for a, b in zip(*(result[:3] for result in results), strict=True):
        # The interpreter cuts bf16 off where a GPU rounds it.
        cut = 2**-7 if dtype == torch.bfloat16 and not CUDA else 0
        assert ((a.double() - b.double()).abs() <= cut * b.double().abs()).all()
    for a, b in zip(*(result[3:] for result in results), strict=True):
        assert torch.equal(a.nan_to_num(7e3), b.nan_to_num(7e3))
    # What was not routed comes back as zero.
    for back, chosen in zip(results[1][-3:], given, strict=True):
        assert torch.equal((back != 0).any(-1), chosen >= 0)


@pytest.mark.parametrize(("align", "dtype"), [(1, torch.float32), (4, torch.float64)], ids=str)
def test_the_layer_by_kernels(align: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the layer in torch: the same rows meet the same experts, and sums have the same order."""
    case = Case(40, 4.0, dtype)
    results = []
    for on in (False, True):
        by_kernels(monkeypatch, on)
        parallel = ExpertParallel(Local(4), EXPERTS, TOP_K, 20, align=align)

        def layer(
            x: torch.Tensor, routing: moe.Routing, weights: Dense, parallel: ExpertParallel = parallel
        ) -> torch.Tensor:
            planned = parallel.plan(routing.ids_TJ.split([20, 3, 0, 17]))
            assert any(planned.slots)
            return expert.balanced_experts(parallel, x, routing.weights_TJ, weights, planned, ACT)

        results.append(gradients(case, layer, DEVICE))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert results[0][0].shape == (40, WIDTH)
    assert results[0][4].shape == (EXPERTS, WIDTH, INNER)


def test_bad_ids_are_refused_by_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    by_kernels(monkeypatch, True)
    parallel = ExpertParallel(Local(2), 4, 2, 8)
    good = torch.zeros(8, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(Error, match=r"ids lie in 0\.\.4; must be in -1\.\.3"):
        parallel.plan([good, good + torch.tensor([0, 4], device=DEVICE)])
    with pytest.raises(Error, match=r"ids lie in -2\.\.0"):
        parallel.plan([good - torch.tensor([0, 2], device=DEVICE), good])
    with pytest.raises(Error, match="9 tokens on a rank"):
        parallel.plan([good, torch.zeros(9, 2, dtype=torch.int64, device=DEVICE)])
    assert CUDA or parallel.plan([good, good]).all_rows == (16, 16)
