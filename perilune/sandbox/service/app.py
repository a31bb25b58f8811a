"""The application: opens a manager when it starts, and leaves its sandboxes in a stated state when it stops."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from perilune import __version__
from perilune.sandbox.errors import SandboxError
from perilune.sandbox.manager import Manager
from perilune.sandbox.service import errors, guest, sandboxes, snapshots, views
from perilune.sandbox.service.config import ServiceConfig
from perilune.sandbox.service.context import Context, Ctx, with_key
from perilune.sandbox.service.metrics import Metrics
from perilune.sandbox.service.route import Route
from perilune.sandbox.states import State
from perilune.sandbox.store import Record

logger = logging.getLogger("perilune.sandbox")
# Captures that are written at once when a service stops.
PAUSING = 4

DESCRIPTION = """Sandboxes that checkpoint in milliseconds, pause, resume and fork. Paths and status codes are E2B's
where E2B has them. `X-API-Key` opens everything, `X-Access-Token` the inside of one sandbox."""


def build_app(config: ServiceConfig, open_manager: Callable[[], Awaitable[Manager]]) -> Route:
    """An ASGI application. open_manager: called in its event loop when it starts; it is closed when it stops."""
    ctx = Context(config)
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        manager = await open_manager()
        metrics.watch(manager)
        ctx.start(manager)
        try:
            yield
        finally:
            await _stop(ctx, manager)

    app = FastAPI(title="Perilune sandboxes", version=__version__, description=DESCRIPTION, lifespan=lifespan)
    app.state.context = ctx
    errors.install(app)
    app.include_router(sandboxes.router)
    app.include_router(snapshots.router)
    app.include_router(guest.router)

    @app.get("/health", tags=["service"])
    async def health() -> dict[str, str]:
        """Whether it answers; asks for no key."""
        ctx.manager.store.count()
        return {"status": "ok", "version": __version__}

    @app.get("/metrics", tags=["service"], response_class=Response)
    async def read_metrics() -> Response:
        """Prometheus; asks for no key."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/top", tags=["service"], dependencies=[Depends(with_key)])
    async def top(ctx: Ctx) -> list[dict[str, Any]]:
        """What every sandbox costs now, in bytes and seconds."""
        records = [one for one in ctx.manager.store.boxes() if one.state is not State.ENDED and one.owner != "golden"]
        return list(await asyncio.gather(*(_cost(ctx.manager, record) for record in records)))

    @app.get("/sandboxes/{sandbox_id}/metrics", tags=["sandboxes"], dependencies=[Depends(with_key)])
    async def box_metrics(ctx: Ctx, sandbox_id: str) -> list[dict[str, Any]]:
        """What it costs now, as a list of one."""
        row = await _cost(ctx.manager, ctx.record(sandbox_id))
        (listed,) = views.listed(ctx.manager, [ctx.record(sandbox_id)])
        now = time.time()
        return [
            {
                "timestamp": views.when(now),
                "timestampUnix": int(now),
                "cpuCount": 1,
                "cpuUsedPct": 0.0 if row["phase"] != "running" else 100 * row["cpuSeconds"] / max(row["age"], 1e-9),
                "memUsed": row["private"] + row["shared"],
                "memTotal": listed["memoryMB"] << 20,
                "memCache": row["shared"],
                "diskUsed": row["disk"],
                "diskTotal": listed["diskSizeMB"] << 20,
            }
        ]

    return Route(app, ctx, metrics)


async def _cost(manager: Manager, record: Record) -> dict[str, Any]:
    """One row of `top`."""
    try:
        stats = await manager.stats(record.id)
    except (SandboxError, OSError):  # it has just ended, or is on its way
        stats = None
    numbers = ("pss", "private", "shared", "dirty", "disk")
    return {
        "sandboxID": record.id,
        "templateID": record.template,
        "owner": record.owner,
        "phase": record.state.value,
        "age": time.time() - record.created,
        "left": None if record.expires is None else record.expires - time.time(),
        "cpuSeconds": stats.cpu_s if stats else 0.0,
    } | {name: getattr(stats, name) if stats else 0 for name in numbers}


async def _stop(ctx: Context, manager: Manager) -> None:
    """Pause what runs, or let it end; then close. Paused sandboxes and snapshots are there at the next start."""
    ctx.draining = True
    await ctx.programs.close()
    await manager.transitions.all_settled()
    if ctx.config.on_stop == "pause":
        at_once = asyncio.Semaphore(PAUSING)

        async def pause(box: str) -> None:
            async with at_once:
                try:
                    await manager.pause(box)
                except SandboxError as error:
                    logger.warning("sandbox %s could not be paused at the end: %s", box, error)

        await asyncio.gather(*(pause(record.id) for record in manager.store.boxes([State.RUNNING])))
    await manager.close()


__all__ = ["build_app"]
