"""A stream for what travels while a product runs.

A product's programs each take a multiprocessor's shared memory, and it lasts as long as its last program. Programs that
are on a multiprocessor before it, with less shared memory set apart from L1, keep it away until they end; those that
come after it run beside it. So work goes to the side only once a product that was launched before it has started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from perilune.parallel.expert import direct_triton as kernels

# Longer than a launch takes to follow another in a graph.
_HOLD_NANOSECONDS = 20_000


class Aside:
    """One stream; on a CPU everything runs in turn."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> torch.cuda.Event | None:
        """Here in the current stream; the product that is launched next is the one to run beside."""
        return None if self._stream is None else torch.cuda.current_stream(self.device).record_event()

    @contextlib.contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """What is launched here waits for the mark and a little longer, not for what was launched since.

        Memory that it uses must have been allocated before the mark, and is kept by the caller until `join`.
        """
        if self._stream is None or mark is None:
            yield
            return
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            kernels.hold[(1,)](_HOLD_NANOSECONDS, num_warps=1)
            yield

    def join(self) -> None:
        """What follows on the current stream comes after it."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)


__all__ = ["Aside"]
