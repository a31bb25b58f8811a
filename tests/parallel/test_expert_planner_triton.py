"""Planner and destination rows as kernels, equal to the reference to the bit: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from loads import KINDS, counts
from triton_cpu import DEVICE

from perilune.parallel import expert
from perilune.parallel.expert import plan_reference, plan_triton, planner_triton
from perilune.parallel.expert.layout_triton import plan_and_lay_out
from perilune.parallel.expert.plan import count, destinations, lay_out, slots_for
from perilune.parallel.expert.rows_triton import count_choices, destination_rows

POLICIES = {
    "exact": expert.exact(),
    "one donor": expert.one_donor(),
    "off": expert.off(),
    "tolerant": expert.tolerant(0.02),
    "min rows": expert.tolerant(0.02, 300),
    "budget": expert.budget(2),
}


def equal_plans(c_RE: torch.Tensor, policy: expert.Policy, domains: list[int] | None, align: int) -> expert.Plan:
    want = plan_reference(c_RE, policy, domains)
    got = plan_triton(c_RE.to(DEVICE), policy, domains)
    assert torch.equal(got.alloc_RE.cpu(), want.alloc_RE)
    assert torch.equal(got.rule.cpu(), want.rule)
    rows = lay_out(c_RE, want, slots_for(policy, *c_RE.shape), align)
    ours = plan_and_lay_out(c_RE.to(DEVICE), policy, domains, align)
    for name in ("alloc_RE", "rule", "slots_RB", "ends_RG", "rows_RG", "starts_RE"):
        a, b = getattr(ours, name), getattr(rows, name)
        assert a.dtype == b.dtype, name
        assert torch.equal(a.cpu(), b), name
    return rows


# The interpreter takes a tenth of a second a plan, so few loads reach everything; the GPU gets many.
@pytest.mark.parametrize("policy", POLICIES)
def test_the_planner_equals_the_reference_to_the_bit(policy: str) -> None:
    equal_plans(counts("idle rank", 8, 2, 999, seed=1), POLICIES[policy], None, align=8)


def test_every_rule_and_shape() -> None:
    seen = set()
    for kind, ranks, home in (("nothing", 3, 2), ("lognormal", 3, 5), ("one rank", 7, 1), ("idle rank", 8, 2)):
        seen.add(expert.RULES[int(equal_plans(counts(kind, ranks, home, 77, 1), expert.exact(), None, 1).rule)])
    equal_plans(counts("lognormal", 1, 3, 77, 1), expert.exact(), None, 4)
    # Homes of more experts than a warp has lanes.
    equal_plans(counts("idle rank", 3, 700, 77, 1), expert.budget(2), None, 1)
    assert seen == {"home", "multi-donor", "capped fan-in"}


def test_one_donor_is_taken_where_capped_fan_in_moves_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """No such load is known, so one-donor is said to move nothing."""
    c_RE = counts("idle rank", 8, 2, 999, seed=1)
    launch = planner_triton.kernels.fall_back

    class Told:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def run(*args: torch.Tensor, **options: object) -> None:
                args[4].zero_()
                launch[grid](*args, **options)

            return run

    monkeypatch.setattr(planner_triton.kernels, "fall_back", Told())
    got = plan_triton(c_RE.to(DEVICE), expert.exact())
    assert expert.RULES[int(got.rule)] == "one-donor"
    assert torch.equal(got.alloc_RE.cpu(), plan_reference(c_RE, expert.one_donor()).alloc_RE)


@pytest.mark.parametrize("eps", [0.02, 2.0, 2.0**14 - 0.996, 9e5])
def test_limits_far_above_all_rows_move_nothing(eps: float) -> None:
    """2^20 rows on 4 ranks: with the third eps the limit is 2^32 and a little, 1024 rows to who counts in 32 bits."""
    c_RE = torch.zeros(4, 8, dtype=torch.int64)
    c_RE[:, 0], c_RE[:, 5] = 2**18 - 2**10, 2**10
    policy = expert.tolerant(eps)
    rows = equal_plans(c_RE, policy, None, align=1)
    assert torch.equal(expert.plan_torch(c_RE, policy).alloc_RE, rows.alloc_RE)
    assert (int(rows.rule) == 0) == (eps > 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_loads_of_nearly_2_to_the_31(policy: str) -> None:
    c_RE = torch.zeros(4, 8, dtype=torch.int64)
    c_RE[:, 1] = 2**29 - 2**20
    c_RE[:, 6] = 2**20
    c_RE[3, 6] -= 1
    assert int(c_RE.sum()) == 2**31 - 1
    # A layer of one rank's rows would not fit; what is planned is what matters here.
    want, got = plan_reference(c_RE, POLICIES[policy]), plan_triton(c_RE.to(DEVICE), POLICIES[policy])
    assert torch.equal(got.alloc_RE.cpu(), want.alloc_RE)
    assert torch.equal(got.rule.cpu(), want.rule)


@pytest.mark.parametrize("kind", ["lognormal", "idle rank"])
def test_domains_on_the_device(kind: str) -> None:
    equal_plans(counts(kind, 8, 2, 999, seed=1), expert.exact(), [r % 2 for r in range(8)], align=1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_many_loads_on_the_device(kind: str) -> None:
    # The reference in loops takes most of the time.
    shapes = [(1, 5), (2, 112), (3, 7), (4, 48), (8, 2), (16, 3), (64, 14)]
    for seed, (ranks, home) in enumerate(shapes):
        for tokens in (1, 8192) if ranks < 64 else (999,):
            for policy in POLICIES.values():
                equal_plans(counts(kind, ranks, home, tokens, seed), policy, None, align=128)
        equal_plans(counts(kind, ranks, home, 999, seed), expert.exact(), [r % 3 for r in range(ranks)], align=8)


def draw_ids(ranks: int, home: int, top_k: int, tokens: int, seed: int) -> list[torch.Tensor]:
    """Ragged, one source empty, repeated ids in a token, some ids of -1."""
    generator = torch.Generator().manual_seed(seed)
    p_E = (2 * torch.randn(ranks * home, generator=generator)).exp()
    ids = []
    for rank in range(ranks):
        size = [tokens, 0, tokens // 3, 7][rank % 4] if ranks > 1 else tokens
        drawn = torch.zeros(0)
        if size:
            drawn = torch.multinomial(p_E, size * top_k, replacement=True, generator=generator)
        drawn = drawn.long().view(size, top_k)
        ids.append(drawn.masked_fill(torch.rand(drawn.shape, generator=generator) < 0.1, -1))
    return ids


SHAPES = [(1, 4, 2, 40), (2, 4, 3, 180), (5, 7, 1, 300), (8, 2, 4, 70)]
LARGE = [(2, 112, 16, 8192), (8, 112, 16, 4096), (64, 14, 16, 1024), (3, 300, 8, 5000)]


@pytest.mark.parametrize("shape", SHAPES + [pytest.param(shape, marks=pytest.mark.gpu) for shape in LARGE], ids=str)
def test_destination_rows_equal_the_reference(shape: tuple[int, int, int, int]) -> None:
    ranks, home, _, tokens = shape
    experts, ids = ranks * home, draw_ids(*shape, seed=tokens)
    counts_RE = torch.stack([count(x, experts) for x in ids])
    plan = lay_out(counts_RE, plan_reference(counts_RE, expert.exact()), home if ranks > 1 else 0, align=8)
    there = plan_and_lay_out(counts_RE.to(DEVICE), expert.exact(), None, align=8)
    rows = int(plan.ends_RG.max()) + 5
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for rank, x in enumerate(ids):
        counts_E, earlier_CE = count_choices(x.to(DEVICE), experts, flag)
        assert torch.equal(counts_E.cpu(), counts_RE[rank])
        got = destination_rows(there, x.to(DEVICE), earlier_CE, rank, rows)
        where, row = destinations(plan, x, rank)
        assert torch.equal(got.long().cpu(), torch.where(where >= 0, where * rows + row, -1))
        for a, b in zip(destinations(there, x.to(DEVICE), rank, earlier_CE), (where, row), strict=True):
            assert torch.equal(a.cpu(), b)
    assert not flag.item()
