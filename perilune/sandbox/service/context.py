"""What requests share: the manager, the programs that run, who may do what."""

from __future__ import annotations

import asyncio
import hmac
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from perilune.sandbox.errors import NotFound
from perilune.sandbox.manager import Manager
from perilune.sandbox.service.config import ServiceConfig
from perilune.sandbox.service.errors import Refused
from perilune.sandbox.service.programs import Programs
from perilune.sandbox.states import State
from perilune.sandbox.store import Record

# Answers of requests that were sent again are looked up among so many.
REMEMBERED = 1024


@dataclass
class Context:
    """Of one application. `manager` is there once it has started. draining: new requests are refused."""

    config: ServiceConfig
    programs: Programs = field(default_factory=Programs)
    draining: bool = False
    _manager: Manager | None = None
    _asked: OrderedDict[str, asyncio.Task[Any]] = field(default_factory=OrderedDict)

    @property
    def manager(self) -> Manager:
        if self._manager is None:
            raise Refused(503, "unavailable", "the service is starting")
        return self._manager

    def start(self, manager: Manager) -> None:
        self._manager = manager

    def record(self, box: str) -> Record:
        """A sandbox that is not over; `NotFound` says why it is."""
        record = self.manager.store.get(box)
        if record.state in (State.ENDED, State.KILLING):
            raise NotFound(f"sandbox {box!r} has ended" + (f": {record.reason}" if record.reason else ""))
        return record

    async def once(self, key: str | None, work: Callable[[], Awaitable[Any]]) -> Any:
        """Do it, or share what the request of the same key did or is doing. What failed is done again."""
        if key is None:
            return await work()
        task = self._asked.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.ensure_future(work())
            self._asked[key] = task
            while len(self._asked) > REMEMBERED:
                self._asked.popitem(last=False)
        return await asyncio.shield(task)


def context(request: Request) -> Context:
    """The context of a request's application."""
    found: Context = request.app.state.context
    return found


def has_key(config: ServiceConfig, request: Request) -> bool:
    """Whether a request shows an API key, or none is needed."""
    if not config.api_keys:
        return True
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    shown = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
    # All are compared, so that the time says nothing.
    return sum(hmac.compare_digest(shown.encode(), key.encode()) for key in config.api_keys) > 0


async def with_key(request: Request) -> None:
    """Requests for the service as a whole: an API key."""
    if not has_key(context(request).config, request):
        raise Refused(401, "unauthorized", "X-API-Key: a key of this service is needed", "X-API-Key")


async def with_access(request: Request) -> None:
    """Requests for one sandbox's inside: its own access token, or an API key."""
    ctx = context(request)
    token = request.headers.get("x-access-token")
    if token is not None and ctx.manager.check_token(request.path_params["sandbox_id"], "access", token):
        return
    if token is not None or not has_key(ctx.config, request):
        raise Refused(401, "unauthorized", "X-Access-Token: the token of this sandbox is needed", "X-Access-Token")


Ctx = Annotated[Context, Depends(context)]

__all__ = ["Context", "Ctx", "context", "has_key", "with_access", "with_key"]
