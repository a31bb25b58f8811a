"""The page's addresses: its files, and the picture of the cache once or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

GetPicture = Callable[[Request], Awaitable[dict[str, Any]]]

KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Everything from this server, nothing inline: text of a model can never become a script.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
PERIOD = 0.25  # seconds between two looks at the engine
HEARTBEAT = 10.0  # a picture is sent again after so long without a change, so that ages stay true
LIFE = 30.0  # a stream ends by itself and the page asks again: a server that stops waits for it no longer


def routes(get_picture: GetPicture, life: float = LIFE) -> APIRouter:
    """GET /ui/, its files, /ui/state and /ui/events. The files hold no data and are served to everybody.

    get_picture: checks the caller's key (raising what the server answers to a wrong one) and gives `Watch.picture`.
    life: seconds after which a stream of events ends.
    """
    router = APIRouter(prefix="/ui", include_in_schema=False)

    @router.get("")
    async def enter() -> Response:
        return RedirectResponse("/ui/")

    for file in files(__package__).iterdir():
        kind = KINDS.get(PurePath(file.name).suffix)
        path = "/" if file.name == "index.html" else f"/{file.name}"
        if kind is not None:
            router.add_api_route(path, _constant(file.read_bytes(), kind), methods=["GET"])

    @router.get("/state")
    async def state(request: Request) -> Response:
        return JSONResponse(await get_picture(request), headers={"Cache-Control": "no-store"})

    @router.get("/events")
    async def events(request: Request) -> Response:
        first = await get_picture(request)  # before the answer begins: a wrong key is a 401
        stream = _events(first, lambda: get_picture(request), life)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    return router


def _constant(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return send


async def _events(
    picture: dict[str, Any], look: Callable[[], Awaitable[dict[str, Any]]], life: float
) -> AsyncIterator[str]:
    """A picture at once, then each one that differs in more than the time; ends after `life`, or with the engine."""
    end, sent, known = time.monotonic() + life, -HEARTBEAT, ""
    while time.monotonic() < end:
        content = json.dumps({key: value for key, value in picture.items() if key != "now"})
        if content != known or time.monotonic() - sent >= HEARTBEAT:
            known, sent = content, time.monotonic()
            yield f"event: picture\ndata: {json.dumps(picture)}\n\n"
        await asyncio.sleep(PERIOD)
        try:
            picture = await look()
        except Exception:  # the engine is gone, or the key no longer holds: the next request for a stream is told why
            return


__all__ = ["routes"]
