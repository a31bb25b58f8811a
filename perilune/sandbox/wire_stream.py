"""The host's ends of the streams of one guest agent: programs and files."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Protocol

from perilune.sandbox.driver import Command, Output, Result
from perilune.sandbox.errors import SandboxError
from perilune.sandbox.output import Collector
from perilune.sandbox.wire import WINDOW, Frame

KILL_GRACE_S = 5.0
_TOO_LARGE = 27  # EFBIG
_U32 = struct.Struct("<I")


class Sender(Protocol):
    """What a stream needs of the agent."""

    def send(self, kind: Frame, number: int, body: bytes = b"") -> None: ...

    def forget(self, number: int) -> None: ...

    async def feed(self, stream: Stream, kind: Frame, data: bytes) -> None: ...


class Stream:
    """One program or file: room for its input, futures for the answers. heard: since somebody last looked."""

    def __init__(self, number: int, agent: Sender) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.agent = agent
        self.started: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        self.error = ""
        self.room = WINDOW
        self.has_room = asyncio.Event()
        self.heard = False

    def receive(self, which: int, data: bytes) -> None:
        """A piece of output has come."""

    def credit(self, taken: int) -> None:
        """The guest may send so much more."""
        if taken > 0 and not self.ended.done():
            self.agent.send(Frame.CREDIT, self.number, _U32.pack(taken))

    def fail(self, error: SandboxError) -> None:
        """No answer will come: the machine is gone."""
        for future in (self.started, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as seen; whoever waits gets it all the same
        self.has_room.set()


class FileStream(Stream):
    """A file that is read, up to `limit` bytes: it may grow, have no size of its own, or be a guest's lie."""

    def __init__(self, number: int, agent: Sender, limit: int) -> None:
        super().__init__(number, agent)
        self.limit = limit
        self.data = bytearray()

    def receive(self, which: int, data: bytes) -> None:
        if self.ended.done():
            return
        if len(self.data) + len(data) <= self.limit:
            self.data += data
            self.credit(len(data))
            return
        self.error = "File too large"
        self.agent.send(Frame.DISCARD, self.number, _U32.pack(1))
        self.ended.set_result(_TOO_LARGE)


class GuestProcess(Stream):
    """A program in the guest (see `Process`)."""

    def __init__(self, number: int, agent: Sender, command: Command) -> None:
        super().__init__(number, agent)
        self._command = command
        self._collector = Collector(command.max_output, self.credit)
        self._timed_out = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        return self.started.result()

    def begin(self) -> None:
        """The program runs: its time starts."""
        self.ended.add_done_callback(lambda _: self._finished())
        if not self._command.detach:
            self._timer = asyncio.get_running_loop().call_later(self._command.timeout_s, self._expire)

    def _expire(self) -> None:
        self._timed_out = True
        self.agent.send(Frame.KILL, self.number, _U32.pack(9))
        # A guest that cannot even kill answers nothing: the caller is told all the same.
        self._timer = asyncio.get_running_loop().call_later(KILL_GRACE_S, self._give_up)

    def _give_up(self) -> None:
        if not self.ended.done():
            self.agent.send(Frame.DISCARD, self.number, _U32.pack(3))
            self.ended.set_result(137)

    def _finished(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._collector.end()
        self.has_room.set()
        self.agent.forget(self.number)

    def receive(self, which: int, data: bytes) -> None:
        if not self._collector.put(which, data):
            self.agent.send(Frame.DISCARD, self.number, _U32.pack(which))

    def output(self) -> AsyncIterator[Output]:
        return self._collector.pieces()

    async def write(self, data: bytes) -> None:
        await self.agent.feed(self, Frame.STDIN, data)

    async def close_stdin(self) -> None:
        self.agent.send(Frame.STDIN_END, self.number)

    async def resize(self, rows: int, columns: int) -> None:
        self.agent.send(Frame.RESIZE, self.number, struct.pack("<2I", rows, columns))

    async def kill(self, signal: int = 9) -> None:
        self.agent.send(Frame.KILL, self.number, _U32.pack(signal))

    async def wait(self) -> Result:
        stdout, stderr = await self._collector.rest()
        code = await asyncio.shield(self.ended)
        return Result(code, stdout, stderr, self._timed_out, self._collector.truncated)


__all__ = ["FileStream", "GuestProcess", "Sender", "Stream"]
