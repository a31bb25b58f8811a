"""A streamed answer whose source is closed when its listener goes, at once and not when memory is next tidied."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import anyio
import anyio.lowlevel
from starlette.responses import StreamingResponse
from starlette.types import Send


class Stream(StreamingResponse):
    """Closes the generator that it is made from, however it ends."""

    def __init__(
        self, source: AsyncGenerator[bytes, None], media_type: str | None = None, status_code: int = 200
    ) -> None:
        super().__init__(_heard(source), status_code, media_type=media_type)
        self._source = source

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._source.aclose()


async def _heard(source: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async for data in source:
        # A source that never waits would not notice that its listener has gone.
        await anyio.lowlevel.checkpoint_if_cancelled()
        yield data


__all__ = ["Stream"]
