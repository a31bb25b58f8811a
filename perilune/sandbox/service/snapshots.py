"""Snapshots over HTTP: taking them, forking, going back, listing, deleting."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response

from perilune.sandbox.errors import SandboxError
from perilune.sandbox.service import views
from perilune.sandbox.service.bodies import Fork, NewSnapshot, Rollback
from perilune.sandbox.service.context import Ctx, with_key
from perilune.sandbox.service.errors import Refused, body_of, refused
from perilune.sandbox.service.paging import PAGE, Limit, Token, page

router = APIRouter(dependencies=[Depends(with_key)], tags=["snapshots"])
Json = dict[str, Any]


@router.post("/sandboxes/{sandbox_id}/fork", status_code=201)
async def fork(ctx: Ctx, sandbox_id: str, body: Fork | None = None) -> list[Json]:
    """Copies of a running or paused sandbox, from one instant: each a sandbox with tokens of its own, or an error."""
    given = body or Fork()
    ctx.record(sandbox_id)
    results = await ctx.manager.fork(sandbox_id, given.count, given.label, given.barrier_id)
    answers = []
    for result in results:
        try:
            if isinstance(result, SandboxError):
                raise result
            if given.timeout is not None:
                ctx.manager.keep_alive(result.id, given.timeout)
            answers.append({"sandbox": views.created(ctx.manager, result, ctx.config.domain)})
        except SandboxError as error:  # also of one that has ended already: the others are told
            answers.append({"error": body_of(refused(error))})
    return answers


@router.post("/sandboxes/{sandbox_id}/snapshots", status_code=201)
async def checkpoint(ctx: Ctx, sandbox_id: str, body: NewSnapshot | None = None) -> Json:
    """Save it while it runs on."""
    given = body or NewSnapshot()
    if given.name and given.label and given.name != given.label:
        raise Refused(400, "invalid", f"label is {given.label!r}, name {given.name!r}; they are one", "label")
    ctx.record(sandbox_id)
    node = await ctx.manager.checkpoint(sandbox_id, given.label or given.name, given.barrier_id)
    return views.snapshot(node)


@router.post("/sandboxes/{sandbox_id}/rollback")
async def rollback(ctx: Ctx, sandbox_id: str, body: Rollback) -> Json:
    """Let it go on from any snapshot of its template."""
    ctx.record(sandbox_id)
    record = await ctx.manager.rollback(sandbox_id, body.snapshot_id)
    return views.detail(ctx.manager, record, ctx.config.domain)


@router.get("/snapshots")
async def snapshots(
    ctx: Ctx,
    response: Response,
    sandbox_id: Annotated[str | None, Query(alias="sandboxID")] = None,
    name: str | None = None,
    barrier: Annotated[str | None, Query(alias="barrierID")] = None,
    limit: Limit = PAGE,
    next_token: Token = None,
) -> list[Json]:
    """A page of snapshots, the oldest first."""
    found = [
        node
        for node in ctx.manager.snapshots(sandbox_id)
        if (name is None or node.label == name) and (barrier is None or node.barrier == barrier)
    ]
    return [views.snapshot(node) for node in page(response, found, lambda node: node.id, limit, next_token)]


@router.delete("/snapshots/{snapshot_id}", status_code=204)
@router.delete("/templates/{snapshot_id}", status_code=204)
async def delete_snapshot(ctx: Ctx, snapshot_id: str) -> None:
    """Delete a snapshot; layers go when nothing needs them."""
    await ctx.manager.delete_snapshot(snapshot_id)


__all__ = ["router"]
