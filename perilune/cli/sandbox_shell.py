"""A program in a sandbox with this terminal's input and output."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any
from urllib.parse import quote

from perilune.errors import Error
from perilune.sandbox.errors import SandboxError
from perilune.sandbox.service.client import Client

PIECE = 32 << 10


def run_program(client: Client, box: str, body: Mapping[str, Any], terminal: bool = False) -> int:
    """Run it and return its exit code. terminal: it gets one, of this one's size, and every key that is pressed."""
    fields = {**body, "stream": True, "interactive": True}
    if terminal:
        fields |= {"pty": _size(), "env": {"TERM": os.environ.get("TERM", "xterm")}}
    path = f"/sandboxes/{quote(box, safe='')}/exec"
    events = client.stream("POST", path, fields)
    pid = next(events)["pid"]
    threading.Thread(target=_feed, args=(client, f"{path}/{pid}/input"), daemon=True).start()
    with _raw() if terminal else contextlib.nullcontext(), _resized(client, f"{path}/{pid}/input", terminal):
        for event in events:
            if "data" in event:
                out = sys.stdout if event["stream"] == 1 else sys.stderr
                out.buffer.write(base64.b64decode(event["data"]))
                out.flush()
            elif "error" in event:
                raise Error(event["error"]["message"])
            else:
                if event["timedOut"]:
                    print("perilune: the program's time was up; it was killed", file=sys.stderr)
                return int(event["exitCode"])
    raise Error("the service ended the stream before the program did")


def _feed(client: Client, path: str) -> None:
    """Everything from our stdin, then its end. A program that has ended takes no more."""
    with contextlib.suppress(SandboxError, OSError, ValueError):
        while data := os.read(sys.stdin.fileno(), PIECE):
            client.call("POST", path, {"data": base64.b64encode(data).decode()})
    with contextlib.suppress(SandboxError):
        client.call("POST", path, {"close": True})


def _size() -> dict[str, int]:
    # Not shutil's, which believes COLUMNS and LINES of an environment that may be another terminal's.
    size = os.get_terminal_size(sys.stdin.fileno())
    return {"rows": size.lines or 24, "cols": size.columns or 80}


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Keys as they are pressed, also those that would be signals; the terminal is as before afterwards."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resized(client: Client, path: str, terminal: bool) -> Iterator[None]:
    """Tell the program when this terminal's size changes."""
    if not terminal:
        yield
        return

    def changed(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(SandboxError):
            client.call("POST", path, {"size": _size()})

    before = signal.signal(signal.SIGWINCH, changed)
    try:
        # It may have changed since the program was asked for, when nobody listened.
        changed(signal.SIGWINCH, None)
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)


__all__ = ["run_program"]
