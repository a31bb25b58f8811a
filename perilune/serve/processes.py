"""Other processes of this package, each at the end of a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

Process = subprocess.Popen[bytes]


def start(module: str) -> tuple[Process, Connection]:
    """`python -m module FD`: it finds its end of the pipe as `Connection(int(sys.argv[1]))`. The caller's main module
    is not imported again."""
    mine, theirs = Pipe()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", module, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    return process, mine


def end_with_pipe() -> None:
    """In such a process: what a terminal or a service manager sends to a whole group is for the first one to act on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def end(process: Process, seconds: float = 10.0) -> None:
    """Wait for a process that was told to end; kill it after so long."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


__all__ = ["Process", "end", "end_with_pipe", "start"]
