"""Routing, row order, experts, combination and balance, each against something written plainly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune import Error
from perilune.config import Activation
from perilune.ops import moe
from perilune.ops.activation import glu
from perilune.ops.moe import Dense, Packed
from perilune.ops.mx import decode_mxfp4, encode_mxfp4

SITU, SILU = Activation("situ"), Activation("silu")


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Routing


def test_route_is_the_formula() -> None:
    logits, bias = _random(50, 12).requires_grad_(), 0.3 * _random(12, seed=1)
    got = moe.route(logits, bias, 4, 2.5)
    scores = torch.sigmoid(logits)
    for t in range(50):
        order = sorted(range(12), key=lambda e, t=t: (-(scores[t, e] + bias[e]).item(), e))  # type: ignore[misc]
        assert got.ids_TJ[t].tolist() == order[:4]
        chosen = scores[t, order[:4]]
        torch.testing.assert_close(got.weights_TJ[t], 2.5 * chosen / chosen.sum(), rtol=1e-12, atol=0)
        torch.testing.assert_close(got.threshold_T[t], scores[t, order[4]] + bias[order[4]], rtol=1e-14, atol=0)
    d = _random(50, 4, seed=2)
    picked = scores.gather(-1, got.ids_TJ)
    (want,) = torch.autograd.grad(2.5 * picked / picked.sum(-1, keepdim=True), logits, d)
    torch.testing.assert_close(torch.autograd.grad(got.weights_TJ, logits, d)[0], want, rtol=1e-11, atol=1e-13)


def test_route_ties_go_to_the_lowest_index() -> None:
    routing = moe.route(torch.zeros(3, 300), torch.zeros(300), 7, 1.0)
    assert routing.ids_TJ.tolist() == [list(range(7))] * 3
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]])
    assert moe.route(logits, torch.zeros(6), 5, 1.0).ids_TJ.tolist() == [[1, 2, 4, 0, 3]]


def test_route_without_renormalising_and_with_every_expert() -> None:
    logits = _random(5, 4)
    routing = moe.route(logits, torch.zeros(4), 4, 3.0, renormalize=False)
    torch.testing.assert_close(routing.weights_TJ, 3 * torch.sigmoid(logits.gather(-1, routing.ids_TJ)))
    assert routing.threshold_T is None


def test_the_bias_selects_but_does_not_weigh() -> None:
    logits = torch.zeros(1, 4)
    routing = moe.route(logits, torch.tensor([0.0, 0.0, 5.0, 9.0]), 2, 1.0)
    assert routing.ids_TJ.tolist() == [[3, 2]]
    assert routing.weights_TJ.tolist() == [[0.5, 0.5]]


def test_route_is_fp32_for_narrow_logits_and_bitwise_per_token() -> None:
    logits = _random(777, 19, dtype=torch.float32)
    bias = 0.1 * _random(19, seed=1, dtype=torch.float32)
    full = moe.route(logits, bias, 3, 2.0)
    for start, length in [(0, 1), (776, 1), (9, 33)]:
        rows = slice(start, start + length)
        part = moe.route(logits[rows].clone(), bias, 3, 2.0)
        assert torch.equal(part.ids_TJ, full.ids_TJ[rows])
        assert torch.equal(part.weights_TJ, full.weights_TJ[rows])
        assert torch.equal(part.threshold_T, full.threshold_T[rows])
    assert moe.route(logits.bfloat16(), bias, 3, 2.0).weights_TJ.dtype == torch.float32


@pytest.mark.parametrize("top_k", [0, 5])
def test_route_refuses(top_k: int) -> None:
    with pytest.raises(Error, match=f"top_k is {top_k}; must be in 1..4"):
        moe.route(torch.zeros(2, 4), torch.zeros(4), top_k, 1.0)
    with pytest.raises(Error, match="bias_E has shape"):
        moe.route(torch.zeros(2, 4), torch.zeros(5), 2, 1.0)


# To rows and back


def test_permute_groups_by_expert_and_keeps_token_order() -> None:
    ids = torch.tensor([[2, 0], [0, 2], [4, 0]])
    order, offs = moe.permute(ids, 5)
    assert order.tolist() == [1, 2, 5, 0, 3, 4]
    assert offs.tolist() == [3, 3, 5, 5, 6]
    assert offs.dtype == torch.int32


def test_dispatch_and_combine_are_the_sum_over_choices() -> None:
    tokens, top_k, width = 23, 3, 10
    ids = torch.stack([torch.randperm(7, generator=torch.Generator().manual_seed(i))[:top_k] for i in range(tokens)])
    order, _ = moe.permute(ids, 7)
    x, weights = _random(tokens, width).requires_grad_(), _random(tokens, top_k, seed=1).requires_grad_()
    factors = _random(7, seed=2)
    rows = moe.dispatch(x, order, top_k)
    assert torch.equal(rows, x[order // top_k])
    # Expert e multiplies by factors[e], so the mixture has a closed form.
    out = moe.combine(rows * factors[ids.reshape(-1)[order]].unsqueeze(-1), order, weights)
    expected = x * (weights * factors[ids]).sum(-1, keepdim=True)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    d = _random(tokens, width, seed=3)
    for got, want in zip(
        torch.autograd.grad(out, (x, weights), d), torch.autograd.grad(expected, (x, weights), d), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_combine_adds_in_choice_order_in_fp32_and_casts_once() -> None:
    ids = torch.tensor([[1, 0, 2]])
    order, _ = moe.permute(ids, 3)
    by_choice = torch.tensor([[1.0], [3.0], [-(2.0**20)]])
    rows = torch.empty(3, 1)
    rows[torch.argsort(order)] = by_choice
    weights = torch.tensor([[2.0**-24, 1.0, 2.0**-20]])
    # 2^-24 + 3 loses the first term in fp32; in another order it would survive 3 - 1 = 2.
    assert moe.combine(rows, order, weights).item() == (torch.tensor(2.0**-24) + 3.0 - 1.0).item()
    narrow = moe.combine(rows.bfloat16(), order, weights)
    assert narrow.dtype == torch.bfloat16


def test_combine_does_not_read_past_the_routed_rows() -> None:
    ids = torch.tensor([[1, 0], [0, 1]])
    order, _ = moe.permute(ids, 2)
    rows = torch.cat([_random(4, 3), torch.full((2, 3), float("nan"), dtype=torch.float64)]).requires_grad_()
    weights = _random(2, 2, seed=1).requires_grad_()
    out = moe.combine(rows, order, weights)
    assert out.isfinite().all()
    d_rows, d_weights = torch.autograd.grad(out.sum(), (rows, weights))
    assert d_weights.isfinite().all()
    assert torch.equal(d_rows[4:], torch.zeros(2, 3, dtype=torch.float64))


# Experts


def _naive(
    rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ends: list[int], act: Activation
) -> torch.Tensor:
    out = torch.zeros_like(rows)
    start = 0
    for e, end in enumerate(ends):
        width = down.shape[-1]
        h = rows[start:end] @ gate_up[e].t()
        left, right = h[:, :width], h[:, width:]
        if act.kind == "silu":
            a = torch.nn.functional.silu(left) * right
        else:
            a = act.beta * torch.tanh(left / act.beta) * torch.sigmoid(left)
            a = a * act.linear_beta * torch.tanh(right / act.linear_beta)
        out = torch.cat([out[:start], a @ down[e].t(), out[end:]])
        start = end
    return out


def _expert_inputs(dtype: torch.dtype, latent: int = 32, width: int = 64, experts: int = 5) -> list[torch.Tensor]:
    """[rows, gate_up, down] of ordinary size; ENDS uses 40 of 44 rows."""
    return [
        _random(44, latent).to(dtype),
        (_random(experts, 2 * width, latent, seed=1) / latent**0.5).to(dtype),
        (_random(experts, latent, width, seed=2) / width**0.5).to(dtype),
    ]


ENDS = [7, 7, 24, 40, 40]  # experts 1 and 4 are empty
OFFS = torch.tensor(ENDS, dtype=torch.int32)


# fp32: sums of 64 products; bf16: h, a and y are each rounded to 8 bits.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("act", [SITU, SILU], ids=["situ", "silu"])
@pytest.mark.parametrize("sizes", [(32, 64), (32, 7), (31, 64)], ids=str)
def test_experts_against_a_float64_loop(
    dtype: torch.dtype, tolerance: float, act: Activation, sizes: tuple[int, int]
) -> None:
    inputs = [t.requires_grad_() for t in _expert_inputs(dtype, *sizes)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    rows, gate_up, down = inputs
    out, expected = moe.experts(rows, Dense(gate_up, down), OFFS, act), _naive(*wide, ENDS, act)
    d = _random(44, sizes[0], seed=3)
    d[40:] = float("nan")
    d_wide = d.clone()
    d_wide[40:] = 0
    got = [out, *torch.autograd.grad(out, inputs, d.to(dtype))]
    want = [expected, *torch.autograd.grad(expected, wide, d_wide)]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() <= tolerance * b.norm()
    assert torch.equal(out[40:], torch.zeros_like(out[40:]))
    assert torch.equal(got[1][40:], torch.zeros_like(out[40:]))
    for d_weight in got[2:]:
        assert torch.equal(d_weight[[1, 4]], torch.zeros_like(d_weight[[1, 4]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_tail_is_neither_read_nor_left_uninitialised(dtype: torch.dtype) -> None:
    rows, gate_up, down = _expert_inputs(dtype)
    rows[40:] = float("nan")
    for t in (rows, gate_up, down):
        t.requires_grad_()
    for _ in range(20):
        # Freed NaN buffers of the sizes in play: an uninitialised output would pick one up.
        del [torch.full((44, n), float("nan"), dtype=dtype) for n in (32, 64, 128)][:]
        out = moe.experts(rows, Dense(gate_up, down), OFFS, SITU)
        # The expanded gradient of a sum has strides of zero.
        for t in (out, *torch.autograd.grad(out.sum(), (rows, gate_up, down))):
            assert t.isfinite().all()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_rows_at_all(exact: bool, dtype: torch.dtype) -> None:
    _, gate_up, down = (t.requires_grad_() for t in _expert_inputs(dtype))
    for number in (0, 3):
        rows = torch.full((number, 32), float("nan"), dtype=dtype, requires_grad=True)
        out = moe.experts(rows, Dense(gate_up, down), torch.zeros(5, dtype=torch.int32), SITU, exact=exact)
        for t in (out, *torch.autograd.grad(out.sum(), (rows, gate_up, down))):
            assert torch.equal(t, torch.zeros_like(t))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_exact_rows_do_not_see_each_other(dtype: torch.dtype, packed: bool) -> None:
    rows, gate_up, down = _expert_inputs(dtype)
    weights: Dense | Packed = _pack(gate_up, down) if packed else Dense(gate_up, down)
    full = moe.experts(rows, weights, OFFS, SITU, exact=True)
    torch.testing.assert_close(full, moe.experts(rows, weights, OFFS, SITU), rtol=1e-5, atol=1e-6)
    expert_of_row = torch.bucketize(torch.arange(40), OFFS, right=True)
    for row in (0, 6, 7, 23, 39):
        offs = (torch.arange(5) >= expert_of_row[row]).to(torch.int32)
        assert torch.equal(moe.experts(rows[row : row + 1].clone(), weights, offs, SITU, exact=True)[0], full[row])


def test_experts_bits_repeat() -> None:
    rows, gate_up, down = (t.requires_grad_() for t in _expert_inputs(torch.float32))
    runs = []
    for _ in range(2):
        out = moe.experts(rows, Dense(gate_up, down), OFFS, SITU)
        runs.append([out, *torch.autograd.grad(out.pow(2).sum(), (rows, gate_up, down))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def _pack(gate_up: torch.Tensor, down: torch.Tensor) -> Packed:
    return Packed(*encode_mxfp4(gate_up), *encode_mxfp4(down))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=str)
def test_packed_experts_are_the_decoded_ones(dtype: torch.dtype, tolerance: float) -> None:
    rows, gate_up, down = _expert_inputs(dtype)
    rows.requires_grad_()
    packed = _pack(gate_up, down)
    decoded = Dense(
        decode_mxfp4(packed.gate_up_codes, packed.gate_up_scales, dtype),
        decode_mxfp4(packed.down_codes, packed.down_scales, dtype),
    )
    d = _random(44, 32, seed=3, dtype=dtype)
    results = []
    for weights in (packed, decoded):
        out = moe.experts(rows, weights, OFFS, SITU)
        results.append((out, *torch.autograd.grad(out, rows, d)))
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


def test_experts_refuse_wrong_shapes_and_dtypes() -> None:
    rows, gate_up, down = _expert_inputs(torch.float32)
    with pytest.raises(Error, match=r"gate_up_E2FL has shape \(4, 128, 32\); rows and offs_E need \(5, 128, 32\)"):
        moe.experts(rows, Dense(gate_up[:4], down), OFFS, SITU)
    with pytest.raises(Error, match=r"down_ELF is torch\.float64"):
        moe.experts(rows, Dense(gate_up, down.double()), OFFS, SITU)
    packed = _pack(gate_up, down)
    broken = Packed(packed.gate_up_codes, packed.gate_up_scales, packed.down_codes, packed.down_scales[..., :1])
    with pytest.raises(Error, match="down_scales has shape"):
        moe.experts(rows, broken, OFFS, SITU)


def test_the_whole_layer_is_the_dense_sum_over_experts() -> None:
    tokens, experts, top_k = 30, 5, 2
    _, gate_up, down = _expert_inputs(torch.float64)
    x, logits = _random(tokens, 32, seed=4).requires_grad_(), _random(tokens, experts, seed=5).requires_grad_()
    routing = moe.route(logits, torch.zeros(experts, dtype=torch.float64), top_k, 2.5)
    order, offs = moe.permute(routing.ids_TJ, experts)
    rows = moe.experts(moe.dispatch(x, order, top_k), Dense(gate_up, down), offs, SITU)
    out = moe.combine(rows, order, routing.weights_TJ)
    h_ETF = torch.einsum("tl,efl->etf", x, gate_up)
    y_ETL = torch.einsum("etf,elf->etl", glu(h_ETF[..., :64], h_ETF[..., 64:], SITU), down)
    s = torch.sigmoid(logits)
    w = torch.zeros_like(s).scatter(-1, routing.ids_TJ, s.gather(-1, routing.ids_TJ))
    expected = torch.einsum("te,etl->tl", 2.5 * w / w.sum(-1, keepdim=True), y_ETL)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    d = _random(tokens, 32, seed=6)
    for got, want in zip(
        torch.autograd.grad(out, (x, logits), d), torch.autograd.grad(expected, (x, logits), d), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


# Balance


def _routing(
    tokens: int, experts: int, top_k: int, skew: float = 1.0, seed: int = 0
) -> tuple[moe.Routing, torch.Tensor]:
    logits = _random(tokens, experts, seed=seed) + skew * _random(experts, seed=seed + 1)
    bias = 0.05 * _random(experts, seed=seed + 2)
    return moe.route(logits, bias, top_k, 1.0), bias


@given(tokens=st.integers(1, 60), experts=st.integers(2, 9), data=st.data())
@settings(max_examples=50, deadline=None)
def test_quantile_bias_is_the_order_statistic(tokens: int, experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts - 1))
    routing, _ = _routing(tokens, experts, top_k)
    got = moe.quantile_bias(routing.scores_TE, routing.threshold_T, top_k)
    rank = math.ceil(tokens * top_k / experts)
    raw = []
    for e in range(experts):
        r = sorted((routing.threshold_T[t] - routing.scores_TE[t, e]).item() for t in range(tokens))
        raw.append(r[rank - 1])
    want = torch.tensor([b - sum(raw) / experts for b in raw], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_quantile_bias_evens_out_the_load() -> None:
    """Two rounds on a heavily skewed router; a stationary batch."""
    experts, top_k, tokens = 32, 4, 4000
    logits = _random(tokens, experts) + 1.5 * _random(experts, seed=1)
    bias = torch.zeros(experts, dtype=torch.float64)
    worst = []
    for _ in range(8):
        routing = moe.route(logits, bias, top_k, 1.0)
        load = moe.expert_load(routing.ids_TJ, experts)
        assert int(load.sum()) == tokens * top_k
        worst.append(load.max().item() * experts / (tokens * top_k))
        bias = moe.quantile_bias(routing.scores_TE, routing.threshold_T, top_k)
        assert abs(bias.mean().item()) < 1e-12
    assert worst[0] > 3
    assert worst[-1] < 1.1


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(4000, 16, 2), (50, 6, 5), (1, 3, 1)])
def test_histogram_bias_is_within_a_bin_of_the_exact_one(tokens: int, experts: int, top_k: int) -> None:
    routing, bias = _routing(tokens, experts, top_k)
    counts = moe.threshold_histogram(routing.scores_TE, routing.threshold_T, bias)
    assert counts.shape == (experts, 1000)
    assert torch.equal(counts.sum(-1), torch.full((experts,), tokens))
    got = moe.histogram_bias(counts, bias, top_k)
    exact = moe.quantile_bias(routing.scores_TE, routing.threshold_T, top_k)
    bin_width = (bias.max() - bias.min() + 2).item() / 1000
    # Each raw bias is off by at most one bin, and so is the mean that both take off.
    assert (got - exact).abs().max() <= 2 * bin_width
    assert abs(got.mean().item()) < 1e-12


def test_histograms_of_parts_add_up() -> None:
    routing, bias = _routing(100, 8, 2)
    whole = moe.threshold_histogram(routing.scores_TE, routing.threshold_T, bias, bins=50)
    parts = [
        moe.threshold_histogram(routing.scores_TE[r], routing.threshold_T[r], bias, bins=50)
        for r in (slice(0, 37), slice(37, 100))
    ]
    assert torch.equal(parts[0] + parts[1], whole)


def test_balance_refuses() -> None:
    with pytest.raises(Error, match="0 tokens"):
        moe.quantile_bias(torch.zeros(0, 4), torch.zeros(0), 2)
    with pytest.raises(Error, match=r"top_k is 4; must be in 1..3"):
        moe.quantile_bias(torch.zeros(3, 4), torch.zeros(3), 4)
