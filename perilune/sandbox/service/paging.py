"""Lists in pages: a token names the last item that was seen."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import Query, Response

from perilune.sandbox.service.errors import Refused

T = TypeVar("T")
PAGE = 100
Limit = Annotated[int, Query(ge=1, le=PAGE)]
Token = Annotated[str | None, Query(alias="nextToken")]


def page(response: Response, items: list[T], name: Callable[[T], str], limit: int, token: str | None) -> list[T]:
    """The page after `token`; the header X-Next-Token leads to the next one."""
    start = 0
    if token is not None:
        try:
            last = base64.urlsafe_b64decode(token.encode()).decode()
        except (binascii.Error, ValueError):
            last = ""
        places = [place for place, item in enumerate(items) if name(item) == last]
        if not places:
            raise Refused(400, "invalid", f"nextToken is {token!r}; it is of no page, or its item is gone", "nextToken")
        start = places[0] + 1
    found = items[start : start + limit]
    if start + limit < len(items):
        response.headers["X-Next-Token"] = base64.urlsafe_b64encode(name(found[-1]).encode()).decode()
    return found


__all__ = ["PAGE", "Limit", "Token", "page"]
