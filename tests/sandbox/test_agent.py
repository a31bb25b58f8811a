"""The host's end of a guest's agent against guests that lie, run ahead, are late, or never answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from perilune.sandbox import agent as host
from perilune.sandbox.agent import Agent
from perilune.sandbox.driver import Command, Output
from perilune.sandbox.errors import GuestError
from perilune.sandbox.output import Collector
from perilune.sandbox.wire import FRAME_MAX, WINDOW, Frame, Parser, frame
from tests.sandbox.worlds import run


class Guest:
    """What a test says in the guest's place."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._parser = Parser()
        self._frames: list[tuple[int, int, bytes]] = []

    async def heard(self, kind: Frame) -> tuple[int, bytes]:
        """The stream and body of the next frame of this type; others before it are skipped."""
        loop = asyncio.get_running_loop()
        while True:
            while self._frames:
                found, stream, body = self._frames.pop(0)
                if found == kind:
                    return stream, body
            data = await loop.sock_recv(self._connection, 1 << 16)
            assert data, "the host has hung up"
            self._frames += self._parser.feed(data)

    async def say(self, kind: Frame, stream: int, body: bytes = b"") -> None:
        await asyncio.get_running_loop().sock_sendall(self._connection, frame(kind, stream, body))


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[Agent, Guest]]:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    agent = Agent("box")
    await agent.attach(ours)
    try:
        yield agent, Guest(theirs)
    finally:
        await agent.detach()
        theirs.close()


def number(value: int) -> bytes:
    return struct.pack("<I", value)


def test_a_file_without_an_end() -> None:
    """The limit holds on the host, whatever the guest says of the size: a file that grows, one of /proc, a lie."""

    async def test() -> None:
        async with connected() as (agent, guest):
            reading = asyncio.create_task(agent.read("/proc/1/pagemap", 100_000))
            stream, _ = await guest.heard(Frame.READ)
            for _ in range(2):
                await guest.say(Frame.DATA, stream, bytes(60_000))
            with pytest.raises(GuestError, match="at most 100000 bytes are read"):
                await reading
            assert await guest.heard(Frame.DISCARD) == (stream, number(1))  # the guest's end of it is closed
            # A file of exactly the limit is one.
            reading = asyncio.create_task(agent.read("/f", 4))
            stream, _ = await guest.heard(Frame.READ)
            await guest.say(Frame.DATA, stream, b"four")
            await guest.say(Frame.END, stream, number(0))
            assert await reading == b"four"

    run(test())


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_guest_that_hangs_in_a_file(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence of a guest that runs ends the wait, at its first word or in the middle; one that stands may be silent."""

    async def test() -> None:
        async with connected() as (agent, guest):
            ask, word = (Frame.READ, Frame.DATA) if verb == "read" else (Frame.WRITE, Frame.TAKEN)

            def begin() -> asyncio.Task[bytes | None]:
                data = bytes(3 * WINDOW)
                return asyncio.create_task(agent.read("/f", 9) if verb == "read" else agent.write("/f", data, 0o644))

            monkeypatch.setattr(host, "_ANSWER_S", 0.02)
            for said in (False, True):
                working = begin()
                stream, _ = await guest.heard(ask)
                if said:
                    await guest.say(word, stream, number(4))
                with pytest.raises(GuestError, match="has not answered"):
                    await working
                if verb == "read":
                    assert await guest.heard(Frame.DISCARD) == (stream, number(1))
            working = begin()
            stream, _ = await guest.heard(ask)
            quiet = asyncio.create_task(agent.quiesce(20.0))
            question, _ = await guest.heard(Frame.PING)
            await guest.say(Frame.PONG, question, number(0))
            await quiet
            await asyncio.sleep(0.1)
            assert not working.done()
            await guest.say(Frame.END, stream, number(0))
            await working
            assert not agent._streams

    run(test())


def test_a_file_that_comes_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is an answer: a large file may take any time."""

    async def test() -> None:
        async with connected() as (agent, guest):
            wait = asyncio.wait
            streams: list[int] = []

            async def late(tasks: list[asyncio.Future[int]], timeout: float | None) -> object:
                if not streams:
                    streams.append((await guest.heard(Frame.READ))[0])
                await guest.say(Frame.DATA, streams[0], b"x")
                streams.append((await guest.heard(Frame.CREDIT))[0])
                if len(streams) < 6:
                    return set(), set(tasks)
                await guest.say(Frame.END, streams[0], number(0))
                return await wait(tasks)

            monkeypatch.setattr(asyncio, "wait", late)
            assert await agent.read("/f", 100) == b"xxxxx"

    run(test())


def test_a_file_whose_reader_has_gone() -> None:
    """The guest closes it."""

    async def test() -> None:
        async with connected() as (agent, guest):
            reading = asyncio.create_task(agent.read("/f", 100))
            stream, _ = await guest.heard(Frame.READ)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert await guest.heard(Frame.DISCARD) == (stream, number(1))

    run(test())


def test_a_late_answer_is_not_the_next_one() -> None:
    """A guest that answers a question after its time: what was sent since has not been read yet."""

    async def test() -> None:
        async with connected() as (agent, guest):
            with pytest.raises(TimeoutError):
                await agent.programs(0.01)
            first, _ = await guest.heard(Frame.PING)
            quiet = asyncio.create_task(agent.quiesce(20.0))
            second, _ = await guest.heard(Frame.PING)
            await guest.say(Frame.PONG, first, number(3))
            await guest.say(Frame.STDOUT, 99, b"x")
            for _ in range(20):
                await asyncio.sleep(0)
            assert not quiet.done()
            await guest.say(Frame.PONG, second, number(0))
            assert await quiet == 0

    run(test())


def test_frames_of_the_wrong_length_are_nothing() -> None:
    """The connection goes on."""

    async def test() -> None:
        async with connected() as (agent, guest):
            asking = asyncio.create_task(agent.programs(20.0))
            stream, _ = await guest.heard(Frame.PING)
            for kind in (Frame.PONG, Frame.TAKEN, Frame.STARTED, Frame.EXIT, Frame.END):
                await guest.say(kind, stream, b"")
            await guest.say(Frame.PONG, stream, number(5))
            assert await asking == 5

    run(test())


def test_a_program_that_nobody_waited_for() -> None:
    """Its caller has gone before it began: it is killed as soon as it has, and prints for nobody."""

    async def test() -> None:
        async with connected() as (agent, guest):
            starting = asyncio.create_task(agent.spawn(Command("sleep 1000", detach=True)))
            stream, _ = await guest.heard(Frame.SPAWN)
            starting.cancel()
            assert await guest.heard(Frame.DISCARD) == (stream, number(3))
            assert await guest.heard(Frame.KILL) == (stream, number(9))
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert not agent._streams

    run(test())


def test_output_costs_what_it_says() -> None:
    """A megabyte that comes byte by byte is kept in pieces of a frame, in order, each stream in its place."""
    kept = Collector(1 << 20, lambda taken: None)
    for i in range(300_000):
        assert kept.put(1, b"%c" % (i % 251))
    kept.put(2, b"between")
    kept.put(1, b"end")
    assert len(kept._pieces) <= 300_000 // FRAME_MAX + 3
    kept.end()

    async def test() -> None:
        pieces = [piece async for piece in kept.pieces()]
        text = b"".join(piece.data for piece in pieces if piece.stream == 1)
        assert text == bytes(i % 251 for i in range(300_000)) + b"end"
        assert pieces[-2:] == [Output(2, b"between"), Output(1, b"end")]

    run(test())


def test_a_sender_that_runs_ahead_of_a_reader_is_cut() -> None:
    """It has credit for a window: what comes beyond it is dropped, not kept."""

    async def test() -> None:
        given: list[int] = []
        kept = Collector(1000, given.append)
        assert kept.put(1, bytes(1000))  # before anybody reads: its room is given back at once
        pieces = kept.pieces()
        assert len((await anext(pieces)).data) == 1000
        assert given == [1000]
        for _ in range(WINDOW // FRAME_MAX):
            assert kept.put(1, bytes(FRAME_MAX))
        assert kept.put(1, bytes(1000))
        assert not kept.put(1, b"x")
        assert kept.truncated
        kept.end()
        assert sum([len(piece.data) async for piece in pieces]) == WINDOW + 1000
        assert sum(given) == WINDOW + 2000

    run(test())
