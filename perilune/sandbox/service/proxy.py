"""Ports of a guest over HTTP: each request through a stream of the agent, so that no guest needs a network for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import h11
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from perilune.sandbox.driver import Command, Output, Process
from perilune.sandbox.errors import SandboxError
from perilune.sandbox.service.context import Context, has_key
from perilune.sandbox.service.errors import Refused
from perilune.sandbox.service.guest import start
from perilune.sandbox.service.streaming import Stream

Headers = list[tuple[bytes, bytes]]
ANSWER_S = 60.0
# netcat where there is one (busybox, most images), else Python.
_RELAY = """
import os, socket, sys, threading
s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
def up():
    while data := os.read(0, 65536):
        s.sendall(data)
    s.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while data := s.recv(65536):
    while data:
        data = data[os.write(1, data):]
"""
_TUNNEL = 'if command -v nc > /dev/null; then exec nc 127.0.0.1 "$1"; else exec python3 -c "$2" "$1"; fi'
_ROUTING = {b"e2b-sandbox-id", b"e2b-sandbox-port", b"e2b-traffic-access-token", b"x-access-token", b"x-api-key"}
_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host"}


def tunnel(port: int) -> Command:
    """The program in the guest that joins its stdin and stdout to a port."""
    return Command(["/bin/sh", "-c", _TUNNEL, "tunnel", str(port), _RELAY], user="root", interactive=True, detach=True)


async def answer(ctx: Context, box: str, port: int, request: Request) -> Response:
    """Pass one request on to a port of a guest, and its answer back."""
    token = request.headers.get("e2b-traffic-access-token")
    if not (ctx.manager.check_token(box, "traffic", token) if token is not None else has_key(ctx.config, request)):
        name = "e2b-traffic-access-token"
        raise Refused(401, "unauthorized", f"{name}: the traffic token of this sandbox is needed", name)
    ctx.record(box)
    process = await start(ctx, box, tunnel(port))
    conversation = _Conversation(process)
    try:
        sending = asyncio.create_task(conversation.send(request, port))
        try:
            async with asyncio.timeout(ANSWER_S):
                head = await conversation.head()
        except TimeoutError:
            message = f"port {port} of sandbox {box!r} did not answer within {ANSWER_S:g} s"
            raise Refused(504, "no_answer", message) from None
        except (h11.RemoteProtocolError, SandboxError) as error:
            message = f"The sandbox is running but port is not open: nothing answers at {port} ({error})"
            raise Refused(502, "port_closed", message) from None
    except BaseException:
        sending.cancel()
        await conversation.close()
        raise

    async def closed() -> None:
        sending.cancel()
        await conversation.close()

    answered = Stream(conversation.body(), status_code=head.status_code, closed=closed)
    answered.raw_headers = forwarded(list(head.headers))
    return answered


def forwarded(headers: Headers) -> Headers:
    """The headers that are for the other end: without those of one connection, and those that `Connection` names
    (RFC 9110, 7.6.1), and without a length where the body says its own (RFC 9112, 6.3)."""
    lower = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in lower if name == b"connection" for part in value.split(b",")}
    if any(name == b"transfer-encoding" for name, _ in lower):
        named.add(b"content-length")
    return [(name, value) for name, value in lower if name not in _HOP | named]


class _Conversation:
    """One request and its answer over a program's streams."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._http = h11.Connection(h11.CLIENT)
        self._pieces: AsyncIterator[Output] = process.output()

    async def send(self, request: Request, port: int) -> None:
        """Pass the request on; if that cannot be done, the end of the conversation is the answer."""
        try:
            await self._send(request, port)
        except (h11.LocalProtocolError, ClientDisconnect, SandboxError):
            await self.close()

    async def _send(self, request: Request, port: int) -> None:
        headers = [(name, value) for name, value in forwarded(request.headers.raw) if name not in _ROUTING]
        if b"transfer-encoding" in {name for name, _ in request.headers.raw}:
            headers.append((b"transfer-encoding", b"chunked"))
        query = request.scope["query_string"]
        target = request.scope["raw_path"] + (b"?" + query if query else b"")
        headers += [(b"host", f"localhost:{port}".encode()), (b"connection", b"close")]
        await self._write(h11.Request(method=request.method, target=target, headers=headers))
        async for data in request.stream():
            if data:
                await self._write(h11.Data(data=data))
        await self._write(h11.EndOfMessage())

    async def _write(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            await self._process.write(data)

    async def _next(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event  # type: ignore[return-value]
            piece = await anext(self._pieces, None)
            if piece is None:
                self._http.receive_data(b"")
            elif piece.stream == 1:
                self._http.receive_data(piece.data)

    async def head(self) -> h11.Response:
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                return event
            if isinstance(event, h11.ConnectionClosed):
                raise h11.RemoteProtocolError("connection refused")

    async def body(self) -> AsyncGenerator[bytes, None]:
        while True:
            event = await self._next()
            if not isinstance(event, h11.Data):
                return
            yield bytes(event.data)

    async def close(self) -> None:
        with contextlib.suppress(SandboxError):
            await self._process.kill()


__all__ = ["ANSWER_S", "answer", "forwarded", "tunnel"]
