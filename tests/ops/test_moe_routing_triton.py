"""Routing, sorting, dispatch and combination by the Triton kernels, against the reference.

In Triton's interpreter (no GPU) exp is another library's, so scores are compared to 2e-7; on a GPU ids, scores and
thresholds must be those of the reference to the bit. Sorted orders and sums in choice order are equal to the bit
everywhere in fp32 (each term is one product, rounded, then added; on a GPU the compiler contracts the two: 2^-22).
"""

from __future__ import annotations

import pytest
import torch
from triton_cpu import CUDA, DEVICE

from perilune.errors import Error
from perilune.ops.moe import reference
from perilune.ops.moe import triton_few as few
from perilune.ops.moe import triton_routing as kernels

gpu = pytest.mark.gpu


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _ids(tokens: int, experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    chosen = [torch.randperm(experts, generator=random)[:top_k] for _ in range(tokens)]
    return (torch.stack(chosen) if chosen else torch.empty(0, top_k, dtype=torch.int64)).to(DEVICE)


SIZES = [(37, 19, 3), (5, 16, 16), (1, 2, 1), (9, 33, 5), (0, 7, 2)]
K3 = pytest.param((1000, 896, 16), marks=gpu)


@pytest.mark.parametrize("sizes", [*SIZES, K3], ids=str)
@pytest.mark.parametrize("renormalize", [True, False])
def test_route_and_its_gradient(sizes: tuple[int, int, int], renormalize: bool) -> None:
    tokens, experts, top_k = sizes
    logits, bias = _random(tokens, experts), 0.2 * _random(experts, seed=1)
    if experts > 7:
        # Equal biased scores: the lower index must win.
        logits[:, 5], bias[5] = logits[:, 7], bias[7]
    logits.requires_grad_()
    got = kernels.route(logits, bias, top_k, 2.5, renormalize)
    want = reference.route(logits, bias, top_k, 2.5, renormalize)
    assert torch.equal(got.ids_TJ, want.ids_TJ)
    assert got.weights_TJ.dtype == got.scores_TE.dtype == torch.float32
    torch.testing.assert_close(got.weights_TJ, want.weights_TJ, rtol=5e-7, atol=0)
    error = 0 if CUDA else 2e-7
    torch.testing.assert_close(got.scores_TE, want.scores_TE, rtol=error, atol=0)
    assert (got.threshold_T is None) == (want.threshold_T is None) == (top_k == experts)
    if got.threshold_T is not None:
        assert not got.threshold_T.requires_grad
        torch.testing.assert_close(got.threshold_T, want.threshold_T, rtol=error, atol=error)
    # Gradients through weights and scores, against float64.
    wide = logits.detach().double().requires_grad_()
    plain = reference.route(wide, bias.double(), top_k, 2.5, renormalize)
    d_weights, d_scores = _random(tokens, top_k, seed=2), _random(tokens, experts, seed=3)
    for through in ("weights", "scores", "both"):
        pick = {"weights": [0], "scores": [1], "both": [0, 1]}[through]
        (a,) = torch.autograd.grad(
            [(got.weights_TJ, got.scores_TE)[i] for i in pick],
            logits,
            [(d_weights, d_scores)[i] for i in pick],
            retain_graph=True,
        )
        (b,) = torch.autograd.grad(
            [(plain.weights_TJ, plain.scores_TE)[i] for i in pick],
            wide,
            [(d_weights.double(), d_scores.double())[i] for i in pick],
            retain_graph=True,
        )
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6)


def test_negative_and_equal_scores_choose_the_lowest_index() -> None:
    logits = torch.zeros(2, 6, device=DEVICE)
    bias = torch.tensor([-3.0, -2.0, -2.0, -5.0, -2.0, -0.0], device=DEVICE)
    routing = kernels.route(logits, bias, 3, 1.0, True)
    assert routing.ids_TJ.tolist() == [[5, 1, 2]] * 2
    assert routing.threshold_T is not None
    assert routing.threshold_T.tolist() == [-1.5, -1.5]


def test_route_takes_narrow_logits() -> None:
    logits, bias = _random(4, 8).bfloat16().requires_grad_(), torch.zeros(8, device=DEVICE)
    routing = kernels.route(logits, bias, 2, 1.0, True)
    assert torch.equal(routing.ids_TJ, reference.route(logits, bias, 2, 1.0, True).ids_TJ)
    (d,) = torch.autograd.grad(routing.weights_TJ.sum(), logits)
    assert d.dtype == torch.bfloat16


def test_route_refuses_too_many_experts() -> None:
    with pytest.raises(Error, match="5000 experts; at most 4096"):
        kernels.route(torch.zeros(1, 5000, device=DEVICE), torch.zeros(5000, device=DEVICE), 2, 1.0, True)


@pytest.mark.parametrize("sizes", [*SIZES, (500, 19, 3), K3, pytest.param((8192, 896, 16), marks=gpu)], ids=str)
def test_permute_is_the_stable_sort(sizes: tuple[int, int, int]) -> None:
    tokens, experts, top_k = sizes
    ids = _ids(tokens, experts, top_k)
    order, offs = kernels.permute(ids, experts)
    want_order, want_offs = reference.permute(ids, experts)
    assert torch.equal(order, want_order)
    assert torch.equal(offs, want_offs)
    row = kernels.row_of_choice(order)
    assert torch.equal(order[row.long()], torch.arange(tokens * top_k, device=DEVICE))


def test_permute_with_all_tokens_on_one_expert_and_experts_without() -> None:
    for tokens in (20, 1500):
        ids = torch.full((tokens, 1), 11, device=DEVICE)
        order, offs = kernels.permute(ids, 40)
        assert torch.equal(order, torch.arange(tokens, device=DEVICE))
        assert offs.tolist() == [0] * 11 + [tokens] * 29


@pytest.mark.parametrize("sizes", [(12, 19, 3), (3, 4, 4), (0, 7, 2)], ids=str)
@pytest.mark.parametrize("width", [50, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_spread_and_sum(sizes: tuple[int, int, int], width: int, dtype: torch.dtype) -> None:
    tokens, experts, top_k = sizes
    order, _ = kernels.permute(_ids(tokens, experts, top_k), experts)
    x, weights = _random(tokens, width).to(dtype), _random(tokens, top_k, seed=1)
    rows = kernels.spread(x, order, top_k)
    assert torch.equal(rows, reference.spread(x, order, top_k))
    # Rows past the routed ones must not be read.
    rows = torch.cat([_random(tokens * top_k, width, seed=2).to(dtype), torch.full_like(x[:1], float("nan"))])
    row_TJ, plain_TJ = (room.row_of_choice(order).view(tokens, top_k) for room in (kernels, reference))
    # One bfloat16 either way: the interpreter truncates instead of rounding, a GPU rounds a sum of other last bits.
    ulp = {torch.bfloat16: 2**-7, torch.float32: 2**-20 if CUDA else 0}[dtype]
    for w in (weights, None):
        got, want = kernels.gather_sum(rows, row_TJ, w), reference.gather_sum(rows, plain_TJ, w)
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=ulp, atol=1e-6)
        if w is None and (CUDA or dtype == torch.float32):
            assert torch.equal(got, want)
    d = _random(tokens, width, seed=3).to(dtype)
    got_rows, got_weights = kernels.gather_sum_backward(d, rows, order, weights)
    want_rows, want_weights = reference.gather_sum_backward(d.double(), rows.double(), order, weights.double())
    assert (got_rows.double() - want_rows).norm() <= (ulp or 1e-7) * want_rows.norm()
    assert (got_weights - want_weights).norm() <= 1e-6 * want_weights.norm()


@pytest.mark.parametrize(
    "sizes", [(12, 19, 3), (5, 16, 16), (1, 300, 8), pytest.param((128, 896, 16), marks=gpu)], ids=str
)
@pytest.mark.parametrize("width", [50, 1500])
def test_few_tokens_are_arranged_as_by_the_single_kernels(sizes: tuple[int, int, int], width: int) -> None:
    tokens, experts, top_k = sizes
    x, ids = _random(tokens, width).bfloat16(), _ids(tokens, experts, top_k)
    weights, scores = _random(tokens, top_k, seed=1), _random(tokens, experts, seed=2)
    got = few.arrange(x, reference.Routing(ids, weights, scores, None))
    order, offs = reference.permute(ids, experts)
    assert torch.equal(got.offs_E, offs)
    assert torch.equal(got.weights_R, weights.flatten()[order])
    assert torch.equal(got.rows_RL, reference.spread(x, order, top_k))
    assert torch.equal(got.row_TJ, reference.row_of_choice(order).view(tokens, top_k))


def test_few_tokens_of_one_expert() -> None:
    x, ids = _random(20, 64).bfloat16(), torch.full((20, 1), 11, device=DEVICE)
    got = few.arrange(x, reference.Routing(ids, _random(20, 1), _random(20, 40), None))
    assert got.offs_E.tolist() == [0] * 11 + [20] * 29
    assert torch.equal(got.rows_RL, x)
