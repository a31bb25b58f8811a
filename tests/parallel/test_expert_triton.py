"""The layer over memory that all ranks reach, on virtual ranks against the mixture in one place in float64.

In Triton's interpreter, and on a GPU where there is one.
"""

from __future__ import annotations

import pytest
import torch
from balanced import ACT, EXPERTS, INNER, TOP_K, WIDTH, Case, dense, gradients, mixture, poisoned
from triton_cpu import CUDA, DEVICE

from perilune import Error
from perilune.ops import moe
from perilune.ops.moe import Dense
from perilune.parallel import expert
from perilune.parallel.expert import DirectParallel, Virtual, direct_rows

NAN = float("nan")
if CUDA:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(autouse=True)
def poison_local_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = direct_rows._beside
    monkeypatch.setattr(direct_rows, "_beside", lambda like, slots: fresh(like, slots).fill_(NAN))


def run(case: Case, parallel: DirectParallel, sizes: list[int]) -> tuple[list[torch.Tensor], expert.Stats]:
    used: list[expert.DirectPlanned] = []

    def layer(x: torch.Tensor, routing: moe.Routing, weights: Dense) -> torch.Tensor:
        used.append(parallel.plan(routing.ids_TJ.split(sizes)))
        return expert.balanced_experts(parallel, x, routing.weights_TJ, weights, used[0], ACT)

    return gradients(case, layer, DEVICE), parallel.stats(used[0], WIDTH * 8, 1000)


@pytest.mark.parametrize(
    ("sizes", "align", "dtype"),
    [
        ([12], 1, torch.float32),
        ([9, 3], 4, torch.float64),
        ([6, 6], 1, torch.float32),
        ([5, 0, 4, 3], 4, torch.float32),
        ([5, 0, 4, 3], 1, torch.float64),
    ],
    ids=str,
)
def test_the_direct_layer_equals_the_dense_one(sizes: list[int], align: int, dtype: torch.dtype) -> None:
    ranks, case = len(sizes), Case(12, 4.0, dtype)
    transport = Virtual(ranks, DEVICE)
    parallel = poisoned(DirectParallel(transport, EXPERTS, TOP_K, 12, WIDTH, INNER, dtype, align=align))
    got, stats = run(case, parallel, sizes)
    # Sums of 24 to 72 products in another order.
    bound = 1e-12 if dtype == torch.float64 else 3e-6
    for a, b in zip(got, gradients(Case(12, 4.0, torch.float64), dense), strict=True):
        assert (a.double().cpu() - b).norm() <= bound * b.norm()
    assert stats.residual == 0
    if ranks > 1:
        assert stats.before > 1.1
        assert stats.copies > 0
    ids = moe.route(case.leaves()[1].detach(), case.bias, TOP_K, 1.0).ids_TJ.split(sizes)
    listed = expert.ExpertParallel(expert.Local(ranks), EXPERTS, TOP_K, 12, align=align)
    assert stats == listed.stats(listed.plan(ids), WIDTH * 8, 1000)
    assert parallel.rows == listed.rows


@pytest.mark.gpu
def test_the_direct_layer_in_bf16_at_width() -> None:
    """Against float64 on bf16 inputs: operands rounded to bf16 twice on the way (activation, output)."""
    experts, top_k, width, inner, tokens = 32, 8, 1024, 768, 512
    generator = torch.Generator().manual_seed(0)
    x, logits = (torch.randn(4 * tokens, n, generator=generator) for n in (width, experts))
    logits[:, :8] += 1.5
    up = torch.randn(experts, 2 * inner, width, generator=generator) / width**0.5
    down = torch.randn(experts, width, inner, generator=generator) / inner**0.5
    d_y = torch.randn(4 * tokens, width, generator=generator).bfloat16()
    routing = moe.route(logits, torch.zeros(experts), top_k, 1.0)
    results = []
    for ranks in (0, 1, 2, 4):
        dtype = torch.float64 if ranks == 0 else torch.bfloat16
        leaves = [t.bfloat16().to("cuda", dtype).requires_grad_() for t in (x, up, down)]
        w = routing.weights_TJ.detach().to("cuda", torch.float64 if ranks == 0 else torch.float32).requires_grad_()
        ids = routing.ids_TJ.to("cuda")
        if ranks == 0:
            y = mixture(leaves[0], ids, w, Dense(*leaves[1:]), experts, exact=False)
        else:
            size = 4 * tokens // ranks
            parallel = poisoned(DirectParallel(Virtual(ranks, "cuda"), experts, top_k, size, width, inner))
            planned = parallel.plan(ids.split(size))
            y = expert.balanced_experts(parallel, leaves[0], w, Dense(*leaves[1:]), planned, ACT)
            stats = parallel.stats(planned, 1, 1)
            assert ranks == 1 or (stats.before > 1.1 and stats.copies > 0)
        grads = torch.autograd.grad(y, (*leaves, w), d_y.to("cuda", dtype))
        results.append([t.detach().double().cpu() for t in (y, *grads)])
    for got in results[1:]:
        for a, b in zip(got, results[0], strict=True):
            assert (a - b).norm() <= 1e-2 * b.norm()
    # Which rank computes a row does not change its bits as long as a product's bits depend on its group alone.
    assert (results[1][0] - results[3][0]).norm() <= 1e-3 * results[1][0].norm()


def small(**changes: object) -> DirectParallel:
    arguments = {"experts": 4, "top_k": 2, "tokens": 3, "width": 8, "inner": 8, "dtype": torch.float32} | changes
    return DirectParallel(Virtual(2, DEVICE), **arguments)


def test_ids_out_of_range_are_left_out_and_told_late() -> None:
    parallel = small()
    ids = torch.tensor([[0, 3], [1, 9], [2, -1]], device=DEVICE)
    planned = parallel.plan([ids, ids[:0]])
    assert (planned.dst[0] >= 0).tolist() == [[True, True], [True, False], [True, False]]
    with pytest.raises(Error, match=r"ids were out of range; must be in -1\.\.3"):
        parallel.stats(planned, 1, 1)
    parallel.raise_if_refused()


def test_refusals_before_work() -> None:
    parallel = small()
    ids = torch.zeros(4, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(Error, match=r"must be int64 \[tokens, 2\] of at most 3 tokens"):
        parallel.plan([ids, ids[:1]])
    with pytest.raises(Error, match="multiples of 16 bytes"):
        small(width=6)
    with pytest.raises(Error, match="the workspace is for"):
        small(tokens=5, workspace=parallel.workspace)
    with pytest.raises(Error, match="made with training=False"):
        small(training=False).exchange.begin_backward()
    with pytest.raises(Error, match="experts is 5"):
        small(experts=5)


def test_a_stale_copy_is_an_error() -> None:
    first = small()
    second = small(workspace=first.workspace)
    ids = torch.tensor([[0, 1]] * 3, device=DEVICE)
    own = [tuple(torch.randn(2, *shape, device=DEVICE) for shape in ((16, 8), (8, 8))) for _ in range(2)]
    planned = first.plan([ids, ids])
    generation = first.copies.push(own, planned)
    assert torch.equal(first.copies.weights(1, generation)[0][0], own[0][0][int(planned.plan.slots_RB[1, 0])])
    second.copies.push(own, planned)
    with pytest.raises(Error, match=r"copies of generation \d+ are gone, the workspace holds \d+"):
        first.copies.weights(1, generation)
