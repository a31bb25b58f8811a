"""The balanced layer at its edges: few experts and choices, ranks without tokens, odd widths, tensors that are views.

The other side is the mixture in one place in float64 (`balanced.mixture`), where a choice that is not routed is one of
expert 0 with a weight of 0. float64: 1e-12 of the largest number, sums of a few hundred products. bfloat16: 3e-2, a
few roundings of 2^-9 on each side of products of width 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from balanced import ACT, mixture
from test_expert_collective import Work, spawn
from torch.utils.checkpoint import checkpoint
from triton_cpu import DEVICE

from perilune import Error
from perilune.ops.moe import Dense
from perilune.parallel.expert import (
    Collective,
    ExpertParallel,
    Local,
    balanced_experts,
    exact,
    ids,
    messages,
    off,
    routes,
    steps,
    tolerant,
)

Picks = Callable[[torch.Generator, int, int, int], torch.Tensor]


def some(generator: torch.Generator, tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """Any experts, one of them twice now and then; a fifth is not routed."""
    chosen = torch.randint(experts, (tokens, top_k), generator=generator)
    return chosen.masked_fill(torch.rand(tokens, top_k, generator=generator) < 0.2, -1)


def none(generator: torch.Generator, tokens: int, top_k: int, experts: int) -> torch.Tensor:
    return torch.full((tokens, top_k), -1)


def last(generator: torch.Generator, tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """All of them the last expert, at home on the last rank."""
    return torch.full((tokens, top_k), experts - 1)


@dataclass(frozen=True)
class Edge:
    """A layer and its inputs. sizes: tokens of each rank."""

    sizes: tuple[int, ...]
    experts: int
    top_k: int
    width: int = 7
    inner: int = 6
    picks: Picks = some
    dtype: torch.dtype = torch.float64
    policy: str = "exact"
    align: int = 1

    def parallel(self, transport: Any) -> ExpertParallel:
        policy = {"exact": exact(), "off": off(), "tolerant": tolerant(0.02, 1)}[self.policy]
        return ExpertParallel(
            transport, self.experts, self.top_k, max(1, *self.sizes), policy, align=self.align, rows=None
        )

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """ids, then x, weights, gate_up, down and the gradient of y."""
        generator, tokens = torch.Generator().manual_seed(4), sum(self.sizes)
        chosen = self.picks(generator, tokens, self.top_k, self.experts)
        shapes = [(tokens, self.width), (tokens, self.top_k), (self.experts, 2 * self.inner, self.width)]
        shapes += [(self.experts, self.width, self.inner), (tokens, self.width)]
        x, w, gate_up, down, d_y = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        w = w.to(torch.promote_types(self.dtype, torch.float32))
        return chosen, x.to(self.dtype), w, gate_up.to(self.dtype), down.to(self.dtype), d_y.to(self.dtype)

    def expected(self) -> list[torch.Tensor]:
        """y and the gradients of x, weights, gate_up and down."""
        chosen, *tensors, d_y = self.inputs()
        x, w, gate_up, down = leaves = [t.double().requires_grad_() for t in tensors]
        routed = chosen >= 0
        y = mixture(x, chosen.clamp(min=0), w * routed, Dense(gate_up, down), self.experts, exact=True)
        return [y.detach(), *torch.autograd.grad(y, leaves, d_y.double())]


def check(edge: Edge, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    bound = 1e-12 if edge.dtype == torch.float64 else 3e-2
    for name, a, b in zip(("y", "x", "weights", "gate_up", "down"), got, want, strict=True):
        assert a.shape == b.shape, name
        assert ((a.double() - b).abs() <= bound * max(1.0, b.abs().amax() if b.numel() else 0.0)).all(), name


def run(edge: Edge, parallel: ExpertParallel, view: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    chosen, x, w, gate_up, down, d_y = (t.to(DEVICE) for t in edge.inputs())
    x, w, d_y = view(x), view(w), view(d_y)
    leaves = [t.detach().requires_grad_() for t in (x, w, gate_up, down)]
    planned = parallel.plan(chosen.split(list(edge.sizes)))
    y = balanced_experts(parallel, *leaves[:2], Dense(*leaves[2:]), planned, ACT, exact=True)
    return [t.cpu() for t in (y.detach(), *torch.autograd.grad(y, leaves, d_y))]


def wide(x: torch.Tensor) -> torch.Tensor:
    """The first columns of a matrix that has one more: rows of an odd stride where the width is even."""
    room = torch.full((x.shape[0], x.shape[1] + 1), torch.nan, dtype=x.dtype, device=x.device)
    room[:, :-1] = x
    return room[:, :-1]


def shifted(x: torch.Tensor) -> torch.Tensor:
    """From the second number of its memory on."""
    room = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=x.device)
    room[1:] = x.flatten()
    return room[1:].view(x.shape)


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


EDGES = {
    "one rank": Edge((5,), 4, 2),
    "one expert": Edge((5,), 1, 1),
    "an expert a rank": Edge((4, 9, 1), 3, 1),
    "more choices than experts at home": Edge((4, 0, 9), 3, 3, policy="tolerant"),
    "tokens on the last rank only": Edge((0, 0, 0, 6), 8, 2),
    "no tokens": Edge((0, 0, 0), 6, 2),
    "nothing routed": Edge((3, 0, 2), 6, 2, picks=none),
    "one expert gets all": Edge((3, 0, 8), 6, 2, picks=last),
    "one expert gets all, at home": Edge((3, 0, 8), 6, 2, picks=last, policy="off", align=8),
    "groups of eight": Edge((9, 0, 2), 6, 2, align=8),
    "odd width in bf16": Edge((6, 1, 0), 6, 2, dtype=torch.bfloat16),
    "width of two in bf16": Edge((6, 1, 0), 6, 1, width=2, dtype=torch.bfloat16),
    "width of one": Edge((6, 1, 0), 6, 1, width=1),
}


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = steps._buffer
    monkeypatch.setattr(steps, "_buffer", lambda like, rows: fresh(like, rows).fill_(float("nan")))


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch, poison: None) -> None:
    edge = EDGES[name]
    for module in (ids, routes, messages):
        monkeypatch.setattr(module, "by_kernels", lambda x: kernels)
    check(edge, run(edge, edge.parallel(Local(len(edge.sizes))), lambda x: x), edge.expected())


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("view", [wide, shifted, turned])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_views(
    dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with one token has no say in its stride: what is contiguous may still not be readable as words."""
    edge = Edge((1, 3, 0), 6, 1, width=8, dtype=dtype)
    for module in (ids, routes, messages):
        monkeypatch.setattr(module, "by_kernels", lambda x: kernels)
    check(edge, run(edge, edge.parallel(Local(3)), view), edge.expected())


def layers_work(rank: int, ranks: int, edges: list[Edge]) -> list[Any]:
    """[results of each edge, two layers of them in flight at once and the first one recomputed in its backward]."""
    out: list[Any] = []
    for edge in edges:
        parallel = edge.parallel(Collective())
        chosen, *tensors, d_y = edge.inputs()
        first, home = sum(edge.sizes[:rank]), edge.experts // ranks
        mine, own = slice(first, first + edge.sizes[rank]), slice(rank * home, (rank + 1) * home)
        parts = (mine, mine, own, own)
        leaves = [t[part].clone().requires_grad_() for t, part in zip(tensors, parts, strict=True)]

        def layer(
            x: torch.Tensor,
            *rest: torch.Tensor,
            parallel: ExpertParallel = parallel,
            chosen: torch.Tensor = chosen[mine],
        ) -> torch.Tensor:
            planned = parallel.plan([chosen])
            return balanced_experts(parallel, x, rest[0], Dense(*rest[1:]), planned, ACT, exact=True)

        y = checkpoint(layer, *leaves, use_reentrant=False)
        again = layer(*leaves)
        once = torch.autograd.grad(y, leaves, d_y[mine])
        twice = torch.autograd.grad(again, leaves, d_y[mine], retain_graph=True)
        third = torch.autograd.grad(again, leaves, d_y[mine])
        same = torch.equal(y, again)
        same &= all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(once, twice, third, strict=True))
        out += [same, y.detach().double(), *(g.double() for g in once)]
    return out


def refusals_work(rank: int, ranks: int) -> list[Any]:
    """Each kind of wrong ids, on the last rank alone; after them a plan still works."""
    parallel = ExpertParallel(Collective(), 2 * ranks, 2, 4)
    good = torch.zeros(4, 2, dtype=torch.int64)
    said = []
    for wrong in (good - 2, good + 2 * ranks, good[:, :1], good.int(), torch.zeros(5, 2).long(), good[0], good[:0, :1]):
        try:
            parallel.plan([wrong if rank == ranks - 1 else good])
        except Error as error:
            said.append(str(error))
    return [*said, parallel.plan([good]).all_rows]


THREE = [
    Edge((4, 0, 3), 3, 1),
    Edge((0, 0, 5), 6, 3, picks=last, policy="tolerant"),
    Edge((2, 2, 0), 6, 2, picks=none),
    Edge((1, 6, 0), 6, 2, dtype=torch.bfloat16),
]
FOUR = [Edge((0, 7, 1, 3), 8, 3, policy="tolerant", align=4), Edge((0, 0, 0, 0), 4, 1)]


@pytest.mark.parametrize("edges", [THREE, FOUR], ids=["three", "four"])
def test_processes(edges: list[Edge], tmp_path: Path) -> None:
    ranks = len(edges[0].sizes)
    works: list[Work] = [(layers_work, (edges,)), (refusals_work, ())]
    results = spawn(works, ranks, tmp_path)
    for result in results:
        assert not any(isinstance(part, str) for part in result), result
    for k, edge in enumerate(edges):
        of_rank = [result[0][6 * k : 6 * k + 6] for result in results]
        assert all(part[0] for part in of_rank)
        got = [torch.cat([torch.from_numpy(part[i]) for part in of_rank]) for i in range(1, 6)]
        check(edge, got, edge.expected())
    for rank, result in enumerate(results):
        *said, rows = result[1]
        assert len(said) == 7
        assert all((f"rank {ranks - 1} refused" in text) == (rank != ranks - 1) for text in said)
        assert sum(rows) == 8 * ranks
