"""What a program prints, on its way to whoever asked: bounded, in order, taken as a stream or as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from perilune.sandbox.driver import Output


class Collector:
    """Keeps up to `limit` bytes of each stream that nobody has taken; what comes after that is dropped, and said so.

    A reader that takes pieces as they come is never cut. taken: called with the number of bytes for which there is
    room again, so that the sender never runs ahead of a slow reader.
    """

    def __init__(self, limit: int, taken: Callable[[int], None]) -> None:
        if limit < 0:
            raise ValueError(f"max_output is {limit}; it must be 0 or more bytes")
        self.limit = limit
        self.truncated = False
        self._taken = taken
        self._pieces: list[Output] = []
        self._held = {1: 0, 2: 0}
        self._ended = False
        self._streaming = False
        self._changed = asyncio.Event()

    def put(self, stream: int, data: bytes) -> bool:
        """Take a piece. False if this stream is full: nobody will see what comes next."""
        if not self._streaming:
            room = self.limit - self._held[stream]
            self._taken(len(data))
            if len(data) > room:
                self.truncated = True
                data = data[:room]
        if data:
            self._pieces.append(Output(stream, data))
            self._held[stream] += len(data)
            self._changed.set()
        return self._streaming or self._held[stream] < self.limit or not self.truncated

    def end(self) -> None:
        """No more pieces come."""
        self._ended = True
        self._changed.set()

    async def pieces(self) -> AsyncIterator[Output]:
        """Every piece that is still here and all that come, until the end."""
        already = len(self._pieces)  # their room was given back when they came
        self._streaming = True
        while True:
            while self._pieces:
                piece = self._pieces.pop(0)
                self._held[piece.stream] -= len(piece.data)
                already -= 1
                if already < 0:
                    self._taken(len(piece.data))
                yield piece
            if self._ended:
                return
            self._changed.clear()
            await self._changed.wait()

    async def rest(self) -> tuple[bytes, bytes]:
        """Wait for the end; what nobody took, by stream."""
        while not self._ended:
            self._changed.clear()
            await self._changed.wait()
        out = b"".join(piece.data for piece in self._pieces if piece.stream == 1)
        err = b"".join(piece.data for piece in self._pieces if piece.stream == 2)
        return out, err


__all__ = ["Collector"]
