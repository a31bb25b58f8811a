"""Running the application: in the foreground until a signal, or in a thread for tests and notebooks."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from perilune.sandbox.errors import SandboxError, Unavailable
from perilune.sandbox.service.context import Context
from perilune.sandbox.service.route import Route

logger = logging.getLogger("perilune.sandbox")
_STARTING_S = 60.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(app: Route, host: str, port: int) -> None:
    """Answer until SIGINT or SIGTERM. Without API keys only this host may be listened on."""
    context: Context = app.state.context
    if host not in _LOOPBACK and not context.config.api_keys:
        raise ValueError(f"host is {host!r}; without an API key it must be one of {', '.join(_LOOPBACK)}")
    with _listening(host, port) as listener:
        address = listener.getsockname()
        logger.info("listening on http://%s:%d", address[0], address[1])
        server = _Server(app)
        try:
            server.run([listener])
        except SystemExit:  # uvicorn's word for a start that failed
            raise Unavailable("the service did not start; its log says why") from None


@contextmanager
def running(app: Route, host: str = "127.0.0.1") -> Iterator[str]:
    """Answer in a thread as long as the block lasts; yields the address."""
    with _listening(host, 0) as listener:
        server = _Server(app)
        thread = threading.Thread(target=server.run, args=([listener],), name="perilune-sandboxes", daemon=True)
        thread.start()
        try:
            if not server.up.wait(_STARTING_S) or not server.started:
                raise SandboxError(f"the service did not start within {_STARTING_S:g} s")
            yield f"http://{host}:{listener.getsockname()[1]}"
        finally:
            server.stop()
            thread.join()


class _Server(uvicorn.Server):
    """Refuses new requests as soon as it is to stop, while those under way have their time."""

    def __init__(self, app: Route) -> None:
        self.context: Context = app.state.context
        self.up = threading.Event()
        config = uvicorn.Config(
            app,
            lifespan="on",
            # Of what may be installed: the parser whose heads are bounded, and no web sockets, which have no route.
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(self.context.config.drain_s)),
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.up.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Uvicorn's own would send the signal again at the end: a service that has drained has ended well.
        logger.info("stopping after %s", signal.Signals(sig).name)
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
        raise ValueError(f"host is {host!r}, port {port}: {problem.strerror}") from None
    with listener:
        # What is accepted inherits it; asyncio sets it only on sockets that name their protocol. Without it an answer
        # of two pieces waits 40 ms for the client's acknowledgement of the first.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


__all__ = ["running", "serve"]
