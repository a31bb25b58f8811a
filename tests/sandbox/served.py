"""A service over the fake driver, and a client of it; guests that have a few more programs than the fake one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx

from perilune.sandbox.assets import Assets
from perilune.sandbox.driver import Command, Gate, Handle, Output, Process, Result, open_gate
from perilune.sandbox.errors import GuestError
from perilune.sandbox.fake import FakeDriver
from perilune.sandbox.manager import Manager
from perilune.sandbox.options import Limits
from perilune.sandbox.service import ServiceConfig, build_app
from perilune.sandbox.service.route import Route
from perilune.sandbox.service.run import running

KEY = "the-key"
LIMIT_S = 50.0


class Tunnel:
    """What a guest's netcat would do, by a real connection on this host."""

    pid = 7

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def output(self) -> AsyncIterator[Output]:
        while data := await self._reader.read(1000):
            yield Output(1, data)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close_stdin(self) -> None:
        self._writer.write_eof()

    async def resize(self, rows: int, columns: int) -> None: ...

    async def kill(self, signal: int = 9) -> None:
        self._writer.close()

    async def wait(self) -> Result:
        return Result(0, b"", b"")


class ServedDriver(FakeDriver):
    """Its guests have /bin/sh but no bash, and ports that are those of this host."""

    async def exec(self, handle: Handle, command: Command) -> Process:  # type: ignore[override]
        argv = command.argv
        if not isinstance(argv, str):
            if argv[0] == "/bin/bash":
                raise GuestError("/bin/bash: No such file or directory")
            if "tunnel" in argv:
                try:
                    return Tunnel(*await asyncio.open_connection("127.0.0.1", int(argv[4])))
                except OSError:
                    return await super().exec(handle, replace(command, argv="false", interactive=False))
            if argv[0] == "/bin/sh":
                command = replace(command, argv=argv[-1])
        return await super().exec(handle, command)


def service(
    assets: Assets,
    gate: Gate = open_gate,
    limits: Limits | None = None,
    keep: list[Manager] | None = None,
    **config: Any,
) -> Route:
    """An application over `assets`. keep: takes its manager."""

    async def open_manager() -> Manager:
        manager = await Manager.open(assets, ServedDriver(gate), limits or Limits(memory=1 << 40), gate)
        if keep is not None:
            keep.append(manager)
        return manager

    return build_app(ServiceConfig(**{"api_keys": (KEY,), "drain_s": 1.0, **config}), open_manager)


@contextlib.contextmanager
def served(assets: Assets, **options: Any) -> Iterator[httpx.Client]:
    """A service that answers, and a client with its key."""
    with (
        running(service(assets, **options)) as url,
        httpx.Client(base_url=url, headers={"x-api-key": KEY}, timeout=LIMIT_S) as client,
    ):
        yield client


def new(client: httpx.Client, **body: Any) -> dict[str, Any]:
    """A new sandbox's answer."""
    response = client.post("/sandboxes", json={"templateID": "busybox", "timeout": 60, **body})
    assert response.status_code == 201, response.text
    answer: dict[str, Any] = response.json()
    return answer


def sh(client: httpx.Client, box: str, cmd: str, **body: Any) -> dict[str, Any]:
    """Run a command."""
    response = client.post(f"/sandboxes/{box}/exec", json={"cmd": cmd, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer
