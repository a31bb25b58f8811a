"""Uvicorn around the application: in the foreground until SIGTERM, or in a thread for tests and notebooks."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from perilune.errors import Error
from perilune.serve.errors import EngineError
from perilune.serve.server.context import Context
from perilune.serve.server.logs import logger

_STARTING = 60.0  # seconds that a server in a thread has to come up
_AFTER = 5.0  # seconds past the drain for connections to close


def serve(app: FastAPI, host: str, port: int) -> None:
    """Answer until SIGTERM or SIGINT; then finish what runs, for `drain_seconds` at most. A second signal ends at once.

    Raises Error for an address that cannot be used, and EngineError after an engine that has failed ended it.
    """
    with _listening(host, port) as listener:
        shown = listener.getsockname()
        logger.info("listening", extra={"facts": {"host": shown[0], "port": shown[1]}})
        server = _Server(app)
        server.run(sockets=[listener])
    if server.failure is not None:
        raise EngineError(f"the engine has failed: {server.failure}", "failed")


@contextmanager
def running(app: FastAPI, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """The server in a thread; its address. port 0 takes a free one. Leaving drains and stops it."""
    with _listening(host, port) as listener:
        server = _Server(app)
        thread = threading.Thread(target=server.run, args=([listener],), name="perilune-server", daemon=True)
        thread.start()
        if not server.up.wait(_STARTING):
            raise Error(f"the server did not start within {_STARTING:g} s")
        try:
            yield f"http://{host}:{listener.getsockname()[1]}"
        finally:
            server.stop()
            thread.join()


class _Server(uvicorn.Server):
    """Tells the application at once that it is to stop, while connections are still being served."""

    def __init__(self, app: FastAPI) -> None:
        self.context: Context = app.state.context
        self.up = threading.Event()
        self.failure: str | None = None
        # In a thread of its own the engine computes; the loop must not be what a request waits for.
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=65,
            timeout_graceful_shutdown=round(self.context.config.drain_seconds + _AFTER),
            h11_max_incomplete_event_size=65_536,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def on_tick(self, counter: int) -> bool:
        engine = self.context.started
        failure = None if engine is None else engine.failure
        if failure is not None and self.failure is None:
            self.failure = failure
            logger.error("failed", extra={"facts": {"error": failure}})
            self.stop()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Answers that time is up for end with an error that clients can read, before connections are cut.
        engine = self.context.started
        drained = None if engine is None else asyncio.create_task(engine.drain(self.context.config.drain_seconds))
        await super().shutdown(sockets)
        if drained is not None:
            await drained

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Uvicorn's own would send the signal again at the end: a server that drained has ended well.
        logger.info("stopping", extra={"facts": {"signal": signal.Signals(sig).name}})
        self.force_exit = self.should_exit
        self.stop()

    def stop(self) -> None:
        self.context.draining = True
        self.should_exit = True


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as problem:
        raise Error(f"host {host!r}, port {port}: {problem.strerror}") from None
    with listener:
        # What is accepted inherits it; asyncio sets it only on sockets that name their protocol. Without it an answer
        # of two pieces waits 40 ms for the client's acknowledgement of the first.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


__all__ = ["running", "serve"]
