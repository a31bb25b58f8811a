"""The frames between host and guest agent, over a virtio-serial port or a vsock connection.

    4 bytes  magic b"PRL1"     4 bytes  type     4 bytes  stream     4 bytes  length of the body, at most FRAME_MAX

All numbers are little endian. A stream is one program or one file. Both sides send only what the other has room for:
the guest has WINDOW bytes of credit for each stream's output, the host as much for each stream's input.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

MAGIC = 0x314C5250
FRAME_MAX = 65536
WINDOW = 256 << 10
_HEADER = struct.Struct("<4I")
_MAGIC_BYTES = struct.pack("<I", MAGIC)


class Frame(IntEnum):
    """Types; the guest's copy of the numbers is guest/agent.h."""

    HELLO = 1
    PING = 2
    SPAWN = 3
    STDIN = 4
    STDIN_END = 5
    KILL = 6
    RESIZE = 7
    DISCARD = 8
    READ = 9
    WRITE = 10
    WRITE_DATA = 11
    WRITE_END = 12
    REFRESH = 13
    CREDIT = 14
    ADDRESS = 15
    PONG = 18
    STARTED = 20
    STDOUT = 21
    STDERR = 22
    EXIT = 23
    DATA = 24
    END = 25
    TAKEN = 26


def frame(kind: Frame, stream: int, body: bytes = b"") -> bytes:
    """One frame as bytes."""
    if len(body) > FRAME_MAX:
        raise ValueError(f"a frame's body is {len(body)} bytes; at most {FRAME_MAX}")
    return _HEADER.pack(MAGIC, kind, stream, len(body)) + body


class Parser:
    """Frames out of bytes as they come. A cut frame is skipped: the next one is found by its magic."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """(type, stream, body) of each frame that is complete now."""
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= _HEADER.size:
            magic, kind, stream, length = _HEADER.unpack_from(buffer, at)
            if magic != MAGIC or length > FRAME_MAX:
                found = buffer.find(_MAGIC_BYTES, at + 1)
                at = found if found >= 0 else len(buffer) - len(_MAGIC_BYTES) + 1
                continue
            end = at + _HEADER.size + length
            if len(buffer) < end:
                break
            body = bytes(buffer[at + _HEADER.size : end])
            at = end
            yield kind, stream, body
        del buffer[:at]


def spawn_body(
    argv: list[str], env: dict[str, str], cwd: str, user: str, stdin: bool, pty: tuple[int, int] | None
) -> bytes:
    """The body of SPAWN; raises `ValueError` naming what cannot be sent."""
    strings = [cwd, user, *argv, *(f"{name}={value}" for name, value in env.items())]
    for text in strings:
        if "\0" in text:
            raise ValueError(f"{text!r}: a zero byte cannot be part of an argument, a variable or a path")
    rows, columns = pty or (0, 0)
    flags = (1 if pty else 0) | (2 if stdin else 0)
    body = struct.pack("<5I", flags, rows, columns, len(argv), len(env))
    body += b"".join(text.encode() + b"\0" for text in strings)
    if len(body) > FRAME_MAX:
        raise ValueError(f"arguments and environment are {len(body)} bytes; at most {FRAME_MAX}: use a file")
    return body


__all__ = ["FRAME_MAX", "MAGIC", "WINDOW", "Frame", "Parser", "frame", "spawn_body"]
