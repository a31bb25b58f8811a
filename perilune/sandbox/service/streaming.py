"""A streamed answer whose source is closed when its listener goes, at once and not when memory is next tidied."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

import anyio
import anyio.lowlevel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


async def _nothing() -> None: ...


class Stream(StreamingResponse):
    """Closes the generator that it is made from, however it ends; then calls `closed`.

    A generator whose listener had gone before its first piece has not begun, and does nothing when it is closed: what
    must be done in any case belongs in `closed`.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        media_type: str | None = None,
        status_code: int = 200,
        closed: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        super().__init__(_heard(source), status_code, media_type=media_type)
        self._source = source
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._source.aclose()
                await self._closed()


async def _heard(source: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async for data in source:
        # A source that never waits would not notice that its listener has gone.
        await anyio.lowlevel.checkpoint_if_cancelled()
        yield data


__all__ = ["Stream"]
