"""The slots of a step in the order in which their tensors were saved; a backward pass asks for them from the end."""

from __future__ import annotations

import weakref

from perilune.memory.saved import Slot


class Order:
    """Knows slots without keeping them alive."""

    def __init__(self) -> None:
        self._slots: list[weakref.ref[Slot]] = []
        # Bytes of the slots of the layer that is being computed, if one is, and of the largest one so far.
        self._now: int | None = None
        self.largest = 0

    def begin_layer(self, inside: bool) -> None:
        """What is added from now on is of another layer, or of another micro-batch; inside: not between layers."""
        self._now = 0 if inside else None

    def add(self, slot: Slot) -> None:
        """A slot that has been filled."""
        self.saved(slot)
        if self._now is not None:
            self._now += slot.bytes
            self.largest = max(self.largest, self._now)

    def saved(self, slot: Slot) -> None:
        """It was saved by one more operation, whose backward pass asks for it before those of all others."""
        slot.number = len(self._slots)
        self._slots.append(weakref.ref(slot))

    def fetch_before(self, slot: Slot, ahead: float) -> None:
        """What was saved before this one is wanted next: as many bytes of it as fit in a part of the largest layer."""
        room, wanted = ahead * self.largest, set[Slot]()
        for at in range(slot.number - 1, -1, -1):
            earlier = self._slots[at]()
            if earlier is None or earlier.there or earlier in wanted:
                continue
            if room < 0:
                break
            room -= earlier.bytes
            wanted.add(earlier)
            earlier.prefetch()

    def release(self) -> None:
        """Give up what is left."""
        for slot in (reference() for reference in self._slots):
            if slot is not None:
                slot.release()


__all__ = ["Order"]
