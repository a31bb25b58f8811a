"""The server as an ASGI application.

app = build_app(ServerConfig(model_names=("nano",)), LLM("runs/quickstart/checkpoint"))
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

import perilune
from perilune.errors import Error
from perilune.serve.server import basics
from perilune.serve.server.anthropic import count_tokens, messages
from perilune.serve.server.backend import Source, picture, shared, start
from perilune.serve.server.chat import chat_completions, render_chat
from perilune.serve.server.completions import completions
from perilune.serve.server.config import ServerConfig
from perilune.serve.server.context import Context, make
from perilune.serve.server.errors import ApiError, anthropic_error, openai_error, refusal
from perilune.serve.server.exchange import note
from perilune.serve.server.logs import Requests, logger
from perilune.serve.server.tracing import telemetry
from perilune.serve.server.wire import Json
from perilune.serve.ui import routes

Handler = Callable[[Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/chat/completions/render", render_chat),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("GET", "/v1/models", basics.models),
    ("GET", "/v1/models/{name:path}", basics.models),
    ("POST", "/tokenize", basics.tokenize_text),
    ("POST", "/detokenize", basics.detokenize),
    ("GET", "/health", basics.health),
    ("GET", "/version", basics.version),
    ("GET", "/metrics", basics.metrics),
)


def build_app(config: ServerConfig, llm: Source) -> FastAPI:
    """The application; its lifespan starts the engine's thread, and drains it at the end.

    llm: one engine, or `Replicas`; from then on it belongs to the server. Raises Error for a model that cannot be
    served as `config` says.
    """
    context = make(config, llm, int(time.time()))
    app = FastAPI(
        title="Perilune",
        version=perilune.__version__,
        lifespan=_lifespan,
        openapi_url=None,
        telemetry=telemetry(config.otlp_traces_endpoint),
    )
    app.state.context = context
    for method, path, handler in ROUTES:
        app.add_route(path, handler, methods=[method])

    async def seen(request: Request) -> dict[str, Any]:
        """The cache as the caller may see it."""
        tenant = context.tenants.who(request)
        if context.draining:
            raise ApiError(503, "the server is shutting down")
        return await shared(context.under_way, f"picture of {tenant.name}", lambda: picture(context.llm, tenant))

    app.include_router(routes(seen))
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(Error, _wrong)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(Requests)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: Context = app.state.context
    context.started = start(context.source)
    logger.info("started", extra={"facts": {"model": context.config.model_names[0], "max_model_len": context.longest}})
    try:
        yield
    finally:
        context.draining = True
        await context.started.drain(context.config.drain_seconds)
        context.grammars.close()
        logger.info("stopped")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    note(request, error=error.message, param=error.param)
    request.app.state.context.metrics.refuse(error.status)
    return _error(request, error.status, error.message, error.param, error.headers)


async def _wrong(request: Request, error: Exception) -> Response:
    assert isinstance(error, Error)
    return await _refused(request, refusal(error))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return _error(request, error.status_code, what, None, dict(error.headers or {}))


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads it; the status is for the log."""
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    logger.error("unexpected", exc_info=error, extra={"facts": {"path": request.url.path[:200]}})
    return _error(request, 500, f"unexpected {type(error).__name__}", None, {})


def _error(request: Request, status: int, message: str, param: str | None, headers: dict[str, str]) -> Response:
    if request.url.path.startswith("/v1/messages"):
        return Json(anthropic_error(status, message), status, headers)
    return Json(openai_error(status, message, param), status, headers)


__all__ = ["build_app"]
