"""How much of an uneven expert load is moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perilune.errors import Error

# eps is rounded to parts per million, so that planning stays in integers.
PARTS = 1_000_000


@dataclass(frozen=True)
class Policy:
    """Made by `exact`, `one_donor`, `tolerant`, `budget` or `off`; read by every planner."""

    kind: Literal["exact", "one_donor", "tolerant", "budget", "off"]
    eps: float = 0.0
    min_rows: int = 0
    slots: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.eps < 1e6:
            raise Error(f"tolerant: eps is {self.eps}; must be >= 0 (0.02 allows 2 % over the mean)")
        if self.min_rows < 0:
            raise Error(f"tolerant: min_rows is {self.min_rows}; must be >= 0")
        if self.slots is not None and self.slots < 0:
            raise Error(f"budget: slots is {self.slots}; must be >= 0")

    def slots_of(self, home_experts: int) -> int:
        """Slots for copies on every rank that has `home_experts` experts of its own."""
        if self.kind == "off":
            return 0
        return home_experts if self.slots is None else self.slots

    def parts(self, ranks: int) -> int:
        """Parts per million of the mean that a rank may have under `tolerant`; beyond all there is nothing is moved."""
        return min(PARTS + round(self.eps * PARTS), PARTS * ranks)


def exact() -> Policy:
    """Every rank computes the same number of rows, to within one. Needs at most E/R copies on a rank."""
    return Policy("exact")


def one_donor() -> Policy:
    """Exact too, by MoonEP's rule: each receiver is filled from one donor. For comparison."""
    return Policy("one_donor")


def tolerant(eps: float = 0.02, min_rows: int = 0) -> Policy:
    """Only rows above (1 + eps) times the mean move, and no copy is made for fewer than min_rows rows.

    A copy costs its bytes whatever it computes: in bf16 it pays from about FLOP/s over byte/s rows on, 1000 to 2000.
    Rows of refused copies stay at home, above the limit; `Stats.residual` says how many.
    """
    return Policy("tolerant", eps=eps, min_rows=min_rows)


def budget(slots: int) -> Policy:
    """At most `slots` copies on a rank, as even as a greedy rule gets; `Stats.residual` says what is left."""
    return Policy("budget", slots=slots)


def off() -> Policy:
    """Every expert at home: plain expert parallelism."""
    return Policy("off")


__all__ = ["PARTS", "Policy", "budget", "exact", "off", "one_donor", "tolerant"]
