"""A step on all ranks: rank 0's runner tells the others every call that it gets; what both sides of a call do.

Calls that move nothing between ranks wait for the next that does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from perilune.model import Stats, outline
from perilune.serve.cache.cache import Copy
from perilune.serve.ranks.shard import Cuts, gather, parts_of
from perilune.serve.work import Chunk

if TYPE_CHECKING:
    from perilune.serve.ranks.lead import Ranks


class LeadRunner:
    """The runner of rank 0, which the others follow. Every call has the meaning that it has in `inner`."""

    def __init__(self, inner: Any, ranks: Ranks) -> None:
        self.inner, self.ranks = inner, ranks
        ranks.forget_graphs = inner.forget_graphs
        self.on_grid: bool = inner.on_grid
        self._known: dict[int, int] = {}  # pages of each slot's table that the others have

    def forward(
        self, chunks: Sequence[Chunk], stats: Stats | None = None, tokens_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        pieces = []
        for chunk in chunks:
            known, table = self._known.get(chunk.slot, 0), chunk.request.table
            self._known[chunk.slot] = len(table)
            what = (chunk.tokens, chunk.start, chunk.drafts, chunk.sampled, chunk.scored, chunk.decodes, chunk.exports)
            pieces.append((chunk.slot, table[known:], what))
        with self.ranks.together("forward", pieces, stats is not None, 0 if tokens_T is None else len(tokens_T)):
            if tokens_T is not None:
                tokens_T = tokens_T.contiguous()
                dist.broadcast(tokens_T, 0)
            x_RD: torch.Tensor = self.inner.forward(chunks, stats, tokens_T)
        return x_RD

    def head(self, x_RD: torch.Tensor) -> torch.Tensor:
        x_RD = x_RD.contiguous()
        with self.ranks.together("head", tuple(x_RD.shape), x_RD.dtype):
            return share_head(self.inner, x_RD)

    def weights(self) -> dict[str, torch.Tensor]:
        return outline(self.ranks.cuts.config, packed=self.ranks.packed).state_dict()

    def put_weight(self, name: str, value: torch.Tensor) -> None:
        whole = value.detach().to(self.ranks.device).contiguous()
        with self.ranks.together("put_weight", name, tuple(whole.shape), whole.dtype):
            share_weight(self.inner, self.ranks.cuts, name, whole)

    def load(self, slot: int, state: Sequence[int], depth: int) -> None:
        self._known[slot] = 0
        self.ranks.later("load", slot, list(state), depth)
        self.inner.load(slot, state, depth)

    def save(self, slot: int, depth: int, state: Sequence[int]) -> None:
        self.ranks.later("save", slot, depth, list(state))
        self.inner.save(slot, depth, state)

    def accept(self, kept: Sequence[tuple[int, int, int]]) -> None:
        self.ranks.later("accept", list(kept))
        self.inner.accept(kept)

    def free(self, slot: int) -> None:
        self.ranks.later("free", slot)
        self.inner.free(slot)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if sources:
            self.ranks.later("copy_pages", list(sources), list(targets))
            self.inner.copy_pages(sources, targets)

    def move(self, copy: Copy) -> None:
        self.ranks.later("move", copy)
        self.inner.move(copy)

    def fetch(self, copies: Sequence[Copy]) -> Callable[[], bool]:
        self.ranks.later("fetch", list(copies))
        here, told = self.inner.fetch(copies), False

        def arrived() -> bool:
            nonlocal told
            if not here():
                return False
            if not told:
                # The others' copies may be slower; what comes next there waits for them.
                self.ranks.later("settle")
                told = True
            return True

        return arrived

    def settle(self) -> None:
        self.ranks.later("settle")
        self.inner.settle()

    def refresh(self) -> None:
        self.ranks.later("refresh")
        self.inner.refresh()

    def release(self, weights: bool = False) -> None:
        self.ranks.now("release", weights)
        self.inner.release(weights)

    def take(self, weights: bool = False) -> None:
        self._known = {}
        self.ranks.now("take", weights)
        take_part(self.inner, self.ranks.cuts, weights)


def share_head(runner: Any, x_RD: torch.Tensor) -> torch.Tensor:
    """logits_RV from rank 0's hidden states, a part of the vocabulary from each rank."""
    dist.broadcast(x_RD, 0)
    part_RV = runner.head(x_RD)
    ranks, rows = dist.get_world_size(), part_RV.shape[0]
    logits_RV: torch.Tensor = gather(part_RV, ranks).unflatten(0, (ranks, rows)).transpose(0, 1).flatten(1)
    return logits_RV


def take_part(runner: Any, cuts: Cuts, weights: bool) -> None:
    """`Runner.take` of a rank: weights that were made anew have to be told apart again."""
    runner.take(weights)
    runner.model.parts = parts_of(runner.model, cuts)


def share_weight(runner: Any, cuts: Cuts, name: str, whole: torch.Tensor) -> None:
    """Each rank's part of a weight that rank 0 has."""
    dist.broadcast(whole, 0)
    runner.put_weight(name, cuts.part(name, whole))


__all__ = ["LeadRunner", "share_head", "share_weight", "take_part"]
