"""The Connect protocol in JSON, as much as E2B's guest daemon needs: single answers and streams of messages.

Source: the Connect protocol reference (connectrpc.com/docs/protocol). A stream's messages have a byte of flags and
their length before them; the last one (flag 2) says how it ended.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from perilune.sandbox.errors import SandboxError
from perilune.sandbox.service.errors import Refused, refused
from perilune.sandbox.service.streaming import Stream

_HEAD = struct.Struct(">BI")
_END = 2
MESSAGE_MAX = 4 << 20
STREAM = "application/connect+json"

_WORDS = {
    400: "invalid_argument",
    401: "unauthenticated",
    404: "not_found",
    409: "failed_precondition",
    413: "resource_exhausted",
    429: "resource_exhausted",
    501: "unimplemented",
    503: "unavailable",
    504: "deadline_exceeded",
}
_STATUS = {"failed_precondition": 400, "already_exists": 409}


def failure(error: Exception) -> dict[str, str]:
    """An error in Connect's words."""
    refusal = refused(error)
    word = "already_exists" if refusal.word == "already_exists" else _WORDS.get(refusal.status, "internal")
    return {"code": word, "message": str(refusal)}


def failed(error: Exception) -> Response:
    """The answer to a single request that failed."""
    said = failure(error)
    return JSONResponse(said, _STATUS.get(said["code"], refused(error).status))


def _message(fields: Mapping[str, Any], flags: int = 0) -> bytes:
    data = json.dumps(fields).encode()
    return _HEAD.pack(flags, len(data)) + data


async def messages(request: Request) -> AsyncIterator[dict[str, Any]]:
    """The messages of a request's body."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        while len(data) >= _HEAD.size:
            flags, length = _HEAD.unpack_from(data)
            if flags or length > MESSAGE_MAX:
                raise Refused(400, "invalid", f"a message has flags {flags} and {length} bytes; none and {MESSAGE_MAX}")
            if len(data) < _HEAD.size + length:
                break
            yield fields_of(bytes(data[_HEAD.size : _HEAD.size + length]))
            del data[: _HEAD.size + length]


def fields_of(data: bytes) -> dict[str, Any]:
    """A message's fields."""
    try:
        fields = json.loads(data or b"{}")
    except ValueError as error:
        raise Refused(400, "invalid", f"the message is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refused(400, "invalid", "the message must be a JSON object")
    return fields


def stream(events: AsyncGenerator[Mapping[str, Any], None]) -> Stream:
    """A stream of messages; an error of the events is its end."""

    async def body() -> AsyncGenerator[bytes, None]:
        end: dict[str, Any] = {}
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    yield _message(event)
        except (SandboxError, Refused, ValueError) as error:
            end = {"error": failure(error)}
        yield _message(end, _END)

    return Stream(body(), STREAM)


__all__ = ["MESSAGE_MAX", "STREAM", "failed", "failure", "fields_of", "messages", "stream"]
