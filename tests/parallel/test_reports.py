"""Reports of other stacks (docs/parallel.md) that no other test here stands for.

All tokens choose three experts of rank 0 and nothing is balanced, so rank 1 has tokens and no work, as in Automodel 935
and titan 1237: it must take part in everything, and its experts' gradients are zeros, in memory that held NaN before
(MSLK 158, transformers 48205).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from balanced import ACT, EXPERTS, INNER, TOP_K, WIDTH, Case, d_y, dense, gradients
from test_expert_collective import _part, spawn

from perilune.ops import moe
from perilune.ops.moe import Dense
from perilune.parallel import expert
from perilune.parallel.expert import Collective, ExpertParallel

CASE = Case(40, 60.0, torch.float64)


def idle_rank(rank: int, ranks: int) -> list[Any]:
    # Memory is NaN until it is written.
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    x, logits, gate_up, down = (t.detach() for t in CASE.leaves())
    parallel = ExpertParallel(Collective(), EXPERTS, TOP_K, CASE.tokens, expert.off(), align=4)
    layer = expert.BalancedExperts(parallel, WIDTH, INNER, ACT, exact=True, dtype=torch.float64)
    layer.load(Dense(gate_up, down))
    mine = _part(rank, ranks)
    x, logits = x[mine].requires_grad_(), logits[mine].requires_grad_()
    routing = moe.route(logits, CASE.bias, TOP_K, 2.5)
    y = layer(x, routing.ids_TJ, routing.weights_TJ)
    return [y.detach(), *torch.autograd.grad(y, (x, logits, *layer.parameters()), d_y(CASE)[mine])]


def test_a_rank_without_an_active_expert(tmp_path: Path) -> None:
    results = [works[0] for works in spawn([(idle_rank, ())], 2, tmp_path)]
    assert not [result for result in results if isinstance(result, str)], results
    for k, want in enumerate(gradients(CASE, dense)):
        got = torch.cat([torch.from_numpy(result[k]) for result in results])
        assert (got - want).abs().max() <= 1e-10 * want.abs().max()
    assert not results[1][3].any()
    assert not results[1][4].any()
