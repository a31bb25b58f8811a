"""Which requests are for the service and which for the inside of a sandbox; limits and counts for all of them."""

from __future__ import annotations

import re
import time

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.sandbox.service import envd, proxy
from perilune.sandbox.service.context import Context
from perilune.sandbox.service.errors import Refused, response
from perilune.sandbox.service.metrics import Metrics

_HOST = re.compile(r"([0-9]{1,5})-([0-9a-z-]+)\.(.+)")
# Bodies that are files; all others are small.
_FILES = ("/files", "/folder")


def destination(request: Request, domain: str) -> tuple[str, int] | None:
    """The sandbox and port that a request is for, by E2B's headers or the host's name; None for the service."""
    box = request.headers.get("e2b-sandbox-id")
    port = request.headers.get("e2b-sandbox-port")
    if box is None:
        host = request.headers.get("host", "").rsplit(":", 1)[0].lower()
        found = _HOST.fullmatch(host)
        if found is None or found[3] != domain.lower():
            return None
        port, box = found[1], found[2]
    if port is None or not port.isdigit() or not 0 < int(port) < 65536:
        raise Refused(400, "invalid", f"E2b-Sandbox-Port is {port!r}; it must be a port", "E2b-Sandbox-Port")
    return box, int(port)


class Route:
    """An ASGI application around the service's own."""

    def __init__(self, app: FastAPI, ctx: Context, metrics: Metrics) -> None:
        self._app: ASGIApp = app
        self._ctx = ctx
        self._metrics = metrics
        self.state = app.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # the lifespan; web sockets find no route
            return
        started = time.perf_counter()
        status = 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope, receive, counted)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", None) or scope.get("perilune.route", "none")
            self._metrics.answered(scope["method"], path, status, time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            if self._ctx.draining:
                raise Refused(503, "unavailable", "the service is stopping")
            inside = destination(request, self._ctx.config.domain)
            if inside is None:
                await self._app(scope, _bounded(receive, self._limit(scope)), send)
                return
            box, port = inside
            scope["perilune.route"] = "daemon" if port == envd.PORT else "port"
            if port == envd.PORT:
                bounded = Request(scope, _bounded(receive, self._ctx.config.max_file + self._ctx.config.max_body))
                answer = await envd.answer(self._ctx, box, bounded)
            else:
                answer = await proxy.answer(self._ctx, box, port, request)
        except Exception as error:
            answer = response(error)
        await answer(scope, receive, send)

    def _limit(self, scope: Scope) -> int:
        file = scope["method"] == "PUT" and scope["path"].endswith(_FILES)
        return self._ctx.config.max_file if file else self._ctx.config.max_body


def _bounded(receive: Receive, limit: int) -> Receive:
    """Bodies that are too large end as soon as they are."""
    taken = 0

    async def bounded() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > limit:
            raise HTTPException(413, f"the body has more than {limit} bytes")
        return message

    return bounded


__all__ = ["Route", "destination"]
