"""What became of each name in a step."""

from __future__ import annotations

from dataclasses import dataclass

# The name of all that was saved and has none.
UNNAMED = "(unnamed)"


@dataclass
class Row:
    """What became of one name in the step: bytes of the storages that were saved, and of what stands for them."""

    placement: str
    count: int = 0
    before: int = 0
    device: int = 0
    stored: int = 0


__all__ = ["UNNAMED", "Row"]
