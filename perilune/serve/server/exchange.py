"""One HTTP request and its answers: who asks, whether there is room, what is logged, and the end if the client goes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from perilune.serve.server import wire
from perilune.serve.server.context import Context
from perilune.serve.server.errors import ApiError, openai_error
from perilune.serve.server.job import Job, Piece, merged
from perilune.serve.server.reply import Whole
from perilune.serve.server.tenants import Tenant

Body = TypeVar("Body", bound=BaseModel)
Numbered = AsyncGenerator[tuple[int, Piece], None]


async def read_body(request: Request, model: type[Body]) -> tuple[Context, Tenant, Body, int]:
    """Server, tenant, checked body and its size in bytes. Raises ApiError; a key is looked at before a body is read."""
    context: Context = request.app.state.context
    tenant = context.tenants.who(request)
    note(request, tenant=tenant.name)
    if context.draining:
        raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})
    config = context.config
    body, size = await wire.read(request, model, config.max_body_bytes, config.body_seconds)
    return context, tenant, body, size


def note(request: Request, **facts: object) -> None:
    """Put facts into the request's log line."""
    request.scope.setdefault("perilune.log", {}).update(facts)


class Exchange:
    """Jobs of one HTTP request, each with its index among the answers to its prompt."""

    def __init__(self, request: Request, context: Context, tenant: Tenant, jobs: list[tuple[Job, int]]) -> None:
        self.request, self.context, self.tenant, self.jobs = request, context, tenant, jobs

    async def whole(self) -> list[Whole]:
        """All answers, complete. Raises ApiError, or ClientDisconnect when the client goes before."""
        return await wire.until_gone(self.request, self._collect())

    async def stream(
        self,
        chunks: Callable[[Numbered], AsyncGenerator[bytes, None]],
        done: bytes = wire.DONE,
        failed: Callable[[ApiError], bytes] = lambda error: wire.event(openai_error(error.status, error.message)),
    ) -> wire.EventStream:
        """An event stream. What is refused at once raises ApiError here; what fails later is its last event."""
        pieces = self._pieces()
        first = await wire.until_gone(self.request, anext(pieces))

        async def numbered() -> Numbered:
            yield first
            async for each in pieces:
                yield each

        async def body() -> AsyncGenerator[bytes, None]:
            try:
                async with aclosing(chunks(numbered())) as sent:
                    async for chunk in sent:
                        yield chunk
            except ApiError as error:
                note(self.request, error=error.message, status=error.status)
                self.context.metrics.refuse(error.status)
                yield failed(error)
            yield done

        sent = body()

        async def close() -> None:
            await sent.aclose()
            await pieces.aclose()

        return wire.EventStream(sent, close)

    async def _collect(self) -> list[Whole]:
        wholes = [Whole() for _ in self.jobs]
        async with aclosing(self._pieces()) as pieces:
            async for place, piece in pieces:
                wholes[place].add(piece)
        return wholes

    async def _pieces(self) -> Numbered:
        tokens, cached = 0, dict[int, int]()  # of each prompt
        reasons: dict[int, str] = {}
        with self.context.tenants.running_for(self.tenant, len(self.jobs)):
            try:
                async with aclosing(merged(self.context, self.jobs)) as pieces:
                    async for place, piece in pieces:
                        tokens += len(piece.tokens)
                        prompt = id(self.jobs[place][0])
                        cached[prompt] = max(cached.get(prompt, 0), piece.cached)
                        if piece.finished is not None:
                            reasons[place] = piece.finished
                        yield place, piece
            finally:
                ends = ",".join(sorted(set(reasons.values()))) if len(reasons) == len(self.jobs) else "gone"
                read = sum(job.counted for job, index in self.jobs if index == 0)
                note(self.request, prompt=read, cached=sum(cached.values()), answer=tokens, finished=ends)


__all__ = ["Exchange", "note", "read_body"]
