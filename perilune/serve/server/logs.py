"""One line of JSON a request, with an id that the client gave or gets: the outermost layer of the server."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.serve.server.tracing import describe

logger = logging.getLogger("perilune.server")
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Lines(logging.Formatter):
    """Records as JSON objects: time, level, what, and the facts of the record."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "what": record.getMessage(),
        }
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Requests:
    """Names every request, times it, and writes its line. Quiet paths are those that machines ask all the time."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _ID.fullmatch(given) else uuid4().hex
        facts: dict[str, Any] = scope.setdefault("perilune.log", {})
        facts |= {"id": name, "method": scope["method"], "path": scope["path"][:200]}
        begin, status = time.monotonic(), 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            elif message.get("body") and "first" not in facts:
                facts["first"] = round(time.monotonic() - begin, 4)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                describe(facts)  # with this message the span ends
            await send(message)

        try:
            await self.app(scope, receive, named)
        finally:
            facts.setdefault("status", status)
            facts["seconds"] = round(time.monotonic() - begin, 4)
            quiet = status == 200 and scope["method"] == "GET"
            logger.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"facts": facts})


def to_stderr(level: int = logging.INFO) -> None:
    """Write the server's lines to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


__all__ = ["Lines", "Requests", "logger", "to_stderr"]
