"""Segments of a model that is spread: KV rows are the same on every rank, a state is put together and cut again.

So a segment is what it is without ranks, and goes to an engine of any number of them.

Legend: B bytes, H heads, K key and value dim, C = 3 H K channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from perilune.parallel.tensor import Cut, cut_tensor, join_tensors
from perilune.serve.pools import Layout, Pools
from perilune.serve.ranks.shard import Place, gather

if TYPE_CHECKING:
    from perilune.serve.ranks.lead import Ranks

# Of matrices [layers, H, K, V] and windows [layers, 3, C], in which q, k and v are apart.
MATRICES, WINDOWS = Cut("attention", 1, "kda.num_heads"), Cut("attention", 2, "kda.num_heads", blocks=3)


class WholePools:
    """Rank 0's pools as `perilune.serve.segment` sees them; all ranks do what is asked of it. layout: of the whole."""

    def __init__(self, pools: Pools, ranks: Ranks, layout: Layout) -> None:
        self.pools, self.ranks, self.layout, self.geometry = pools, ranks, layout, layout.geometry()

    def gather(self, pages: Sequence[int]) -> torch.Tensor:
        return self.pools.gather(pages)

    def gather_state(self, pages: Sequence[int]) -> torch.Tensor:
        with self.ranks.together("join_state", list(pages)):
            return join_state(self.pools, self.layout, self.ranks.cuts.place, pages)

    def scatter(self, pages: Sequence[int], bytes_B: torch.Tensor) -> None:
        with self.ranks.together("take_rows", list(pages), bytes_B.shape[0]):
            take_rows(self.pools, pages, bytes_B.to(self.pools.device))

    def scatter_state(self, pages: Sequence[int], bytes_B: torch.Tensor) -> None:
        with self.ranks.together("cut_state", list(pages), bytes_B.shape[0]):
            cut_state(self.pools, self.layout, self.ranks.cuts.place, pages, bytes_B.to(self.pools.device))


def join_state(pools: Pools, whole: Layout, place: Place, pages: Sequence[int]) -> torch.Tensor:
    """The bytes of a whole state, of which every rank has its heads in `pages`."""
    mine_B = pools.gather_state(pages)
    matrices, windows = zip(*map(pools.layout.state_parts, gather(mine_B[None], place.ranks)), strict=True)
    return whole.pack_state(join_tensors(matrices, MATRICES), join_tensors(windows, WINDOWS))


def take_rows(pools: Pools, pages: Sequence[int], bytes_B: torch.Tensor) -> None:
    """Fill pages with rank 0's bytes."""
    dist.broadcast(bytes_B, 0)
    pools.scatter(pages, bytes_B)


def cut_state(pools: Pools, whole: Layout, place: Place, pages: Sequence[int], bytes_B: torch.Tensor) -> None:
    """Put this rank's heads of rank 0's whole state into pages."""
    dist.broadcast(bytes_B, 0)
    matrices, windows = whole.state_parts(bytes_B)
    mine = (
        cut_tensor(matrices, MATRICES, place.rank, place.ranks),
        cut_tensor(windows, WINDOWS, place.rank, place.ranks),
    )
    pools.scatter_state(pages, pools.layout.pack_state(*mine))


__all__ = ["WholePools", "cut_state", "join_state", "take_rows"]
