"""QEMU's machine protocol over a connected socket: one command at a time, events as they come."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from perilune.sandbox.errors import SandboxError

_LINE = 1 << 20


class QmpError(SandboxError):
    """QEMU refused a command, or has gone."""


class Qmp:
    """`await qmp("stop")`; events are counted by name in `events`."""

    def __init__(self) -> None:
        self.events: dict[str, int] = {}
        self._lock = asyncio.Lock()
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def attach(self, connection: socket.socket) -> None:
        """Take a connected socket, wait for QEMU's greeting and leave the negotiation mode."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=connection, limit=_LINE)
        async with self._lock:
            await self._message()
        await self("qmp_capabilities")

    async def _message(self) -> dict[str, Any]:
        try:
            line = await self._reader.readline()
        except (OSError, ValueError) as error:
            raise QmpError(f"QEMU's monitor: {error}") from error
        if not line:
            raise QmpError("QEMU has ended")
        message: dict[str, Any] = json.loads(line)
        return message

    async def __call__(self, command: str, **arguments: Any) -> Any:
        """Run one command and return its result; raises `QmpError`."""
        # A cancelled caller must not leave its answer to the next one, which waits for it.
        return await asyncio.shield(self._ask(command, arguments))

    async def _ask(self, command: str, arguments: dict[str, Any]) -> Any:
        async with self._lock:
            self._writer.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
            return await self._answer(command)

    async def _answer(self, command: str) -> Any:
        while True:
            message = await self._message()
            if "event" in message:
                self.events[message["event"]] = self.events.get(message["event"], 0) + 1
            elif "error" in message:
                raise QmpError(f"{command}: {message['error']['desc']}")
            elif "return" in message:
                return message["return"]

    def close(self) -> None:
        """Drop the connection."""
        if hasattr(self, "_writer"):
            self._writer.transport.abort()


__all__ = ["Qmp", "QmpError"]
