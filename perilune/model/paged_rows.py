"""An MLA layer's cache rows in pages of a shared pool, behind the interface of `MlaState`.

Legend: P pages, S tokens a page, L latent row width, T new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class PagedRows:
    """One sequence's rows: `table` names the page of every S tokens. Raises IndexError where no page was given."""

    pages_PSL: torch.Tensor
    table: torch.Tensor
    length: int

    @property
    def rows_SL(self) -> torch.Tensor:
        """The valid rows, gathered."""
        size = self.pages_PSL.shape[1]
        pages = self.table[: -(-self.length // size)]
        return self.pages_PSL[pages].flatten(0, 1)[: self.length]

    def append(self, rows_TL: torch.Tensor) -> PagedRows:
        """The cache with `rows_TL` written behind its last row."""
        size = self.pages_PSL.shape[1]
        at_T = torch.arange(self.length, self.length + rows_TL.shape[0], device=rows_TL.device)
        self.pages_PSL[self.table[at_T // size], at_T % size] = rows_TL
        return replace(self, length=self.length + rows_TL.shape[0])

    def rollback(self, count: int) -> PagedRows:
        """The cache without its last `count` rows."""
        return replace(self, length=self.length - count)


__all__ = ["PagedRows"]
