"""Planners: balance, slots, traffic and equality of the two, over loads of every shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loads import KINDS, away, counts

from perilune import Error
from perilune.parallel import expert
from perilune.parallel.expert import RULES, plan_reference, plan_torch, planner
from perilune.parallel.expert.capacity import worst_case_rows

LOADS = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from([1, 2, 3, 4, 8, 16]),
    st.sampled_from([1, 2, 3, 7, 12]),
    st.sampled_from([1, 7, 999, 8192]),
    st.integers(0, 10_000),
)
POLICIES = st.one_of(
    st.sampled_from([expert.exact(), expert.one_donor(), expert.off()]),
    st.builds(expert.tolerant, st.sampled_from([0.0, 0.02, 0.3, 9.0]), st.sampled_from([0, 5, 1024])),
    st.builds(expert.budget, st.integers(0, 4)),
)


def surplus(counts_RE: torch.Tensor) -> int:
    """Rows above an even share, the remainder counted for the ranks that have it anyway: the least that must move."""
    load_R = counts_RE.sum(0).view(counts_RE.shape[0], -1).sum(1)
    share, extra = divmod(int(load_R.sum()), load_R.shape[0])
    over = int((load_R - share).clamp(min=0).sum())
    return over - min(extra, int((load_R > share).sum()))


@given(load=LOADS)
@settings(max_examples=250)
def test_exact_is_even_within_the_slots_and_moves_least(load: tuple[str, int, int, int, int]) -> None:
    c_RE = counts(*load)
    home = load[2]
    plan = plan_reference(c_RE, expert.exact())
    load_R = plan.alloc_RE.sum(1)
    assert load_R.max() - load_R.min() <= 1
    assert torch.equal(plan.alloc_RE.sum(0), c_RE.sum(0))
    assert plan.alloc_RE.min() >= 0
    assert (away(plan.alloc_RE) > 0).sum(1).max() <= home
    moved = int(away(plan.alloc_RE).sum())
    assert moved <= int(away(plan_reference(c_RE, expert.one_donor()).alloc_RE).sum())
    if RULES[plan.rule] in ("home", "multi-donor"):
        assert moved == surplus(c_RE)
    else:
        assert moved >= surplus(c_RE)


@given(load=LOADS, policy=POLICIES, two_domains=st.booleans())
@settings(max_examples=250)
def test_the_planner_on_tensors_is_equal_to_the_bit(
    load: tuple[str, int, int, int, int], policy: expert.Policy, two_domains: bool
) -> None:
    c_RE = counts(*load)
    domains = [r % 2 for r in range(load[1])] if two_domains else None
    want, got = plan_reference(c_RE, policy, domains), plan_torch(c_RE, policy, domains)
    assert torch.equal(got.alloc_RE, want.alloc_RE)
    assert torch.equal(got.rule, want.rule)
    assert got.alloc_RE.dtype == got.rule.dtype == torch.int64


@pytest.mark.parametrize(("ranks", "home"), [(64, 14), (32, 48), (64, 1), (7, 48)])
@pytest.mark.parametrize("kind", KINDS)
def test_large_groups(kind: str, ranks: int, home: int) -> None:
    c_RE = counts(kind, ranks, home, 131072 // home, seed=ranks + home)
    want = plan_reference(c_RE, expert.exact())
    assert torch.equal(plan_torch(c_RE, expert.exact()).alloc_RE, want.alloc_RE)
    load_R = want.alloc_RE.sum(1)
    assert load_R.max() - load_R.min() <= 1
    assert (away(want.alloc_RE) > 0).sum(1).max() <= home


def test_every_rule_is_reached() -> None:
    seen = set()
    for kind in KINDS:
        for seed in range(20):
            seen.add(RULES[plan_reference(counts(kind, 8, 2, 50, seed), expert.exact()).rule])
    assert {"home", "multi-donor", "capped fan-in"} <= seen


def test_one_donor_is_taken_where_capped_fan_in_moves_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """No such load is known, so the other rule is made worse: its moves are done and undone."""
    c_RE = counts("idle rank", 16, 3, 99, seed=1)
    assert RULES[plan_reference(c_RE, expert.exact()).rule] == "capped fan-in"
    greedy = planner._greedy
    monkeypatch.setattr(planner, "_greedy", lambda *args, **options: 40 * greedy(*args, **options))
    plan = plan_reference(c_RE, expert.exact())
    assert RULES[plan.rule] == "one-donor"
    assert torch.equal(plan.alloc_RE, plan_reference(c_RE, expert.one_donor()).alloc_RE)


def test_one_idle_rank_of_8_moves_an_eighth() -> None:
    c_RE = torch.full((8, 256), 1792)
    c_RE[:, :32] = 0
    plan = plan_reference(c_RE, expert.exact())
    assert int(away(plan.alloc_RE).sum()) * 8 == int(c_RE.sum())
    assert int((away(plan.alloc_RE) > 0).sum()) == 28
    donor = plan_reference(c_RE, expert.one_donor())
    assert int(away(donor.alloc_RE).sum()) * 2 == int(c_RE.sum())
    assert int((away(donor.alloc_RE) > 0).sum()) == 112


def test_one_idle_rank_of_64_moves_a_36th() -> None:
    """More donors than slots: 14 of them fill the idle rank and are filled by the other 49."""
    c_RE = torch.full((64, 896), 146)
    c_RE[:, :14] = 0
    plan = plan_reference(c_RE, expert.exact())
    assert RULES[plan.rule] == "capped fan-in"
    assert int(away(plan.alloc_RE).sum()) / int(c_RE.sum()) == pytest.approx(0.0278, abs=2e-4)
    donor = plan_reference(c_RE, expert.one_donor())
    assert int(away(donor.alloc_RE).sum()) / int(c_RE.sum()) == pytest.approx(0.5, abs=0.01)


@given(load=LOADS, donors=st.just(expert.one_donor()))
def test_the_one_donor_rule_has_one_donor(load: tuple[str, int, int, int, int], donors: expert.Policy) -> None:
    _, ranks, home, *_ = load
    given_RR = (away(plan_reference(counts(*load), donors).alloc_RE).view(ranks, ranks, home).sum(2) > 0).sum(1)
    assert given_RR.max() <= 1
    assert given_RR.sum() <= ranks - 1


@given(load=LOADS, eps=st.sampled_from([0.0, 0.02, 0.1, 0.5]))
def test_tolerant_keeps_its_limit_and_is_idle_inside_it(load: tuple[str, int, int, int, int], eps: float) -> None:
    c_RE = counts(*load)
    plan = plan_reference(c_RE, expert.tolerant(eps))
    load_R = c_RE.sum(0).view(load[1], -1).sum(1)
    limit = -(-int(c_RE.sum()) * round(1e6 * (1 + eps)) // (load[1] * 10**6))
    assert plan.alloc_RE.sum(1).max() <= limit
    if load_R.max() <= limit:
        assert RULES[plan.rule] == "home"
    exact = plan_reference(c_RE, expert.exact())
    if RULES[plan.rule] == RULES[exact.rule] == "multi-donor":
        assert away(plan.alloc_RE).sum() <= away(exact.alloc_RE).sum()


def test_tolerant_makes_no_copy_within_2_percent_where_exact_does() -> None:
    c_RE = torch.tensor([[100, 104, 98, 98], [101, 100, 99, 100]])
    assert RULES[plan_reference(c_RE, expert.tolerant(0.02)).rule] == "home"
    assert RULES[plan_reference(c_RE, expert.exact()).rule] == "multi-donor"


def test_tolerant_refuses_small_copies() -> None:
    c_RE = torch.zeros(3, 6, dtype=torch.int64)
    c_RE[1] = torch.tensor([500, 500, 300, 300, 340, 0])
    # The limit is 660 rows: 320 go to rank 2 and 20 to rank 1, unless a copy must have 50.
    free = away(plan_reference(c_RE, expert.tolerant(0.02)).alloc_RE)
    assert free[free > 0].tolist() == [20, 320]
    plan = plan_reference(c_RE, expert.tolerant(0.02, min_rows=50))
    kept = away(plan.alloc_RE)
    assert kept[kept > 0].tolist() == [320]
    assert int(plan.alloc_RE.sum(1).max()) == 680


@given(load=LOADS, slots=st.integers(0, 3))
def test_budget_keeps_its_slots_and_never_makes_it_worse(load: tuple[str, int, int, int, int], slots: int) -> None:
    c_RE = counts(*load)
    plan = plan_reference(c_RE, expert.budget(slots))
    assert (away(plan.alloc_RE) > 0).sum(1).max() <= slots
    assert plan.alloc_RE.sum(1).max() <= c_RE.sum(0).view(load[1], -1).sum(1).max()


@given(
    ranks=st.sampled_from([2, 3, 8]),
    home=st.sampled_from([1, 3, 12]),
    choices=st.sampled_from([1, 60, 999]),
    eps=st.sampled_from([0.0, 0.02, 0.5]),
    min_rows=st.sampled_from([0, 5, 80, 400]),
    skew=st.sampled_from([0.0, 1.0, 3.0]),
    align=st.sampled_from([1, 8]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=300)
def test_no_rank_gets_more_rows_than_the_worst_case(
    ranks: int, home: int, choices: int, eps: float, min_rows: int, skew: float, align: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    p_E = (skew * torch.randn(ranks * home, generator=generator)).exp()
    if seed % 3 == 0:
        # Ranks alike inside and far apart: many small experts to move.
        p_E = p_E.view(ranks, home)[:, :1].expand(ranks, home).reshape(-1)
    counts_RE = torch.stack(
        [
            torch.bincount(torch.multinomial(p_E, choices, True, generator=generator), minlength=ranks * home)
            for _ in range(ranks)
        ]
    )
    for policy in (expert.exact(), expert.one_donor(), expert.tolerant(eps, min_rows), expert.off(), expert.budget(1)):
        rows = worst_case_rows(policy, ranks, ranks * home, 1, choices, align, None)
        assert int(expert.plan(counts_RE, policy, align=align).ends_RG.max()) <= rows


def test_domains_are_served_first() -> None:
    """Ranks 0 and 2 have too much, 1 and 3 too little; without a map the largest meet, across domains."""
    c_RE = torch.zeros(4, 8, dtype=torch.int64)
    c_RE[0] = torch.tensor([150, 150, 45, 45, 110, 110, 5, 5])
    across = away(plan_reference(c_RE, expert.exact()).alloc_RE)
    inside = away(plan_reference(c_RE, expert.exact(), domains=[0, 0, 1, 1]).alloc_RE)
    assert across.sum() == inside.sum() == surplus(c_RE) == 210
    assert crossing(across) == 210
    assert crossing(inside) == 80


def test_domains_do_not_cost_the_least_movement() -> None:
    """With one slot a rank the in-domain plan would need two on rank 3."""
    c_RE = torch.zeros(4, 4, dtype=torch.int64)
    c_RE[0] = torch.tensor([300, 90, 220, 10])
    plan = plan_reference(c_RE, expert.exact(), domains=[0, 0, 1, 1])
    assert RULES[plan.rule] == "multi-donor"
    assert away(plan.alloc_RE).sum() == surplus(c_RE)


def crossing(moved_RE: torch.Tensor) -> int:
    """Rows of 4 ranks in 2 domains that were moved to the other domain."""
    half = moved_RE.shape[1] // 2
    return int(moved_RE[2:, :half].sum() + moved_RE[:2, half:].sum())


def test_refusals() -> None:
    ok = torch.zeros(4, 8, dtype=torch.int64)
    with pytest.raises(Error, match="experts is 7; must be a multiple of the 4 ranks"):
        plan_reference(ok[:, :7], expert.exact())
    with pytest.raises(Error, match=r"must be int64 \[ranks, experts\]"):
        plan_torch(ok.float(), expert.exact())
    with pytest.raises(Error, match="domains has 3 numbers"):
        plan_torch(ok, expert.exact(), domains=[0, 0, 1])
    with pytest.raises(Error, match=r"eps is -0\.1"):
        expert.tolerant(-0.1)
    with pytest.raises(Error, match="slots is -1"):
        expert.budget(-1)
    # 2^31 choices cannot be counted in 32 bits; one token less on each rank can.
    worst_case_rows(expert.exact(), 128, 896, 16, 2**20 - 1, 1, None)
    with pytest.raises(Error, match=r"tokens is 1048576 of 16 choices on 128 ranks; together .* below 2\^31"):
        worst_case_rows(expert.exact(), 128, 896, 16, 2**20, 1, None)
