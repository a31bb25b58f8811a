"""An initial RAM file system: a cpio archive ("newc"), written in one go."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

_DIRECTORIES = ("dev", "proc", "sys", "modules")
_CONSOLE = (5, 1)


def initrd(agent: Path, modules: Mapping[str, bytes]) -> bytes:
    """The archive with the agent as /init, and kernel modules in the order in which they are to be loaded."""
    out = bytearray()
    for name in _DIRECTORIES:
        out += _entry(name, stat.S_IFDIR | 0o755)
    out += _entry("dev/console", stat.S_IFCHR | 0o600, device=_CONSOLE)
    out += _entry("init", stat.S_IFREG | 0o755, agent.read_bytes())
    for number, (name, data) in enumerate(modules.items()):
        out += _entry(f"modules/{number:02}-{name}.ko", stat.S_IFREG | 0o644, data)
    out += _entry("TRAILER!!!", 0)
    return bytes(out)


def _entry(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    # inode, mode, uid, gid, links, mtime, size, device of the file, device that it is, length of the name, checksum
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
    return _padded(head) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


__all__ = ["initrd"]
