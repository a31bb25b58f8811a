"""The life of sandboxes over HTTP, with E2B's paths and status codes."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote

from fastapi import APIRouter, Depends, Header, Query, Response

from perilune.sandbox.driver import Network
from perilune.sandbox.errors import Conflict, NotFound
from perilune.sandbox.options import Options
from perilune.sandbox.service import views
from perilune.sandbox.service.bodies import (
    Connect,
    NetworkUpdate,
    NewSandbox,
    Pause,
    Refresh,
    Timeout,
)
from perilune.sandbox.service.context import Context, Ctx, with_key
from perilune.sandbox.service.errors import Refused
from perilune.sandbox.service.paging import PAGE, Limit, Token, page
from perilune.sandbox.states import State
from perilune.sandbox.store import Record

router = APIRouter(dependencies=[Depends(with_key)])

Json = dict[str, Any]
Key = Annotated[str | None, Header()]


@router.post("/sandboxes", status_code=201, tags=["sandboxes"])
async def create(ctx: Ctx, body: NewSandbox, idempotency_key: Key = None) -> Json:
    """A new sandbox that runs and answers."""
    return await _create_once(ctx, body, 15.0, idempotency_key)


@router.post("/v2/sandboxes", status_code=201, tags=["sandboxes"])
async def create_v2(ctx: Ctx, body: NewSandbox, idempotency_key: Key = None) -> Json:
    """The same, with a longer life where none is given."""
    return await _create_once(ctx, body, 300.0, idempotency_key)


async def _create_once(ctx: Context, body: NewSandbox, timeout_s: float, key: str | None) -> Json:
    async def work() -> Json:
        record = await _create(ctx, body, timeout_s)
        return views.created(ctx.manager, record, ctx.config.domain)

    answer: Json = await ctx.once(key, work)
    return answer


async def _create(ctx: Context, body: NewSandbox, timeout_s: float) -> Record:
    manager = ctx.manager
    network = (body.network or NetworkUpdate()).network(body.allow_internet_access)
    template, snapshot = body.template_id, None
    if template not in {one.name for one in manager.machines.assets.templates()}:
        try:
            template, snapshot = "", manager.store.snapshot(body.template_id).id
        except NotFound:
            manager.machines.assets.template(body.template_id)  # says which there are
    for name in ("memory_mb", "disk_size_mb"):
        if snapshot is not None and getattr(body, name) is not None:
            raise Refused(400, "invalid", f"{name}: a sandbox from a snapshot has that snapshot's machine", name)
    record = await manager.create(
        Options(
            template=template,
            snapshot=snapshot,
            memory_mib=body.memory_mb,
            disk_mib=body.disk_size_mb,
            timeout_s=body.timeout or timeout_s,
            on_timeout="pause" if body.auto_pause else "kill",
            idle_s=body.idle,
            owner=body.owner,
            metadata=body.metadata,
            env=body.env_vars,
            network=network,
        )
    )
    if body.resumes():
        record = manager.store.get(record.id)
        record = manager.store.move(record, record.state, spec={**record.spec, "auto_resume": True})
    return record


@router.get("/sandboxes", tags=["sandboxes"])
async def list_all(ctx: Ctx, metadata: str = "", owner: str | None = None) -> list[Json]:
    """Sandboxes that run, the newest first. metadata: `key=value&key=value`, all of which must be so."""
    return views.listed(ctx.manager, _select(ctx, metadata, owner, "running"))


@router.get("/v2/sandboxes", tags=["sandboxes"])
async def listpage(
    ctx: Ctx,
    response: Response,
    metadata: str = "",
    owner: str | None = None,
    state: str = "running,paused",
    template: str | None = None,
    started_after: Annotated[str | None, Query(alias="startedAfter")] = None,
    order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
    limit: Limit = PAGE,
    next_token: Token = None,
) -> list[Json]:
    """A page of sandboxes; the header X-Next-Token leads to the next one."""
    found = _select(ctx, metadata, owner, state)
    found = [record for record in found if template is None or record.template == template]
    found = [record for record in found if started_after is None or views.when(record.created) > _moment(started_after)]
    if order == "asc":
        found.reverse()
    records = page(response, found, lambda record: record.id, limit, next_token)
    return views.listed(ctx.manager, records)


def _moment(text: str) -> str:
    try:
        return datetime.fromisoformat(text.replace(" ", "+")).astimezone(UTC).isoformat()
    except ValueError:
        message = f"startedAfter is {text!r}; it must be a date and time of ISO 8601"
        raise Refused(400, "invalid", message, "startedAfter") from None


def _select(ctx: Context, metadata: str, owner: str | None, states: str) -> list[Record]:
    wanted = set(states.split(","))
    if not wanted <= {"running", "paused"}:
        raise Refused(400, "invalid", f"state is {states!r}; it must be of 'running' and 'paused'", "state")
    try:
        # E2B's clients quote names and values a second time.
        labels = {unquote(name): unquote(value) for name, value in parse_qsl(metadata, True, True)}
    except ValueError:
        raise Refused(400, "invalid", f"metadata is {metadata!r}; it must be key=value&...", "metadata") from None
    return [
        record
        for record in ctx.manager.store.boxes()
        if record.state not in (State.ENDED, State.KILLING)
        and record.owner != "golden"
        and views.public_state(ctx.manager, record) in wanted
        and (owner is None or record.owner == owner)
        and all(record.metadata.get(name) == value for name, value in labels.items())
    ]


@router.get("/sandboxes/{sandbox_id}", tags=["sandboxes"])
async def get(ctx: Ctx, sandbox_id: str) -> Json:
    """All that is known of a sandbox."""
    return views.detail(ctx.manager, ctx.record(sandbox_id), ctx.config.domain)


@router.delete("/sandboxes/{sandbox_id}", status_code=204, tags=["sandboxes"])
async def kill(ctx: Ctx, sandbox_id: str) -> None:
    """End it for good, in whatever state it is; its snapshots stay."""
    ctx.manager.store.get(sandbox_id)
    await ctx.manager.kill(sandbox_id)


@router.post("/sandboxes/{sandbox_id}/pause", status_code=204, tags=["sandboxes"])
async def pause(ctx: Ctx, sandbox_id: str, body: Pause | None = None) -> None:
    """Save it and free its processor and memory. Two at once share one pause; one that is paused is a conflict."""
    if ctx.record(sandbox_id).state is State.PAUSED:
        raise Conflict(f"sandbox {sandbox_id!r} is paused already")
    await ctx.manager.pause(sandbox_id)


@router.post("/sandboxes/{sandbox_id}/resume", status_code=201, tags=["sandboxes"])
async def resume(ctx: Ctx, sandbox_id: str, body: Connect | None = None) -> Json:
    """Let it go on. One that runs is a conflict: `connect` takes both."""
    if ctx.record(sandbox_id).state is State.RUNNING:
        raise Conflict(f"sandbox {sandbox_id!r} runs already")
    return await _go_on(ctx, sandbox_id, body)


@router.post("/sandboxes/{sandbox_id}/connect", tags=["sandboxes"])
@router.post("/v2/sandboxes/{sandbox_id}/connect", tags=["sandboxes"])
async def connect(ctx: Ctx, sandbox_id: str, response: Response, body: Connect | None = None) -> Json:
    """A sandbox that runs (200), or one that was paused and has been resumed (201)."""
    if views.public_state(ctx.manager, ctx.record(sandbox_id)) == "paused":
        response.status_code = 201
    return await _go_on(ctx, sandbox_id, body)


async def _go_on(ctx: Context, box: str, body: Connect | None) -> Json:
    before = ctx.record(box)
    record = before
    if before.state not in (State.RUNNING, State.SNAPSHOTTING):
        record = await ctx.manager.resume(box)
    if body is not None and body.timeout is not None:
        # One that ran already keeps its longer time.
        longer = before.expires is not None and before.expires > time.time() + body.timeout
        if before.state is not State.RUNNING or not longer:
            record = ctx.manager.keep_alive(box, body.timeout)
    return views.created(ctx.manager, record, ctx.config.domain)


@router.post("/sandboxes/{sandbox_id}/timeout", status_code=204, tags=["sandboxes"])
async def timeout(ctx: Ctx, sandbox_id: str, body: Timeout) -> None:
    """Let it live so many seconds from now on."""
    ctx.record(sandbox_id)
    ctx.manager.keep_alive(sandbox_id, body.timeout)


@router.post("/sandboxes/{sandbox_id}/refreshes", status_code=204, tags=["sandboxes"])
async def refresh(ctx: Ctx, sandbox_id: str, body: Refresh | None = None) -> None:
    """A sign of life: it lives at least so many seconds from now on."""
    duration = (body or Refresh()).duration
    expires = ctx.record(sandbox_id).expires
    if expires is not None and expires < time.time() + duration:
        ctx.manager.keep_alive(sandbox_id, duration)


@router.put("/sandboxes/{sandbox_id}/network", status_code=204, tags=["sandboxes"])
async def set_network(ctx: Ctx, sandbox_id: str, body: NetworkUpdate) -> None:
    """Replace what it may reach, in one step."""
    ctx.record(sandbox_id)
    network: Network = body.network()
    await ctx.manager.set_network(sandbox_id, network)


@router.get("/templates", tags=["service"])
async def templates(ctx: Ctx) -> list[Json]:
    """What sandboxes can be made from."""
    return [
        {
            "templateID": one.name,
            "aliases": [one.name],
            "buildID": one.digest,
            "cpuCount": 1,
            "memoryMB": one.memory_mib,
            "diskSizeMB": one.disk_mib,
            "public": False,
        }
        for one in ctx.manager.machines.assets.templates()
    ]


__all__ = ["router"]
