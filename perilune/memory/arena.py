"""Ranges of a room that somebody else has: which are taken."""

from __future__ import annotations

# Ranges begin at multiples of this many bytes, as allocations on a GPU do.
ALIGNMENT = 512


class Arena:
    """`size` bytes; the lowest range that is long enough is taken, free neighbours are joined."""

    def __init__(self, size: int) -> None:
        self.size, self.taken = size, 0
        self._free: list[tuple[int, int]] = [(0, size)]

    def fits(self, size: int) -> bool:
        """Whether a free range is long enough."""
        return any(end - begin >= rounded(size) for begin, end in self._free)

    def take(self, size: int) -> int:
        """Where a range of `size` bytes, for which `fits` is true, begins from now on."""
        needed = rounded(size)
        i, (begin, end) = next((i, free) for i, free in enumerate(self._free) if free[1] - free[0] >= needed)
        self._free[i : i + 1] = [(begin + needed, end)] if end - begin > needed else []
        self.taken += needed
        return begin

    def give(self, begin: int, size: int) -> None:
        """Free a range that `take` gave."""
        end = begin + rounded(size)
        self.taken -= end - begin
        before = [other for other in self._free if other[1] <= begin]
        after = [other for other in self._free if other[0] >= end]
        if before and before[-1][1] == begin:
            begin = before.pop()[0]
        if after and after[0][0] == end:
            end = after.pop(0)[1]
        self._free = [*before, (begin, end), *after]


def rounded(size: int) -> int:
    """Bytes that a range of `size` occupies; at least one unit, so that every range has a place of its own."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


__all__ = ["ALIGNMENT", "Arena", "rounded"]
