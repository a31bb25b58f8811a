"""Row layout and destinations: every choice has one row of its own, in the group of its expert."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.parallel import expert
from perilune.parallel.expert.plan import count


@given(
    ranks=st.sampled_from([1, 2, 3, 5, 8]),
    home=st.sampled_from([1, 2, 5]),
    top_k=st.integers(1, 4),
    align=st.sampled_from([1, 8, 128]),
    skew=st.sampled_from([0.0, 1.0, 4.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=120)
def test_choices_and_rows_are_one_to_one(ranks: int, home: int, top_k: int, align: int, skew: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = ranks * home
    # Ragged, one source empty, repeated ids in a token, some ids of -1.
    sizes = [int(torch.randint(0, 30, (), generator=generator)) for _ in range(ranks)]
    sizes[seed % ranks] = 0 if seed % 3 == 0 else sizes[seed % ranks]
    p_E = (skew * torch.randn(experts, generator=generator)).exp()
    ids = []
    for size in sizes:
        drawn = torch.multinomial(p_E, size * top_k, replacement=True, generator=generator) if size else torch.empty(0)
        drawn = drawn.long().view(size, top_k)
        ids.append(drawn.masked_fill(torch.rand(drawn.shape, generator=generator) < 0.1, -1))
    counts_RE = torch.stack([count(x, experts) for x in ids])
    plan = expert.plan(counts_RE, expert.exact(), align=align)
    seen: set[tuple[int, int]] = set()
    for rank, x in enumerate(ids):
        where, row = expert.destinations(plan, x, rank)
        for t in range(x.shape[0]):
            for j in range(top_k):
                e, d, n = int(x[t, j]), int(where[t, j]), int(row[t, j])
                if e == -1:
                    assert (d, n) == (-1, -1)
                    continue
                assert (d, n) not in seen
                seen.add((d, n))
                group = e % home if e // home == d else home + plan.slots_RB[d].tolist().index(e)
                start = int(plan.ends_RG[d, group - 1]) if group else 0
                assert start % align == 0
                assert start <= n < start + int(plan.rows_RG[d, group]) <= int(plan.ends_RG[d, group])
    assert len(seen) == int(counts_RE.sum()) == int(plan.rows_RG.sum())
    # As many of a source's choices stay as its own rank computes of that expert.
    for rank, x in enumerate(ids):
        where, _ = expert.destinations(plan, x, rank)
        stayed = count(x.masked_fill(where != rank, -1), experts)
        assert torch.equal(stayed, torch.minimum(plan.counts_RE[rank], plan.alloc_RE[rank]))


def test_slots_are_in_order_of_expert_and_idle_ones_last() -> None:
    counts_RE = torch.zeros(3, 9, dtype=torch.int64)
    counts_RE[0, :3] = torch.tensor([60, 50, 40])
    plan = expert.plan(counts_RE, expert.exact())
    assert plan.slots_RB.shape == (3, 3)
    for row in plan.slots_RB.tolist():
        used = [e for e in row if e >= 0]
        assert used == sorted(used)
        assert row == used + [-1] * (3 - len(used))
    assert plan.ends_RG[:, -1].tolist() == [50, 50, 50]
