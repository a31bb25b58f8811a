"""Memory for copied experts, shared by all layers, that refuses to serve a copy which has been overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perilune.errors import Error


class SlotPool:
    """Slots of each rank in this process; every `open` starts a new generation and ends the one before it."""

    def __init__(self) -> None:
        self.generation = 0
        self._slots: dict[tuple[object, ...], torch.Tensor] = {}

    def open(self, weights: Sequence[Sequence[torch.Tensor]], slots: int) -> Copies:
        """weights[rank][k] [M, ...]: what copies will look like -> a ticket to slots that are to be written now."""
        self.generation += 1
        held = []
        for rank, tensors in enumerate(weights):
            views = []
            for k, own in enumerate(tensors):
                key = (rank, k, slots, own.shape[1:], own.dtype, own.device)
                if key not in self._slots:
                    self._slots[key] = own.new_zeros(slots, *own.shape[1:])
                views.append(self._slots[key])
            held.append(tuple(views))
        return Copies(self, self.generation, tuple(held))


@dataclass(frozen=True)
class Copies:
    """A ticket to one generation of a pool."""

    pool: SlotPool
    generation: int
    _held: tuple[tuple[torch.Tensor, ...], ...]

    def weights(self, rank: int) -> tuple[torch.Tensor, ...]:
        """[B, ...] tensors of the rank-th rank in this process. Raises Error once the pool was opened again."""
        if self.pool.generation != self.generation:
            raise Error(
                f"slots: copies of generation {self.generation} are gone, the pool holds {self.pool.generation}; "
                "prefetch again before the experts run"
            )
        return self._held[rank]


__all__ = ["Copies", "SlotPool"]
