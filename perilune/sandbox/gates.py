"""Faults and barriers for tests: a gate that fails or waits at chosen steps of a transition."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from perilune.sandbox.driver import Step


@dataclass
class Barrier:
    """Where one transition waits: `reached` is set when it arrives; set `release` to let it go on."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Gates:
    """A `Gate` that passes everything until told otherwise. Each fault and barrier is used once."""

    faults: dict[Step, list[BaseException]] = field(default_factory=dict)
    barriers: dict[Step, list[Barrier]] = field(default_factory=dict)
    passed: list[tuple[Step, str]] = field(default_factory=list)

    def fail(self, step: Step, error: BaseException) -> None:
        """Raise `error` the next time a transition comes to `step`."""
        self.faults.setdefault(step, []).append(error)

    def hold(self, step: Step) -> Barrier:
        """Hold the next transition that comes to `step`."""
        barrier = Barrier()
        self.barriers.setdefault(step, []).append(barrier)
        return barrier

    async def __call__(self, step: Step, box: str) -> None:
        self.passed.append((step, box))
        if self.barriers.get(step):
            barrier = self.barriers[step].pop(0)
            barrier.reached.set()
            await barrier.release.wait()
        if self.faults.get(step):
            raise self.faults[step].pop(0)


__all__ = ["Barrier", "Gates"]
