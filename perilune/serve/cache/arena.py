"""One byte budget a tier, in pages: KV rows and KDA states are drawn from the same free list."""

from __future__ import annotations

from collections.abc import Callable

from perilune.errors import Error


class Arena:
    """`capacity` pages with ids 0 .. capacity - 1. A page can have several holders; the last one frees it.

    freed: called with every page that has lost its last holder, where set (tests poison it).
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise Error(f"arena capacity is {capacity} pages; must be >= 0")
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._held = bytearray(capacity)
        self._more: dict[int, int] = {}  # holders beyond the first
        self.freed: Callable[[int], None] | None = None

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None where so many are not free: never a part of them."""
        if count > len(self._free):
            return None
        if not count:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        for page in pages:
            self._held[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more holder of a held page."""
        assert self._held[page], f"page {page} is free"
        self._more[page] = self._more.get(page, 0) + 1

    def free(self, pages: list[int]) -> None:
        """One holder less of each page. A page without a holder must not be freed: that is a bug, not a request."""
        for page in pages:
            assert self._held[page], f"page {page} is freed twice"
            if self._more and page in self._more:
                self._more[page] -= 1
                if not self._more[page]:
                    del self._more[page]
            else:
                self._held[page] = 0
                self._free.append(page)
                if self.freed is not None:
                    self.freed(page)

    def holders(self, page: int) -> int:
        return self._held[page] + self._more.get(page, 0)


__all__ = ["Arena"]
