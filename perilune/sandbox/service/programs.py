"""Programs that were started over HTTP: who listens may go and come back, the program runs on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from perilune.sandbox.driver import Command, Output, Process, Result
from perilune.sandbox.errors import NotFound, SandboxError, Terminal

# Pieces that wait for a slow listener; the program then waits too.
WAITING = 16
# An ended program's exit code can be asked for so long.
KEPT_S = 60.0


@dataclass
class Program:
    """One program. tag: the caller's name for it. What it prints while nobody listens is dropped.

    awaited: somebody is about to listen: nothing is dropped until then.
    """

    box: str
    process: Process
    command: Command
    tag: str | None = None
    result: Result | None = None
    error: SandboxError | None = None
    awaited: bool = False
    _listener: asyncio.Queue[Output | None] | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        if self.awaited:
            self._listener = asyncio.Queue(WAITING)

    async def pump(self) -> None:
        """Pass on what it prints, until it has ended."""
        try:
            async for piece in self.process.output():
                listener = self._listener
                if listener is not None:
                    await self._give(listener, piece)
            self.result = await self.process.wait()
        except SandboxError as error:
            self.error = error
        except asyncio.CancelledError:
            self.error = Terminal("the service is stopping")
            raise
        finally:
            self._ended.set()
            if self._listener is not None:
                with contextlib.suppress(asyncio.QueueFull):
                    self._listener.put_nowait(None)

    async def _give(self, listener: asyncio.Queue[Output | None], piece: Output) -> None:
        while self._listener is listener:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await listener.put(piece)
                    return

    def _attach(self) -> asyncio.Queue[Output | None]:
        before = self._listener
        if before is not None and self.awaited:  # made before the program printed anything
            self.awaited = False
            return before
        self._listener = asyncio.Queue(WAITING)
        if before is not None:
            with contextlib.suppress(asyncio.QueueFull):
                before.put_nowait(None)
        return self._listener

    async def listen(self) -> AsyncGenerator[Output, None]:
        """What it prints from now on, until its end or until somebody else listens."""
        queue = self._attach()
        try:
            while self._listener is queue:
                if self._ended.is_set() and queue.empty():
                    return
                piece = await queue.get()
                if piece is None:
                    return
                yield piece
        finally:
            if self._listener is queue:
                self._listener = None

    async def end(self) -> Result:
        """Wait for its end."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class Programs:
    """By sandbox and process id."""

    def __init__(self) -> None:
        self._programs: dict[tuple[str, int], Program] = {}
        self._pumps: set[asyncio.Task[None]] = set()

    def add(
        self, box: str, process: Process, command: Command, tag: str | None = None, awaited: bool = True
    ) -> Program:
        """Take in a program that has just started. awaited: see `Program`."""
        program = Program(box, process, command, tag, awaited=awaited)
        self._programs[box, process.pid] = program
        pump = asyncio.create_task(program.pump())
        self._pumps.add(pump)

        def ended(task: asyncio.Task[None]) -> None:
            self._pumps.discard(task)
            asyncio.get_running_loop().call_later(KEPT_S, self._forget, program)

        pump.add_done_callback(ended)
        return program

    def _forget(self, program: Program) -> None:
        key = program.box, program.process.pid
        if self._programs.get(key) is program:
            del self._programs[key]

    def get(self, box: str, pid: int | None = None, tag: str | None = None) -> Program:
        """By process id, or by tag."""
        if pid is None:
            found = [one for one in self._programs.values() if one.box == box and tag is not None and one.tag == tag]
        else:
            found = [self._programs[box, pid]] if (box, pid) in self._programs else []
        if not found:
            raise NotFound(f"no program {tag if pid is None else pid!r} runs in sandbox {box!r}")
        return found[-1]

    def running(self, box: str) -> list[Program]:
        """Those that have not ended."""
        return [one for one in self._programs.values() if one.box == box and not one._ended.is_set()]

    async def close(self) -> None:
        """Nobody listens any more."""
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


__all__ = ["Program", "Programs"]
