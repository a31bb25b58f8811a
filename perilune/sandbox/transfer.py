"""Folders in and out of a guest, as archives; nothing of what a guest sends is written outside its place."""

from __future__ import annotations

import asyncio
import contextlib
import io
import posixpath
import secrets
import shlex
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

from perilune.sandbox.driver import Command
from perilune.sandbox.errors import GuestError, SandboxError
from perilune.sandbox.manager import READ_LIMIT, Manager
from perilune.sandbox.untar import extract

_SHELL_S, _REMOVE_S = 300.0, 10.0


async def upload(manager: Manager, box: str, local: Path, path: str) -> None:
    """Copy a file or folder of the host to `path` in the guest."""
    if local.is_dir():
        await put_archive(manager, box, path, await asyncio.to_thread(_pack, local))
    else:
        data = await asyncio.to_thread(local.read_bytes)
        await manager.write(box, path, data, local.stat().st_mode & 0o777)


async def download(manager: Manager, box: str, path: str, local: Path) -> None:
    """Copy a file or folder of the guest to `local`, whole or not at all for a file."""
    kind = await manager.run(box, Command(["test", "-d", path], user="root"))
    if kind.exit_code:
        data = await manager.read(box, path)
        await asyncio.to_thread(local.write_bytes, data)
        return
    await asyncio.to_thread(_unpack, await take_archive(manager, box, path), local)


async def put_archive(manager: Manager, box: str, path: str, data: bytes) -> None:
    """Unpack a tar archive into a folder of the guest, which is made."""
    place = shlex.quote(path)
    async with _passing(manager, box, "upload") as archive:
        await manager.write(box, archive, data)
        await shell(manager, box, f"mkdir -p {place} && tar -xf {archive} -C {place}")


async def take_archive(manager: Manager, box: str, path: str, limit: int = READ_LIMIT) -> bytes:
    """A folder of the guest as a tar archive of at most `limit` bytes; what is in it is the guest's word."""
    async with _passing(manager, box, "download") as archive:
        await shell(manager, box, f"tar -cf {archive} -C {shlex.quote(path)} .")
        return await manager.read(box, archive, limit)


@contextlib.asynccontextmanager
async def _passing(manager: Manager, box: str, verb: str) -> AsyncIterator[str]:
    """A file of the guest that is gone afterwards, also where the call breaks off or is cancelled."""
    path = f"/tmp/.{verb}-{secrets.token_hex(8)}.tar"
    try:
        yield path
    finally:
        # A guest that cannot do it is not the news.
        with contextlib.suppress(SandboxError):
            await manager.run(box, Command(["rm", "-f", path], user="root", timeout_s=_REMOVE_S))


async def shell(manager: Manager, box: str, script: str) -> str:
    """What a shell command prints; `GuestError` with what it said if it failed."""
    result = await manager.run(box, Command(script, user="root", timeout_s=_SHELL_S))
    if result.exit_code:
        raise GuestError(result.stderr.decode(errors="replace").strip()[-300:] or f"exit code {result.exit_code}")
    return result.text


def _pack(local: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(local, arcname=".")
    return buffer.getvalue()


def _unpack(data: bytes, local: Path) -> None:
    # Uncompressed, as it was asked for: a few megabytes could else be terabytes to look through.
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            total = sum(member.size for member in archive.getmembers())
            if total > READ_LIMIT:
                raise GuestError(f"the folder's files are {total} bytes; at most {READ_LIMIT} are copied at once")
            extract(archive, local)
    except (tarfile.TarError, ValueError) as error:
        raise GuestError(f"the guest's archive was refused: {error}") from error


def normal(path: str) -> str:
    """A guest path without "." and ".."; `GuestError` if it is not absolute."""
    if not path.startswith("/"):
        raise GuestError(f"path {path!r} must be absolute")
    return posixpath.normpath(path)


__all__ = ["download", "normal", "put_archive", "shell", "take_archive", "upload"]
