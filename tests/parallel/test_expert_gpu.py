"""`ExpertParallel` on a GPU: virtual ranks in bf16 against float64 in one place, and copies that travel as MXFP4."""

from __future__ import annotations

import pytest
import torch
from balanced import ACT, mixture

from perilune.ops import moe
from perilune.ops.moe import Dense, Packed
from perilune.ops.mx import decode_mxfp4, encode_mxfp4
from perilune.parallel import expert
from perilune.parallel.expert import ExpertParallel, Local

E, J, L, F, T, RANKS = 32, 8, 512, 384, 1024, 4

pytestmark = pytest.mark.gpu


def inputs(on_grid: bool) -> tuple[torch.Tensor, moe.Routing, list[torch.Tensor]]:
    """x, routing with rank 0's experts preferred, and both weights, all of whose values fit bf16."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    logits = draw(T, E)
    logits[:, : E // RANKS] += 1.5
    tensors = [draw(E, 2 * F, L) / L**0.5, draw(E, L, F) / F**0.5]
    if on_grid:
        tensors = [decode_mxfp4(*encode_mxfp4(t)) for t in tensors]
    routing = moe.route(logits, torch.zeros(E, device="cuda"), J, 1.0)
    return draw(T, L).bfloat16(), routing, [t.bfloat16() for t in tensors]


def layer(
    parallel: ExpertParallel | None, x: torch.Tensor, routing: moe.Routing, tensors: list[torch.Tensor], wide: bool
) -> list[torch.Tensor]:
    """[y, dx, d routing weights, d gate_up, d down], on virtual ranks or, without `parallel`, in one place."""
    dtype = torch.float64 if wide else torch.bfloat16
    leaves = [t.to(dtype).requires_grad_() for t in (x, *tensors)]
    w = routing.weights_TJ.detach().to(torch.float64 if wide else torch.float32).requires_grad_()
    if parallel is None:
        y = mixture(leaves[0], routing.ids_TJ, w, Dense(*leaves[1:]), E, exact=False)
    else:
        planned = parallel.plan(routing.ids_TJ.split(T // RANKS))
        assert parallel.stats(planned, 1, 1).copies > 0
        y = expert.balanced_experts(parallel, leaves[0], w, Dense(*leaves[1:]), planned, ACT)
    d_y = torch.randn(T, L, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16).to(dtype)
    return [y.detach(), *torch.autograd.grad(y, (leaves[0], w, *leaves[1:]), d_y)]


def test_virtual_ranks_in_bf16_equal_float64() -> None:
    given = inputs(on_grid=False)
    parallel = ExpertParallel(Local(RANKS), E, J, T // RANKS, align=8)
    # Operands are rounded to bf16 twice on the way: activation and output.
    for a, b in zip(layer(parallel, *given, wide=False), layer(None, *given, wide=True), strict=True):
        assert (a.double() - b).norm() <= 1e-2 * b.norm()


def test_mxfp4_copies_of_weights_on_its_grid_change_no_bit() -> None:
    given = inputs(on_grid=True)
    results = [
        layer(ExpertParallel(Local(RANKS), E, J, T // RANKS, copy_rule=rule), *given, wide=False)
        for rule in (None, "even")
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_mxfp4_copies_of_other_weights_are_rounded_where_they_compute() -> None:
    given = inputs(on_grid=False)
    plain, packed = (
        layer(ExpertParallel(Local(RANKS), E, J, T // RANKS, copy_rule=rule), *given, wide=False)[0].double()
        for rule in (None, "even")
    )
    # E2M1 rounds by up to 1/6 of a value, 0.1 of a row's norm.
    assert 1e-3 < (plain - packed).norm() / plain.norm() < 0.2


@torch.no_grad()
def test_packed_experts_are_copied_packed() -> None:
    x, routing, tensors = inputs(on_grid=False)
    weights = Packed(*(part for t in tensors for part in encode_mxfp4(t)))
    parallel = ExpertParallel(Local(RANKS), E, J, T // RANKS)
    planned = parallel.plan(routing.ids_TJ.split(T // RANKS))
    got = expert.balanced_experts(parallel, x, routing.weights_TJ, weights, planned, ACT)
    want = mixture(x, routing.ids_TJ, routing.weights_TJ, weights, E, exact=False)
    assert (got.double() - want.double()).norm() <= 1e-2 * want.double().norm()
