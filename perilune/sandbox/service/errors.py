"""Errors as answers: one JSON object with the status, a word for programs, a sentence for people, and the field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from perilune.sandbox.errors import (
    BadSnapshot,
    Conflict,
    Exhausted,
    GuestError,
    NotFound,
    Recoverable,
    SandboxError,
    Terminal,
    Unavailable,
)


class Refused(Exception):  # noqa: N818 - it says what holds
    """A request that is answered with this status; `param` is the path of the field that is wrong."""

    def __init__(self, status: int, word: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.word = word
        self.param = param


# The first class that fits counts.
_STATUS: tuple[tuple[type[Exception], int, str], ...] = (
    (NotFound, 404, "not_found"),
    (Conflict, 409, "conflict"),
    (BadSnapshot, 409, "bad_snapshot"),
    (Exhausted, 429, "exhausted"),
    (Unavailable, 503, "unavailable"),
    (Recoverable, 503, "recoverable"),  # nothing has changed: it may be tried again
    (GuestError, 400, "guest_error"),
    (Terminal, 500, "terminal"),
    (SandboxError, 500, "sandbox_error"),
    (ValueError, 400, "invalid"),
)
RETRY_AFTER_S = 1
_TOO_LARGE = re.compile(r"at most \d+ (bytes )?(bytes )?are read|File too large")


def refused(error: Exception) -> Refused:
    """Any error of the SDK as an answer."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, HTTPException):
        return Refused(error.status_code, "too_large" if error.status_code == 413 else "http", str(error.detail))
    message = str(error) or type(error).__name__
    if isinstance(error, GuestError):
        if "No such file or directory" in message:
            return Refused(404, "not_found", message)
        if _TOO_LARGE.search(message):
            return Refused(413, "too_large", message)
    for kind, status, word in _STATUS:
        if isinstance(error, kind):
            return Refused(status, word, message, _field(message) if status == 400 else None)
    raise error


def _field(message: str) -> str | None:
    """Our own messages begin with the field's name: "count is 0; it must be ..."."""
    found = re.match(r"([a-z_.]+) (is|has) ", message)
    return found[1] if found else None


def body_of(refusal: Refused) -> dict[str, Any]:
    """The JSON of an error."""
    fields = {"code": refusal.status, "error_code": refusal.word, "message": str(refusal)}
    return fields | ({"param": refusal.param} if refusal.param else {})


def response(error: Exception) -> JSONResponse:
    """An error's whole answer."""
    refusal = refused(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if refusal.status in (429, 503) else {}
    if refusal.status == 413:
        headers["Connection"] = "close"  # nobody reads the rest
    return JSONResponse(body_of(refusal), refusal.status, headers)


def _path(place: Sequence[Any]) -> str:
    return ".".join(str(part) for part in place if part not in ("body", "query", "path", "header"))


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = _path(first["loc"]) or None
    given = "" if "input" not in first or isinstance(first["input"], dict) else f" (it is {first['input']!r:.80})"
    return response(Refused(400, "invalid", f"{param or 'body'}: {first['msg']}{given}", param))


async def _http(request: Request, error: Exception) -> JSONResponse:
    return response(error)


async def _known(request: Request, error: Exception) -> JSONResponse:
    return response(error)


async def _unknown(request: Request, error: Exception) -> JSONResponse:
    return response(Refused(500, "internal", f"unexpected {type(error).__name__}; the service's log has the rest"))


def install(app: FastAPI) -> None:
    """Let an application answer errors in this way."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    for kind in (Refused, SandboxError, ValueError):
        app.add_exception_handler(kind, _known)
    app.add_exception_handler(Exception, _unknown)


__all__ = ["Refused", "body_of", "install", "refused", "response"]
