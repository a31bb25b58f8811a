"""Folders as E2B's clients ask for them, by the programs that every guest has: stat, find, mkdir, mv, rm."""

from __future__ import annotations

import posixpath
import shlex
import stat
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from perilune.sandbox.errors import GuestError
from perilune.sandbox.service.context import Context
from perilune.sandbox.service.errors import Refused
from perilune.sandbox.transfer import shell

Fields = dict[str, Any]
# Size, mode in hexadecimal, user, group, seconds, name: a name has no line break, or it is left out.
_FORMAT = "%s %f %U %G %Y %n"
_DEPTH = 32


def _path(fields: Fields, name: str = "path") -> str:
    given = fields.get(name)
    if not isinstance(given, str) or not given:
        raise Refused(400, "invalid", f"{name} is {given!r}; it must be a path", name)
    return posixpath.normpath(posixpath.join("/root", given))


def entry(line: str) -> Fields | None:
    """One line of `stat` as E2B's entry; None if it is none."""
    parts = line.split(" ", 5)
    if len(parts) < 6 or not parts[0].isdigit():
        return None
    size, mode_hex, user, group, changed, name = parts
    mode = int(mode_hex, 16)
    kind = "FILE_TYPE_DIRECTORY" if stat.S_ISDIR(mode) else "FILE_TYPE_SYMLINK" if stat.S_ISLNK(mode) else None
    return {
        "name": posixpath.basename(name) or "/",
        "type": kind or "FILE_TYPE_FILE",
        "path": name,
        "size": size,  # 64-bit numbers are text in protobuf's JSON
        "mode": stat.S_IMODE(mode),
        "permissions": stat.filemode(mode),
        "owner": user,
        "group": group,
        "modifiedTime": datetime.fromtimestamp(int(changed), UTC).isoformat().replace("+00:00", "Z"),
    }


async def _entries(ctx: Context, box: str, script: str) -> list[Fields]:
    return [
        found for line in (await shell(ctx.manager, box, script)).splitlines() if (found := entry(line)) is not None
    ]


async def _one(ctx: Context, box: str, path: str) -> Fields:
    found = await _entries(ctx, box, f"stat -c {shlex.quote(_FORMAT)} {shlex.quote(path)}")
    if not found:
        raise GuestError(f"{path}: its name has a line break")
    return {"entry": found[0]}


async def _stat(ctx: Context, box: str, fields: Fields) -> Fields:
    return await _one(ctx, box, _path(fields))


async def _list_dir(ctx: Context, box: str, fields: Fields) -> Fields:
    depth = fields.get("depth") or 1
    if not isinstance(depth, int) or not 1 <= depth <= _DEPTH:
        raise Refused(400, "invalid", f"depth is {depth!r}; it must be between 1 and {_DEPTH}", "depth")
    path = shlex.quote(_path(fields))
    # A link to a folder is followed by the slash; a file is an error of `cd`.
    find = f"find {path}/ -mindepth 1 -maxdepth {depth} -exec stat -c {shlex.quote(_FORMAT)} {{}} +"
    entries = await _entries(ctx, box, f"cd {path} && {find}")
    return {"entries": [one | {"path": posixpath.normpath(one["path"])} for one in entries]}


async def _make_dir(ctx: Context, box: str, fields: Fields) -> Fields:
    path = _path(fields)
    said = await shell(
        ctx.manager, box, f"if [ -d {shlex.quote(path)} ]; then echo here; else mkdir -p {shlex.quote(path)}; fi"
    )
    if said:
        raise Refused(409, "already_exists", f"{path}: a folder is there already")
    return await _one(ctx, box, path)


async def _move(ctx: Context, box: str, fields: Fields) -> Fields:
    source, target = _path(fields, "source"), _path(fields, "destination")
    folder = shlex.quote(posixpath.dirname(target))
    await shell(ctx.manager, box, f"mkdir -p {folder} && mv {shlex.quote(source)} {shlex.quote(target)}")
    return await _one(ctx, box, target)


async def _remove(ctx: Context, box: str, fields: Fields) -> Fields:
    path = _path(fields)
    if path == "/":
        raise Refused(400, "invalid", "path is '/'; the root cannot be removed", "path")
    await shell(ctx.manager, box, f"stat {shlex.quote(path)} > /dev/null && rm -rf {shlex.quote(path)}")
    return {}


FILES: dict[str, Callable[[Context, str, Fields], Awaitable[Fields]]] = {
    "filesystem.Filesystem/Stat": _stat,
    "filesystem.Filesystem/ListDir": _list_dir,
    "filesystem.Filesystem/MakeDir": _make_dir,
    "filesystem.Filesystem/Move": _move,
    "filesystem.Filesystem/Remove": _remove,
}

__all__ = ["FILES", "entry"]
