"""What a client gets when it gets no answer: OpenAI's error object, or Anthropic's on the paths that speak that."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from perilune.errors import Error
from perilune.serve.errors import EngineError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Errors of the inner rooms begin with the field they are about.
_FIELD = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[[\w-]+\])*(?=[ :])")
_LONGEST = 1000  # characters of a message
# The engine's names of fields.
_RENAMED = {"stop_ids": "stop_token_ids", "tokens": "prompt"}


class ApiError(Exception):
    """An answer with an HTTP status. param: the field of the request that is wrong, by its path."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        if len(message) > _LONGEST:  # it may hold what the client sent
            message = f"{message[: _LONGEST - 3]}..."
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, dict(headers or {})


def refusal(error: Error, renamed: Mapping[str, str] | None = None) -> ApiError:
    """What an inner room says, as a 400 that names the field. renamed: its name of a field -> the request's.

    What an engine says of itself is a 503, or a 500 where it has failed.
    """
    message = str(error)
    if isinstance(error, EngineError):
        if error.kind == "failed":
            return ApiError(500, message)
        return ApiError(503, message, headers={"Retry-After": "5"})
    found = _FIELD.match(message)
    param = found.group() if found else None
    for inner, outer in (*(renamed or {}).items(), *_RENAMED.items()):
        if param is not None and (param == inner or param.startswith((f"{inner}.", f"{inner}["))):
            message, param = outer + message[len(inner) :], outer + param[len(inner) :]
            break
    return ApiError(400, message, param)


def openai_error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """{"error": {...}} as the OpenAI clients read it."""
    kind = _KINDS.get(status, "internal_server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """{"type": "error", ...} as the Anthropic clients read it."""
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


__all__ = ["ApiError", "anthropic_error", "openai_error", "refusal"]
