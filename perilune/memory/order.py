"""The slots of a step in the order in which they were filled; a backward pass asks for them from the end."""

from __future__ import annotations

import weakref

from perilune.memory.saved import Slot


class Order:
    """Knows slots without keeping them alive."""

    def __init__(self) -> None:
        self._slots: list[weakref.ref[Slot]] = []
        # Bytes of the slots of each layer.
        self._layers: dict[str, int] = {}

    def add(self, slot: Slot, layer: str) -> None:
        """A slot that has been filled in a layer."""
        slot.number = len(self._slots)
        self._slots.append(weakref.ref(slot))
        self._layers[layer] = self._layers.get(layer, 0) + slot.bytes

    @property
    def largest(self) -> int:
        """Bytes of the layer that filled most slots."""
        return max(self._layers.values(), default=0)

    def fetch_before(self, slot: Slot, ahead: float) -> None:
        """What was put before this one is wanted next: as many bytes of it as fit in a part of the largest layer."""
        room = ahead * self.largest
        for reference in reversed(self._slots[: slot.number]):
            earlier = reference()
            if earlier is None or earlier.there:
                continue
            if room < 0:
                break
            room -= earlier.bytes
            earlier.prefetch()

    def release(self) -> None:
        """Give up what is left."""
        for slot in (reference() for reference in self._slots):
            if slot is not None:
                slot.release()


__all__ = ["Order"]
