"""How long the computation stood still for what had been moved away, by name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Waits:
    """Times the blocks of `timed`: on a GPU what its current stream waits, elsewhere what the caller does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        if self._device.type != "cuda":
            begin = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(torch.cuda.current_stream(self._device))
        yield
        last.record(torch.cuda.current_stream(self._device))
        self._events.append((name, first, last))

    def seconds(self) -> dict[str, float]:
        """By name, so far; waits for the device."""
        if self._events:
            torch.cuda.synchronize(self._device)
        for name, first, last in self._events:
            self._seconds[name] = self._seconds.get(name, 0.0) + first.elapsed_time(last) / 1e3
        self._events.clear()
        return dict(self._seconds)


__all__ = ["Waits"]
