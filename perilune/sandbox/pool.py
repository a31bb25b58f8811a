"""Booted machines kept ready: a sandbox from a template in use takes one instead of starting its own."""

from __future__ import annotations

import asyncio
import secrets

from perilune.sandbox.admission import Admission
from perilune.sandbox.driver import Machine, Network
from perilune.sandbox.errors import SandboxError
from perilune.sandbox.machines import Machines, Running
from perilune.sandbox.snapshot import Snapshot


class Pool:
    """Machines by the snapshot they stand on. Filled up to `high` as soon as there are fewer than `low`."""

    def __init__(self, machines: Machines, admission: Admission, low: int, high: int) -> None:
        if not 0 <= low <= high:
            raise ValueError(f"pool_low is {low} and pool_high {high}; it must be 0 <= low <= high")
        self._machines = machines
        self._admission = admission
        self._low, self._high = low, high
        self._ready: dict[str, list[Running]] = {}
        self._filling = asyncio.Lock()
        self._closed = False

    def take(self, snapshot: str) -> Running | None:
        """A machine that is ready, or None."""
        ready = self._ready.get(snapshot)
        return ready.pop(0) if ready else None

    def put_back(self, running: Running) -> None:
        """One that was taken and is not needed."""
        self._ready.setdefault(running.snapshot.id, []).append(running)

    def size(self) -> int:
        """How many are ready."""
        return sum(map(len, self._ready.values()))

    async def fill(self, template: str, snapshot: Snapshot, machine: Machine) -> None:
        """Start machines one after the other; stops quietly when memory is used up."""
        async with self._filling:
            ready = self._ready.setdefault(snapshot.id, [])
            if len(ready) >= self._low:
                return
            while len(ready) < self._high and not self._closed:
                box = secrets.token_hex(8)
                try:
                    self._admission.admit(box, machine.memory_mib)
                    running = await self._machines.start(box, snapshot, machine, Network())
                except BaseException as error:
                    self._admission.release(box)
                    if isinstance(error, SandboxError):
                        return
                    raise
                self._machines.running.pop(box)
                ready.append(running)

    async def close(self) -> None:
        """End them all."""
        self._closed = True
        async with self._filling:
            for ready in self._ready.values():
                while ready:
                    running = ready.pop()
                    self._machines.running[running.handle.box] = running
                    await self._machines.stop(running.handle.box)


__all__ = ["Pool"]
