"""The balanced layer on virtual ranks against the mixture computed in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from balanced import ACT, EXPERTS, INNER, TOP_K, WIDTH, Case, dense, gradients, mixture

from perilune import Error
from perilune.ops import moe
from perilune.ops.moe import Dense, Packed
from perilune.ops.mx import decode_mxfp4, encode_mxfp4
from perilune.parallel import expert
from perilune.parallel.expert import ExpertParallel, Local, SlotPool, steps

F64, F32 = torch.float64, torch.float32


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer row starts as NaN, and so does every slot."""
    fresh, open_slots = steps._buffer, SlotPool.open
    monkeypatch.setattr(steps, "_buffer", lambda like, rows: fresh(like, rows).fill_(float("nan")))

    def poisoned(pool: SlotPool, weights: list[list[torch.Tensor]], slots: int) -> expert.Copies:
        copies = open_slots(pool, weights, slots)
        for tensor in pool._slots.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 255)
        return copies

    monkeypatch.setattr(SlotPool, "open", poisoned)


def run(case: Case, parallel: ExpertParallel, sizes: list[int]) -> tuple[list[torch.Tensor], expert.Stats]:
    """[y, dx, d logits, d gate_up, d down] of the balanced layer, and what the plan did."""
    used: list[expert.Planned] = []

    def layer(x: torch.Tensor, routing: moe.Routing, weights: Dense) -> torch.Tensor:
        used.append(parallel.plan(routing.ids_TJ.split(sizes)))
        return expert.balanced_experts(parallel, x, routing.weights_TJ, weights, used[0], ACT, exact=True)

    return gradients(case, layer), parallel.stats(used[0], WIDTH * 8, 1000)


def sizes_of(ranks: int, tokens: int) -> list[int]:
    """Ragged; the last of 8 ranks has none."""
    small = 3 if ranks > 1 else 0
    sizes = [tokens - small * (ranks - 1), *[small] * (ranks - 1)]
    return [*sizes[:-2], sizes[-2] + sizes[-1], 0] if ranks == 8 else sizes


POLICIES: dict[str, Callable[[], expert.Policy]] = {
    "exact": expert.exact,
    "one donor": expert.one_donor,
    "tolerant": lambda: expert.tolerant(0.05, 2),
    "budget": lambda: expert.budget(1),
    "off": expert.off,
}


@pytest.mark.parametrize("skew", [0.0, 4.0])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_equals_the_dense_layer_in_fp64(ranks: int, policy: str, skew: float) -> None:
    case = Case(tokens=45, skew=skew, dtype=F64)
    parallel = ExpertParallel(Local(ranks), EXPERTS, TOP_K, 45, POLICIES[policy](), align=4)
    got, stats = run(case, parallel, sizes_of(ranks, 45))
    want = gradients(case, dense)
    # Other order of additions in the weight gradients only.
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 1e-10 * b.abs().max()
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    if stats.before > 1.1 and policy in ("exact", "one donor", "budget"):
        assert stats.copies > 0
        assert stats.moved > 0
    if policy == "exact":
        assert stats.residual == 0
    if policy == "off":
        assert stats.copies == 0


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_y_and_dx_are_bitwise_the_same_over_ranks(dtype: torch.dtype) -> None:
    case = Case(tokens=50, skew=3.0, dtype=dtype)
    runs = [
        run(case, ExpertParallel(Local(ranks), EXPERTS, TOP_K, 50), sizes_of(ranks, 50))[0] for ranks in (1, 2, 4, 8)
    ]
    for other in runs[1:]:
        assert torch.equal(other[0], runs[0][0])
        assert torch.equal(other[1], runs[0][1])
        assert torch.equal(other[2], runs[0][2])
        # Weight gradients: sums of the parts in another order.
        for a, b in zip(other[3:], runs[0][3:], strict=True):
            assert (a - b).abs().max() <= (1e-5 if dtype == F32 else 1e-12) * b.abs().max()
    torch.testing.assert_close(runs[0][0], dense_value(case), rtol=0, atol=0)


def dense_value(case: Case) -> torch.Tensor:
    return gradients(case, dense)[0]


# fp32: sums of 24 or 32 products, in grouped products whose order may depend on the other rows.
@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_the_fast_experts_within_rounding(dtype: torch.dtype, tolerance: float) -> None:
    case = Case(tokens=48, skew=3.0, dtype=dtype)
    parallel = ExpertParallel(Local(4), EXPERTS, TOP_K, 12, align=8)

    def layer(x: torch.Tensor, routing: moe.Routing, weights: Dense) -> torch.Tensor:
        planned = parallel.plan(routing.ids_TJ.split(12))
        return expert.balanced_experts(parallel, x, routing.weights_TJ, weights, planned, ACT)

    for a, b in zip(gradients(case, layer), gradients(Case(48, 3.0, F64), dense), strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_one_token_a_rank_and_padded_ids() -> None:
    """A decoding step: 8 ranks, batch slots of which some are empty."""
    case = Case(tokens=16, skew=4.0, dtype=F64)
    x, logits, gate_up, down = (t.detach() for t in case.leaves())
    routing = moe.route(logits, case.bias, TOP_K, 1.0)
    live = torch.arange(16) % 2 == 0
    ids = routing.ids_TJ.masked_fill(~live.unsqueeze(1), -1)
    x = x.masked_fill(~live.unsqueeze(1), float("nan"))
    parallel = ExpertParallel(Local(8), EXPERTS, TOP_K, 2)
    planned = parallel.plan(ids.split(2))
    y = expert.balanced_experts(parallel, x, routing.weights_TJ, Dense(gate_up, down), planned, ACT, exact=True)
    part = moe.Routing(routing.ids_TJ[live], routing.weights_TJ[live], routing.scores_TE[live], None)
    assert torch.equal(y[live], dense(x[live], part, Dense(gate_up, down)))
    assert torch.equal(y[~live], torch.zeros_like(y[~live]))
    stats = parallel.stats(planned, 1, 1)
    assert (stats.rows, stats.residual, stats.after) == (8 * TOP_K, 0, 1.0)


def test_the_five_steps_by_hand() -> None:
    case = Case(tokens=32, skew=4.0, dtype=F64)
    x, logits, gate_up, down = (t.detach() for t in case.leaves())
    routing = moe.route(logits, case.bias, TOP_K, 1.0)
    parallel = ExpertParallel(Local(4), EXPERTS, TOP_K, 8)
    own = list(zip(gate_up.split(4), down.split(4), strict=True))
    planned = parallel.plan(routing.ids_TJ.split(8))
    rows = parallel.dispatch(x.split(8), planned)
    row_weights = parallel.dispatch_weights(routing.weights_TJ.split(8), planned)
    copies = parallel.prefetch(own, planned)
    for rank in range(4):
        both = [torch.cat(pair) for pair in zip(own[rank], copies.weights(rank), strict=True)]
        ends = planned.plan.ends_RG[rank]
        rows[rank] = moe.experts(rows[rank], Dense(*both), ends, ACT, exact=True, row_weights_R=row_weights[rank])
    y = torch.cat(parallel.combine(rows, planned))
    assert torch.equal(y, dense(x, routing, Dense(gate_up, down)))
    # Rank r's copies have the gradient 10^r, so the home sees who computed its experts.
    ones = [tuple(torch.ones_like(t) for t in pair) for pair in own]
    theirs = [tuple(torch.full((4, *t.shape[1:]), 10.0**r, dtype=F64) for t in own[0]) for r in range(4)]
    summed = parallel.reduce_grads(ones, theirs, planned)
    for e in range(EXPERTS):
        want = 1 + sum(10.0**r for r in range(4) if e in planned.slots[r])
        for k in range(2):
            assert summed[e // 4][k][e % 4].unique().tolist() == [want]
    assert any(planned.slots)


def test_bf16_is_as_close_as_the_dense_layer() -> None:
    case, wide = Case(40, 3.0, torch.bfloat16), Case(40, 3.0, F64)
    truth = gradients(wide, dense)
    ours, _ = run(case, ExpertParallel(Local(4), EXPERTS, TOP_K, 40), [10] * 4)
    plain = gradients(case, dense)
    for a, b, true in zip(ours, plain, truth, strict=True):
        error, plain_error = (((x.double() - true).norm() / true.norm()) for x in (a, b))
        assert error <= 1.2 * plain_error + 1e-6


def test_ids_of_minus_one_are_neither_computed_nor_counted() -> None:
    case = Case(tokens=24, skew=2.0, dtype=F64)
    x, logits, gate_up, down = case.leaves()
    routing = moe.route(logits, case.bias, TOP_K, 2.5)
    ids = routing.ids_TJ.clone()
    ids[::3, 1], ids[5] = -1, -1
    parallel = ExpertParallel(Local(4), EXPERTS, TOP_K, 8, align=8)
    planned = parallel.plan(ids.split([8, 8, 0, 8]))
    got = expert.balanced_experts(parallel, x, routing.weights_TJ, Dense(gate_up, down), planned, ACT)
    masked = routing.weights_TJ * (ids >= 0)
    want = mixture(x, routing.ids_TJ, masked, Dense(gate_up, down), EXPERTS, exact=False)
    d = torch.randn_like(want)
    leaves = (x, logits, gate_up, down)
    # Both share the graph of the routing.
    both = [torch.autograd.grad(out, leaves, d, retain_graph=True) for out in (got, want)]
    for a, b in zip((got, *both[0]), (want, *both[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
    assert parallel.stats(planned, 1, 1).rows == int((ids >= 0).sum())


def test_a_repeated_expert_in_a_token_and_no_tokens_at_all() -> None:
    parallel = ExpertParallel(Local(2), 4, 2, 3)
    gate_up, down = torch.randn(4, 2 * INNER, WIDTH, dtype=F64), torch.randn(4, WIDTH, INNER, dtype=F64)
    x = torch.randn(3, WIDTH, dtype=F64)
    ids, weights = torch.tensor([[1, 1], [1, 1], [1, 0]]), torch.rand(3, 2, dtype=F64)
    planned = parallel.plan([ids, ids[:0]])
    got = expert.balanced_experts(parallel, x, weights, Dense(gate_up, down), planned, ACT)
    want = mixture(x, ids, weights, Dense(gate_up, down), 4, exact=False)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    empty = parallel.plan([ids[:0], ids[:0]])
    leaf = x[:0].requires_grad_()
    out = expert.balanced_experts(parallel, leaf, weights[:0], Dense(gate_up, down.requires_grad_()), empty, ACT)
    out.sum().backward()
    assert out.shape == (0, WIDTH)
    assert torch.equal(down.grad, torch.zeros_like(down))


def test_one_payload_goes_to_a_rank_whatever_it_computes_of_a_token() -> None:
    case = Case(tokens=32, skew=3.0, dtype=F32)
    parallel = ExpertParallel(Local(4), EXPERTS, TOP_K, 8)
    ids = moe.route(case.leaves()[1], case.bias, TOP_K, 1.0).ids_TJ.split(8)
    planned = parallel.plan(ids)
    for source, x in enumerate(ids):
        where, _ = expert.destinations(planned.plan, x, source)
        pairs = {(t, int(d)) for t in range(8) for d in where[t]}
        assert sum(planned.payloads[source]) == len(pairs)
        assert sum(planned.choices[source]) == x.numel()
        for d in range(4):
            assert planned.payloads[source][d] == sum(pair[1] == d for pair in pairs)
    assert sum(map(sum, planned.payloads)) < sum(map(sum, planned.choices))


def test_the_backward_pass_keeps_the_input_and_the_plan_only() -> None:
    case = Case(tokens=64, skew=3.0, dtype=F32)
    parallel = ExpertParallel(Local(4), EXPERTS, TOP_K, 16)
    x, logits, gate_up, down = case.leaves()
    routing = moe.route(logits, case.bias, TOP_K, 1.0)
    planned = parallel.plan(routing.ids_TJ.split(16))
    weights_TJ = routing.weights_TJ.detach().requires_grad_()
    kept: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        expert.balanced_experts(parallel, x, weights_TJ, Dense(gate_up, down), planned, ACT)
    assert set(kept) == {t.untyped_storage().data_ptr() for t in (x, weights_TJ, gate_up, down)}
    index_bytes = sum(
        t.numel() * t.element_size() for r in planned.routes for t in (r.place_n, r.token_P, r.row_n, r.origin_n)
    )
    # 12 bytes a choice and 4 a payload.
    assert index_bytes == 12 * 64 * TOP_K + 4 * sum(map(sum, planned.payloads))


def test_two_layers_share_slots_and_a_stale_copy_is_an_error() -> None:
    pool = SlotPool()
    cases = [Case(24, 3.0, F64, seed) for seed in (0, 7)]
    layers = [ExpertParallel(Local(4), EXPERTS, TOP_K, 6, pool=pool) for _ in cases]
    x = cases[0].leaves()[0]
    y, leaves = x, []
    for case, parallel in zip(cases, layers, strict=True):
        _, logits, gate_up, down = case.leaves()
        routing = moe.route(logits, case.bias, TOP_K, 1.0)
        planned = parallel.plan(routing.ids_TJ.split(6))
        y = expert.balanced_experts(parallel, y, routing.weights_TJ, Dense(gate_up, down), planned, ACT)
        leaves += [logits, gate_up, down]
    z = x
    for i, case in enumerate(cases):
        z = dense(z, moe.route(leaves[3 * i], case.bias, TOP_K, 1.0), Dense(*leaves[3 * i + 1 : 3 * i + 3]))
    d = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, (x, *leaves), d), torch.autograd.grad(z, (x, *leaves), d), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)

    own = list(zip(leaves[1].detach().split(4), leaves[2].detach().split(4), strict=True))
    ids = moe.route(leaves[0], cases[0].bias, TOP_K, 1.0).ids_TJ.split(6)
    planned = layers[0].plan(ids)
    first = layers[0].prefetch(own, planned)
    first.weights(0)
    layers[1].prefetch(own, planned)
    with pytest.raises(Error, match=r"copies of generation \d+ are gone, the pool holds \d+; prefetch again"):
        first.weights(0)


def test_buffers_do_not_depend_on_the_routing() -> None:
    """align_up(S J + (p - 1) 2M, p) rows, whoever is chosen."""
    tokens, align = 40, 8
    for ranks in (2, 4):
        parallel = ExpertParallel(Local(ranks), EXPERTS, TOP_K, tokens, align=align)
        home = EXPERTS // ranks
        assert parallel.rows == -(-(tokens * TOP_K + (align - 1) * 2 * home) // align) * align
        for ids in (torch.zeros(tokens, TOP_K, dtype=torch.int64), torch.arange(tokens * TOP_K).view(-1, TOP_K) % 16):
            planned = parallel.plan([ids] * ranks)
            rows = parallel.dispatch([torch.randn(tokens, WIDTH)] * ranks, planned)
            assert all(x.shape == (parallel.rows, WIDTH) and x.stride() == (WIDTH, 1) for x in rows)


def test_packed_experts_are_copied_packed() -> None:
    case = Case(tokens=32, skew=3.0, dtype=F32)
    logits = case.leaves()[1]
    gate_up, down = torch.randn(EXPERTS, 64, 32), torch.randn(EXPERTS, 32, 32)
    packed = Packed(*encode_mxfp4(gate_up), *encode_mxfp4(down))
    routing = moe.route(logits, case.bias, TOP_K, 1.0)
    wide = torch.randn(32, 32, requires_grad=True)
    parallel = ExpertParallel(Local(4), EXPERTS, TOP_K, 8)
    planned = parallel.plan(routing.ids_TJ.split(8))
    assert parallel.stats(planned, 1, 1).copies > 0
    got = expert.balanced_experts(parallel, wide, routing.weights_TJ, packed, planned, ACT, exact=True)
    want = mixture(wide, routing.ids_TJ, routing.weights_TJ, packed, EXPERTS, exact=True)
    assert torch.equal(got, want)
    d = torch.randn_like(want)
    assert torch.equal(torch.autograd.grad(got, wide, d)[0], torch.autograd.grad(want, wide, d)[0])


def test_the_module_plans_runs_and_reports() -> None:
    case = Case(tokens=30, skew=4.0, dtype=F64)
    x, logits, gate_up, down = case.leaves()
    parallel = ExpertParallel(Local(4), EXPERTS, TOP_K, 10)
    layer = expert.BalancedExperts(parallel, WIDTH, INNER, ACT, dtype=F64)
    layer.load(Dense(gate_up, down))
    with pytest.raises(Error, match="has not run yet"):
        layer.stats()
    routing = moe.route(logits, case.bias, TOP_K, 2.5)
    y = layer(x, routing.ids_TJ, routing.weights_TJ)
    torch.testing.assert_close(y, dense(x, routing, Dense(gate_up, down)), rtol=1e-12, atol=1e-12)
    stats = layer.stats()
    assert stats.before > 1.1
    assert stats.after == pytest.approx(1, abs=0.06)
    assert stats.copies > 0
    assert stats.copy_bytes == stats.copies * 3 * WIDTH * INNER * 8
    with pytest.raises(Error, match=r"tokens is \[30\]; must be 4 numbers"):
        layer(x, routing.ids_TJ, routing.weights_TJ, tokens=[30])


def test_a_second_derivative_is_refused() -> None:
    case = Case(tokens=8, skew=0.0, dtype=F64)
    x, logits, gate_up, down = case.leaves()
    parallel = ExpertParallel(Local(2), EXPERTS, TOP_K, 4)
    routing = moe.route(logits.detach(), case.bias, TOP_K, 1.0)
    planned = parallel.plan(routing.ids_TJ.split(4))
    y = expert.balanced_experts(parallel, x, routing.weights_TJ, Dense(gate_up, down), planned, ACT)
    (d_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d_x.sum().backward()


def test_domains_are_reported() -> None:
    case = Case(tokens=32, skew=4.0, dtype=F32)
    ids = moe.route(case.leaves()[1], case.bias, TOP_K, 1.0).ids_TJ.split(8)
    for domains, crossed in (((0, 0, 0, 0), False), ((0, 0, 1, 1), True)):
        parallel = ExpertParallel(Local(4), EXPERTS, TOP_K, 8, domains=domains)
        stats = parallel.stats(parallel.plan(ids), 100, 1000)
        assert (stats.cross_domain_bytes > 0) == crossed
        assert stats.cross_domain_bytes <= stats.row_bytes + stats.copy_bytes


def test_refusals() -> None:
    with pytest.raises(Error, match="experts is 10; must be a multiple of the 4 ranks"):
        ExpertParallel(Local(4), 10, 2, 8)
    with pytest.raises(Error, match="ranks is 0"):
        Local(0)
    with pytest.raises(Error, match="no process group"):
        expert.Collective()
    parallel = ExpertParallel(Local(2), 4, 2, 8)
    good = torch.zeros(8, 2, dtype=torch.int64)
    with pytest.raises(Error, match=r"ids lie in 0\.\.4; must be in -1\.\.3"):
        parallel.plan([good, good + torch.tensor([0, 4])])
    with pytest.raises(Error, match="9 tokens on a rank"):
        parallel.plan([good, torch.zeros(9, 2, dtype=torch.int64)])
    with pytest.raises(Error, match=r"ids are torch\.int32"):
        parallel.plan([good, good.int()])
    with pytest.raises(Error, match="rows is 16 but a rank gets 32 under this policy"):
        ExpertParallel(Local(2), 4, 2, 8, expert.off(), rows=16).plan([good, good])
    planned = parallel.plan([good, good])
    with pytest.raises(Error, match="the plan is for 16 tokens of 2 choices"):
        expert.balanced_experts(
            parallel,
            torch.zeros(9, 4),
            torch.zeros(9, 2),
            Dense(torch.zeros(4, 6, 4), torch.zeros(4, 4, 3)),
            planned,
            ACT,
        )


@pytest.mark.parametrize("on_grid", [True, False])
def test_copies_that_travel_as_mxfp4(on_grid: bool) -> None:
    """The same bits where the weights are MXFP4 values; else only what copies computed is rounded."""
    case = Case(tokens=32, skew=3.0, dtype=F32)
    logits = case.leaves()[1]
    tensors = [torch.randn(EXPERTS, 64, 32) / 6, torch.randn(EXPERTS, 32, 32) / 6]
    if on_grid:
        tensors = [decode_mxfp4(*encode_mxfp4(t)) for t in tensors]
    routing = moe.route(logits, case.bias, TOP_K, 1.0)
    x, d_y = torch.randn(32, 32), torch.randn(32, 32)
    results, sent = [], []
    for rule in (None, "even"):
        parallel = ExpertParallel(Local(4), EXPERTS, TOP_K, 8, copy_rule=rule)
        planned = parallel.plan(routing.ids_TJ.split(8))
        leaves = [t.clone().requires_grad_() for t in (x, *tensors)]
        weights = Dense(*leaves[1:])
        y = expert.balanced_experts(parallel, leaves[0], routing.weights_TJ, weights, planned, ACT, exact=True)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, d_y)])
        sent.append(parallel.copy_bytes(3072, 2))
    assert sent == [6144, 1536 + 96]
    on_copies = torch.stack([expert.destinations(planned.plan, i, r)[0] for r, i in enumerate(routing.ids_TJ.split(8))])
    away = (on_copies.view(32, -1) != routing.ids_TJ // 4).any(1)
    assert away.any()
    assert not away.all()
    plain, packed = results
    if on_grid:
        assert all(torch.equal(a, b) for a, b in zip(plain, packed, strict=True))
    assert torch.equal(plain[0][~away], packed[0][~away])
    if not on_grid:
        # E2M1 rounds by up to 1/6 of a value, 0.1 of a row's norm.
        assert 1e-3 < (plain[0] - packed[0]).norm() / plain[0].norm() < 0.2
        assert ((plain[0] != packed[0]).any(1) == away).all()
    with pytest.raises(Error, match="copy_rule is 'odd'; allowed: None, "):
        ExpertParallel(Local(4), EXPERTS, TOP_K, 8, copy_rule="odd")


def test_products_see_few_numbers_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled for the number of experts, which must not follow the number of copies."""
    ranks, experts, tokens = 2, 96, 200
    home = experts // ranks
    seen, used = set(), set()
    for name in ("experts", "experts_backward"):
        call, at = getattr(moe, name), 2 if name == "experts" else 3

        def spy(*args: torch.Tensor, call: Callable[..., object] = call, at: int = at, **options: object) -> object:
            seen.add(args[at].shape[0])
            return call(*args, **options)

        monkeypatch.setattr(moe, name, spy)
    generator = torch.Generator().manual_seed(0)
    weights = Dense(torch.randn(experts, 16, 8, generator=generator), torch.randn(experts, 8, 8, generator=generator))
    for hot in range(1, home + 1, 2):
        x = torch.randn(2 * tokens, 8, generator=generator).requires_grad_()
        parallel = ExpertParallel(Local(ranks), experts, 1, tokens)
        planned = parallel.plan([torch.randint(hot, (tokens, 1), generator=generator) for _ in range(ranks)])
        used.add(len(planned.slots[1]))
        y = expert.balanced_experts(parallel, x, torch.ones(2 * tokens, 1), weights, planned, ACT)
        y.backward(torch.ones_like(y))
    assert len(used) > 8
    assert seen == {home, 16, 32}


@pytest.mark.parametrize("policy", POLICIES)
def test_products_see_no_rows_beyond_those_of_experts(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a product makes is longer than the rows that it takes, and a buffer may be many times longer than them."""
    case = Case(tokens=40, skew=1.0, dtype=F64)
    parallel = ExpertParallel(Local(4), EXPERTS, TOP_K, 40, POLICIES[policy](), align=4)
    seen: dict[str, list[int]] = {"experts": [], "experts_backward": []}

    def watch(name: str, rows_at: int) -> None:
        call = getattr(moe, name)

        def watched(*args: torch.Tensor, **options: object) -> object:
            seen[name].append(args[rows_at].shape[0])
            return call(*args, **options)

        monkeypatch.setattr(moe, name, watched)

    watch("experts", 0)
    watch("experts_backward", 1)
    routing: list[torch.Tensor] = []

    def layer(x: torch.Tensor, chosen: moe.Routing, weights: Dense) -> torch.Tensor:
        routing.append(chosen.ids_TJ)
        planned = parallel.plan(chosen.ids_TJ.split(10))
        return expert.balanced_experts(parallel, x, chosen.weights_TJ, weights, planned, ACT, exact=True)

    gradients(case, layer)
    ends_RG = parallel.plan(routing[0].split(10)).plan.ends_RG
    for rows in seen.values():
        assert sum(rows) == int(ends_RG[:, -1].sum()) < 4 * parallel.rows


@pytest.mark.parametrize("skew", [0.0, 4.0])
def test_a_pass_exchanges_little(skew: float) -> None:
    """A launch each that waits for all ranks: what travels at a time goes in one message, copies only where some are.

    Forward: where choices go, inputs with weights, results. Backward: inputs with weights and the gradients of outputs,
    gradients of inputs, those of weights. Copies: two tensors there, there again, and back.
    """
    calls: list[str] = []

    class Counted(Local):
        def gather(self, *given: Any) -> Any:
            calls.append("gather")
            return super().gather(*given)

        def exchange(self, *given: Any) -> Any:
            calls.append("exchange")
            return super().exchange(*given)

    case = Case(tokens=32, skew=skew, dtype=F64)
    x, logits, gate_up, down = case.leaves()
    parallel = ExpertParallel(Counted(4), EXPERTS, TOP_K, 8, expert.exact() if skew else expert.off())
    routing = moe.route(logits, case.bias, TOP_K, 1.0)
    planned = parallel.plan(routing.ids_TJ.split(8))
    copies = 2 if any(planned.slots) else 0
    assert bool(copies) == bool(skew)
    y = expert.balanced_experts(parallel, x, routing.weights_TJ, Dense(gate_up, down), planned, ACT)
    assert sorted(calls) == ["exchange"] * (3 + copies) + ["gather"] * 2
    calls.clear()
    y.sum().backward()
    assert calls == ["exchange"] * (3 + 2 * copies)
