"""Page tables of the slots on the device, as kernels read them: each MLA layer has pages of its own in the arena.

Legend: S slots, W table width, M MLA layers, N sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from perilune.ops.upload import upload
from perilune.serve.pools import Layout


class Tables:
    """A row of page ids for each of `slots` slots, `wide` at most. Tensors never move: graphs read them."""

    def __init__(self, layout: Layout, slots: int, wide: int, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._table_SW = torch.zeros(slots, wide, dtype=torch.int32, device=device)
        self._length = [0] * slots

    def keep(self, slot: int, pages: Sequence[int]) -> None:
        """Bring a slot's row up to date: pages are only ever added behind the others."""
        known = self._length[slot]
        if len(pages) > known:
            self._table_SW[slot, known : len(pages)] = upload(pages[known:], torch.int32, self._device)
            self._length[slot] = len(pages)

    def forget(self, slot: int) -> None:
        """Another request has the slot."""
        self._length[slot] = 0

    def of(self, slots_N: torch.Tensor, wide: int) -> torch.Tensor:
        """int32 [M, N, W]: page ids of each MLA layer, anything beyond a sequence's own."""
        return self._layers(self._table_SW[slots_N, :wide])

    def locate(self, rows_T: torch.Tensor) -> torch.Tensor:
        """int64 [M, T]: rows of the arena -> rows of each MLA layer; -1 stays."""
        size = self._layout.page_tokens
        return torch.where(rows_T < 0, -1, self._layers(rows_T // size) * size + rows_T % size)

    def _layers(self, pages: torch.Tensor) -> torch.Tensor:
        """Page ids of the arena -> [M, ...] of single layers."""
        count = self._layout.mla_layers
        layer = torch.arange(count, dtype=pages.dtype, device=pages.device)
        return (pages * count + layer.view(-1, *[1] * pages.dim())).contiguous()


__all__ = ["Tables"]
