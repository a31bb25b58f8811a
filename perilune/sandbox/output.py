"""What a program prints, on its way to whoever asked: bounded, in order, taken as a stream or as a whole."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from perilune.sandbox.driver import Output
from perilune.sandbox.wire import FRAME_MAX, WINDOW


class Collector:
    """Keeps up to `limit` bytes of each stream that nobody has taken; what comes after that is dropped, and said so.

    A reader that takes pieces as they come is never cut. taken: called with the number of bytes for which there is
    room again, so that the sender never runs ahead of a slow reader; one that does all the same is cut.
    """

    def __init__(self, limit: int, taken: Callable[[int], None]) -> None:
        if limit < 0:
            raise ValueError(f"max_output is {limit}; it must be 0 or more bytes")
        self.limit = limit
        self.truncated = False
        self._taken = taken
        # (stream, bytes): small pieces grow the last one, so that what is kept costs what it says.
        self._pieces: deque[tuple[int, bytearray]] = deque()
        self._held = {1: 0, 2: 0}
        self._ended = False
        self._streaming = False
        self._changed = asyncio.Event()

    def put(self, stream: int, data: bytes) -> bool:
        """Take a piece. False if this stream is full: nobody will see what comes next."""
        room = self.limit - self._held[stream] + (WINDOW if self._streaming else 0)
        if not self._streaming:
            self._taken(len(data))
        cut = len(data) > room
        if cut:
            self.truncated = True
            data = data[:room]
        if data:
            self._keep(stream, data)
            self._held[stream] += len(data)
            self._changed.set()
        return not cut if self._streaming else self._held[stream] < self.limit or not self.truncated

    def _keep(self, stream: int, data: bytes) -> None:
        if self._pieces and self._pieces[-1][0] == stream and len(self._pieces[-1][1]) + len(data) <= FRAME_MAX:
            self._pieces[-1][1].extend(data)
        else:
            self._pieces.append((stream, bytearray(data)))

    def end(self) -> None:
        """No more pieces come."""
        self._ended = True
        self._changed.set()

    async def pieces(self) -> AsyncIterator[Output]:
        """Every piece that is still here and all that come, until the end."""
        already = dict(self._held)  # their room was given back when they came
        self._streaming = True
        while True:
            while self._pieces:
                stream, data = self._pieces.popleft()
                self._held[stream] -= len(data)
                given = min(already[stream], len(data))
                already[stream] -= given
                if len(data) > given:
                    self._taken(len(data) - given)
                yield Output(stream, bytes(data))
            if self._ended:
                return
            self._changed.clear()
            await self._changed.wait()

    async def rest(self) -> tuple[bytes, bytes]:
        """Wait for the end; what nobody took, by stream."""
        while not self._ended:
            self._changed.clear()
            await self._changed.wait()
        out, err = (b"".join(data for stream, data in self._pieces if stream == wanted) for wanted in (1, 2))
        return out, err


__all__ = ["Collector"]
