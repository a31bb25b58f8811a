"""Folders in and out of a guest, as archives; nothing of what a guest sends is written outside its place."""

from __future__ import annotations

import asyncio
import io
import posixpath
import secrets
import shlex
import tarfile
from pathlib import Path

from perilune.sandbox.driver import Command
from perilune.sandbox.errors import GuestError
from perilune.sandbox.manager import READ_LIMIT, Manager
from perilune.sandbox.untar import extract

_TAR_S = 300.0


async def upload(manager: Manager, box: str, local: Path, path: str) -> None:
    """Copy a file or folder of the host to `path` in the guest."""
    if local.is_dir():
        archive = f"/tmp/.upload-{secrets.token_hex(8)}.tar"
        await manager.write(box, archive, await asyncio.to_thread(_pack, local))
        place = shlex.quote(path)
        await _shell(manager, box, f"mkdir -p {place} && tar -xf {archive} -C {place}; e=$?; rm -f {archive}; exit $e")
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
    archive = f"/tmp/.download-{secrets.token_hex(8)}.tar"
    await _shell(manager, box, f"tar -cf {archive} -C {shlex.quote(path)} .")
    try:
        data = await manager.read(box, archive)
    finally:
        await manager.run(box, Command(["rm", "-f", archive], user="root"))
    await asyncio.to_thread(_unpack, data, local)


async def _shell(manager: Manager, box: str, script: str) -> None:
    result = await manager.run(box, Command(script, user="root", timeout_s=_TAR_S))
    if result.exit_code:
        raise GuestError(f"{script.split(';')[0]}: {result.stderr.decode(errors='replace').strip()[-300:]}")


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


__all__ = ["download", "normal", "upload"]
