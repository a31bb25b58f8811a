"""The host's side of the guest agent: one connection, many streams."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import struct
import time
from collections.abc import Awaitable

from perilune.sandbox.driver import Command
from perilune.sandbox.errors import GuestError, SandboxError, Terminal
from perilune.sandbox.wire import FRAME_MAX, Frame, Parser, frame, spawn_body
from perilune.sandbox.wire_stream import FileStream, GuestProcess, Stream

_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
_ANSWER_S = 30.0
CLOCK_ERROR_S = 0.05
CLOCK_TRIES = 5


class Agent(asyncio.Protocol):
    """One guest's agent. It outlives its connection: a paused machine's streams go on when it is resumed."""

    def __init__(self, box: str) -> None:
        self.box = box
        self._transport: asyncio.Transport | None = None
        self._parser = Parser()
        self._streams: dict[int, Stream] = {}
        self._next = 1
        self._pong: tuple[int, asyncio.Future[int]] | None = None
        self._ping = asyncio.Lock()
        self._hello: tuple[bytes, asyncio.Future[None]] | None = None
        self._held: list[bytes] | None = None
        self._closed = asyncio.Event()
        self._gone: SandboxError | None = None

    # The connection

    async def attach(self, connection: socket.socket, fresh: bool = False) -> None:
        """Take a connected socket; the agent closes it. fresh: what the last one had begun to say is lost."""
        if fresh:
            self._parser = Parser()
        self._closed.clear()
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    async def hello(self, timeout_s: float, new: bool, clean: bool = True) -> None:
        """Wait until the agent answers. new: the streams of an earlier host are not ours. clean: see `Image`."""
        nonce = secrets.token_bytes(16)
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hello = (nonce, answered)
        if not clean:
            self._raw(bytes(FRAME_MAX + 16))  # ends whatever frame the guest was in
        self._raw(frame(Frame.HELLO, 0, _U32.pack(1 if new else 0) + nonce))
        try:
            async with asyncio.timeout(timeout_s):
                await answered
        except TimeoutError:
            raise Terminal(f"box {self.box!r}: no answer from its guest within {timeout_s:g} s") from None
        finally:
            self._hello = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for kind, number, body in self._parser.feed(data):
            with contextlib.suppress(struct.error):  # a body of another length than its type has: a guest's lie
                self._handle(kind, number, body)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._closed.set()

    async def drained(self) -> None:
        """Wait until the machine has closed the connection: by then all that it had sent has been read."""
        if self._transport is not None:
            await self._closed.wait()

    async def detach(self) -> None:
        """Drop the connection; the streams wait for the next one."""
        if self._transport is not None:
            self._transport.abort()
            await self._closed.wait()

    def fail(self, error: SandboxError) -> None:
        """The machine is gone: everything that waits for it hears so."""
        self._gone = error
        if self._transport is not None:
            self._transport.abort()
        self._held = None
        for stream in list(self._streams.values()):
            stream.fail(error)
        self._streams.clear()
        if self._hello is not None and not self._hello[1].done():
            self._hello[1].set_exception(error)

    # Holding back: while a machine is captured nothing may be on its way to it

    async def quiesce(self, timeout_s: float) -> int | None:
        """Hold back what is sent, and wait until the guest has read what was.

        Returns how many programs run in it then, or None if it does not answer in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask_pong(1, hold=True)
        except TimeoutError:
            self._held = [] if self._held is None else self._held
            return None

    async def _ask_pong(self, flag: int, hold: bool = False) -> int:
        async with self._ping:
            # By its number: a late answer to an earlier one says nothing of what was sent since.
            number, self._next = self._next, self._next + 1
            answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._pong = number, answered
            self.send(Frame.PING, number, _U32.pack(flag))
            if hold:
                self._held = []
            return await answered

    def release(self) -> None:
        """Send what was held back."""
        for stream in self._streams.values():
            stream.heard = True  # the guest stood: its time to answer begins anew
        held, self._held = self._held, None
        for data in held or ():
            self._raw(data)

    def _raw(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def send(self, kind: Frame, number: int, body: bytes = b"") -> None:
        """Send a frame, or hold it back."""
        data = frame(kind, number, body)
        if self._held is not None:
            self._held.append(data)
        else:
            self._raw(data)

    # Answers

    def _handle(self, kind: int, number: int, body: bytes) -> None:
        if kind == Frame.HELLO:
            if self._hello is not None and body[4:] == self._hello[0] and not self._hello[1].done():
                self._hello[1].set_result(None)
            return
        if kind == Frame.PONG:
            if self._pong is not None and number == self._pong[0] and not self._pong[1].done():
                self._pong[1].set_result(_U32.unpack(body)[0])
            return
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.heard = True
        match kind:
            case Frame.STDOUT | Frame.DATA:
                stream.receive(1, body)
            case Frame.STDERR:
                stream.receive(2, body)
            case Frame.TAKEN:
                stream.room += _U32.unpack(body)[0]
                stream.has_room.set()
            case Frame.STARTED if not stream.started.done():
                stream.started.set_result(_U32.unpack(body)[0])
            case Frame.EXIT if not stream.ended.done():
                stream.ended.set_result(_I32.unpack(body)[0])
            case Frame.END:
                _end(stream, body)

    def forget(self, number: int) -> None:
        """No more answers of this stream are wanted."""
        self._streams.pop(number, None)

    def _number(self) -> int:
        if self._gone is not None:
            raise self._gone
        number, self._next = self._next, self._next + 1
        return number

    # Requests

    async def spawn(self, command: Command) -> GuestProcess:
        """Start a program; `GuestError` if it cannot be started."""
        argv = ["/bin/sh", "-c", command.argv] if isinstance(command.argv, str) else list(command.argv)
        stdin = command.stdin is not None or command.interactive or command.pty is not None
        cwd, user = command.cwd or "/", command.user or "root"
        body = spawn_body(argv, dict(command.env), cwd, user, stdin, command.pty)
        process = GuestProcess(self._number(), self, command)
        self._streams[process.number] = process
        self.send(Frame.SPAWN, process.number, body)
        try:
            async with asyncio.timeout(max(_ANSWER_S, command.timeout_s)):
                await asyncio.shield(process.started)
        except GuestError as error:
            self.forget(process.number)
            raise GuestError(f"{argv[0]}: {error} (cwd {cwd}, user {user})") from None
        except BaseException as error:
            # Nobody will know it: if it starts after all, it ends.
            self.send(Frame.DISCARD, process.number, _U32.pack(3))
            self.send(Frame.KILL, process.number, _U32.pack(9))
            self.forget(process.number)
            if isinstance(error, TimeoutError):
                raise GuestError(f"{argv[0]}: the guest did not start it within {command.timeout_s:g} s") from None
            raise
        process.begin()
        if command.stdin is not None:
            feeding = asyncio.create_task(_feed_all(process, command))
            process.ended.add_done_callback(lambda _: feeding.cancel())
        return process

    async def feed(self, stream: Stream, kind: Frame, data: bytes) -> None:
        """Send input to a stream as fast as it takes it."""
        view = memoryview(data)
        while view and not stream.ended.done():
            if stream.room <= 0:
                stream.has_room.clear()
                await stream.has_room.wait()
                continue
            piece = view[: min(stream.room, FRAME_MAX)]
            view = view[len(piece) :]
            stream.room -= len(piece)
            self.send(kind, stream.number, bytes(piece))

    async def read(self, path: str, limit: int) -> bytes:
        """A file's bytes; `GuestError` if it is not there, not a file, larger than `limit`, or the guest hangs."""
        stream = FileStream(self._number(), self, limit)
        self._streams[stream.number] = stream
        try:
            self.send(Frame.READ, stream.number, struct.pack("<Q", limit) + path.encode())
            code = await self._answered(stream, path, stream.ended)
        except BaseException:
            self.send(Frame.DISCARD, stream.number, _U32.pack(1))  # nobody reads on: the guest closes the file
            raise
        finally:
            self.forget(stream.number)
        if code:
            raise GuestError(f"{path}: {stream.error}" + (f" (at most {limit} bytes are read)" if code == 27 else ""))
        return bytes(stream.data)

    async def write(self, path: str, data: bytes, mode: int) -> None:
        """Write a file in one piece; the old one stays until the new one is whole."""
        stream = Stream(self._number(), self)
        self._streams[stream.number] = stream

        async def whole() -> int:
            self.send(Frame.WRITE, stream.number, _U32.pack(mode) + path.encode())
            await self.feed(stream, Frame.WRITE_DATA, data)
            self.send(Frame.WRITE_END, stream.number)
            return await stream.ended

        try:
            code = await self._answered(stream, path, whole())
        except BaseException:
            self.send(Frame.DISCARD, stream.number, _U32.pack(0))  # the guest removes what it has of the new file
            raise
        finally:
            self.forget(stream.number)
        if code:
            raise GuestError(f"{path}: {stream.error}")

    async def _answered(self, stream: Stream, path: str, work: Awaitable[int]) -> int:
        """The result of work on a file; `GuestError` if a guest that runs says nothing of it for a while."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=_ANSWER_S))[0]:
                if not stream.heard and self._held is None and self._transport is not None:
                    raise GuestError(f"{path}: the guest has not answered for {_ANSWER_S:g} s")
                stream.heard = False
            return task.result()
        finally:
            task.cancel()

    async def refresh(self, hostname: str, timeout_s: float) -> None:
        """The restore hook: time, entropy, machine id and host name of its own."""
        started = time.monotonic()
        await self._simple(Frame.REFRESH, _now() + secrets.token_bytes(48) + hostname.encode(), timeout_s)
        # The time that an answer takes on a busy host is the error of the clock: set it again until that is small.
        for _ in range(CLOCK_TRIES):
            if time.monotonic() - started < CLOCK_ERROR_S:
                return
            started = time.monotonic()
            await self._simple(Frame.REFRESH, _now(), timeout_s)

    async def address(self, address: str, gateway: str, timeout_s: float) -> None:
        """Give the guest's network device its address."""
        await self._simple(Frame.ADDRESS, f"{address}\0{gateway}\0".encode(), timeout_s)

    async def _simple(self, kind: Frame, body: bytes, timeout_s: float) -> None:
        stream = Stream(self._number(), self)
        self._streams[stream.number] = stream
        self.send(kind, stream.number, body)
        try:
            async with asyncio.timeout(timeout_s):
                code = await stream.ended
        except TimeoutError:
            raise Terminal(f"box {self.box!r}: no answer from its guest within {timeout_s:g} s") from None
        finally:
            self.forget(stream.number)
        if code:
            raise GuestError(f"{kind.name.lower()}: {stream.error}")

    async def programs(self, timeout_s: float) -> int:
        """How many programs run in the guest."""
        async with asyncio.timeout(timeout_s):
            return await self._ask_pong(1)


def _now() -> bytes:
    return struct.pack("<qq", *divmod(time.time_ns(), 10**9))


async def _feed_all(process: GuestProcess, command: Command) -> None:
    await process.write(command.stdin or b"")
    if not command.interactive:
        await process.close_stdin()


def _end(stream: Stream, body: bytes) -> None:
    stream.error = body[4:].decode(errors="replace")
    code = _U32.unpack_from(body)[0]
    if code and not stream.started.done():
        stream.started.set_exception(GuestError(stream.error))
        stream.started.exception()
    if not stream.ended.done():
        stream.ended.set_result(code)
    stream.has_room.set()  # nothing more is sent to it


__all__ = ["Agent"]
