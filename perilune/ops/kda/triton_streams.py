"""Two streams for the pieces of a long batch: K1 of a piece beside K2 of the piece before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch


class Streams:
    """K1 of the pieces on the current stream, K2 on a second one; nothing on a CPU (Triton's interpreter)."""

    def __init__(self, device: torch.device) -> None:
        self.first = self.second = None
        self.scanned: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self.first, self.second = torch.cuda.current_stream(device), _second_stream(device)
            self.second.wait_stream(self.first)

    def wait_for_scan(self, i: int) -> None:
        """Let K1 overwrite what K2 of piece i reads."""
        if self.first is not None:
            self.first.wait_event(self.scanned[i])

    @contextmanager
    def scanning(self) -> Iterator[None]:
        """Launch K2 of a piece, after what was launched before."""
        if self.first is None or self.second is None:
            yield
            return
        self.second.wait_stream(self.first)
        with torch.cuda.stream(self.second):
            yield
        self.scanned.append(self.second.record_event())

    def join(self) -> None:
        if self.first is not None and self.second is not None:
            self.first.wait_stream(self.second)


@lru_cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


__all__ = ["Streams"]
