"""How many machines fit: by what they really use, not by what they were promised."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perilune.sandbox.errors import Exhausted

# A machine that was just started grows by about this much before it is looked at again.
RESERVE = 64 << 20
OVERHEAD = 48 << 20  # the virtual machine's process itself
_SHARE = 0.8


@dataclass
class _Charge:
    used: int
    most: int

    @property
    def bytes(self) -> int:
        return min(self.used + RESERVE, self.most)


class Admission:
    """Counts the private memory of machines against a limit. limit: bytes, or None for 80 % of what is free now."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit if limit is not None else int(_available() * _SHARE)
        self._charges: dict[str, _Charge] = {}

    def admit(self, box: str, memory_mib: int) -> None:
        """Count a machine that is about to start, or raise `Exhausted`."""
        charge = _Charge(0, (memory_mib << 20) + OVERHEAD)
        used = self.used()
        if box not in self._charges and used + charge.bytes > self.limit:
            raise Exhausted(
                f"memory: {len(self._charges)} machines use {used >> 20} MiB; one more goes over {self.limit >> 20} MiB"
            )
        self._charges[box] = charge

    def note(self, box: str, private: int) -> None:
        """What a machine uses now."""
        if box in self._charges:
            self._charges[box].used = private

    def release(self, box: str) -> None:
        """A machine has ended."""
        self._charges.pop(box, None)

    def used(self) -> int:
        """Bytes counted now."""
        return sum(charge.bytes for charge in self._charges.values())

    def overcommit(self) -> float:
        """Memory promised over memory counted."""
        used = self.used()
        return sum(charge.most for charge in self._charges.values()) / used if used else 1.0


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise AssertionError


__all__ = ["Admission"]
