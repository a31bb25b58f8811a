"""What happens when a capture fails half-way: the guest runs again, or it is torn down; never anything between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from perilune.sandbox.driver import Capture
from perilune.sandbox.errors import Recoverable, Terminal


async def captured(
    body: Callable[[], Awaitable[Capture]],
    go_on: Callable[[], Awaitable[None]],
    tear_down: Callable[[], Awaitable[None]],
) -> Capture:
    """Run `body`; after an error let the guest go on and raise `Recoverable`, or tear it down and raise `Terminal`.

    go_on: makes the guest run again, whatever step was reached. A cancelled call is handled alike and stays cancelled.
    """
    try:
        return await body()
    except Terminal:
        await tear_down()
        raise
    except BaseException as error:
        second = await asyncio.shield(_undo(go_on, tear_down))
        if not isinstance(error, Exception):
            raise
        if second is not None:
            raise Terminal(f"the capture failed ({error}) and the guest could not go on ({second})") from error
        raise Recoverable(f"the capture failed, the guest runs again: {error}") from error


async def _undo(go_on: Callable[[], Awaitable[None]], tear_down: Callable[[], Awaitable[None]]) -> Exception | None:
    try:
        await go_on()
    except Exception as error:
        await tear_down()
        return error
    return None


__all__ = ["captured"]
