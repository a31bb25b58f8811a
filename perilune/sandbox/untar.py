"""Archives that somebody else made. Nothing is written through a link, so nothing is written outside of the folder.

The filters of `tarfile` compare resolved names instead, which a chain of links longer than a path may be has led out
of the folder in every Python before 3.11.13, 3.12.11 and 3.13.4 (CVE-2025-4517).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
from pathlib import Path

_LINKS = 40  # as many as Linux follows


def extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack files, folders and links that stay inside; `ValueError` for any other member."""
    folder.mkdir(parents=True, exist_ok=True)
    for member in archive:
        parts = _parts(member.name)
        if not parts:
            continue  # the folder itself
        target = _real(folder, parts)
        source = _real(folder, _parts(member.linkname)) if member.islnk() else None
        if member.issym():
            _check_link(member, len(parts) - 1)
        elif source is not None and (source.is_symlink() or not source.is_file()):
            raise ValueError(f"{member.name!r} is a link to {member.linkname!r}, which is no file of the archive")
        elif not (member.isreg() or member.isdir() or member.islnk()):
            raise ValueError(f"{member.name!r} is neither file, folder nor link")
        if target.is_dir() and not target.is_symlink() and not member.isdir():
            raise ValueError(f"{member.name!r} is a folder here, and none in the archive")
        target.parent.mkdir(parents=True, exist_ok=True)
        put(archive, member, target, source)
        if member.isreg():
            target.chmod(member.mode & 0o755 | 0o600)


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"{name!r} leads out of the folder")
    return parts


def _real(folder: Path, parts: list[str]) -> Path:
    path = folder
    for part in parts[:-1]:
        path /= part
        if path.is_symlink():
            raise ValueError(f"{'/'.join(parts)!r} lies behind a link")
    return path / parts[-1] if parts else path


def _check_link(member: tarfile.TarInfo, depth: int) -> None:
    """Up at most to the folder and then down: whatever else is a link, that stays inside. depth: of the link."""
    parts = [part for part in member.linkname.split("/") if part not in ("", ".")]
    up = next((place for place, part in enumerate(parts) if part != ".."), len(parts))
    if member.linkname.startswith("/") or up > depth or ".." in parts[up:]:
        raise ValueError(f"{member.name!r} is a link to {member.linkname!r}, which may lead out of the folder")


def inside(root: Path, place: str) -> Path:
    """`place` as a program finds it whose root is `root`: links are followed, none leads out."""
    real: list[str] = []
    pending = place.split("/")[::-1]
    links = 0
    while pending:
        part = pending.pop()
        if part == "..":
            del real[-1:]
        elif part not in ("", "."):
            here = root.joinpath(*real, part)
            if not here.is_symlink():
                real.append(part)
                continue
            links += 1
            if links > _LINKS:
                raise ValueError(f"{place!r} goes through more than {_LINKS} links")
            to = os.readlink(here)
            real = [] if to.startswith("/") else real
            pending += to.split("/")[::-1]
    return root.joinpath(*real)


def put(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path, source: Path | None) -> None:
    """Write one member exactly there: what is in its place goes first. source: what a hard link is another name of."""
    if source == target:
        return
    if target.is_symlink() or (target.exists() and not (target.is_dir() and member.isdir())):
        remove(target)
    if member.isdir():
        target.mkdir(exist_ok=True)
    elif member.issym():
        target.symlink_to(member.linkname)
    elif member.islnk():
        assert source is not None
        os.link(source, target, follow_symlinks=False)
    elif member.isreg():
        data = archive.extractfile(member)
        assert data is not None
        with data, target.open("xb") as file:
            shutil.copyfileobj(data, file)
    if not member.islnk():
        with contextlib.suppress(OverflowError, OSError):  # a time that this file system has not
            os.utime(target, (member.mtime, member.mtime), follow_symlinks=False)


def remove(path: Path) -> None:
    """A file, a link or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


__all__ = ["extract", "inside", "put", "remove"]
