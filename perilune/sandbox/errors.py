"""What can go wrong with a sandbox, by what the caller can do about it."""

# The names say what holds, not that it is an error: the base class says that.
# ruff: noqa: N818

from __future__ import annotations

from perilune.errors import Error


class SandboxError(Error):
    """The base of every error of this room."""


class Recoverable(SandboxError):
    """A capture failed and the virtual machine runs again, as if nothing had been asked."""


class Terminal(SandboxError):
    """The virtual machine is gone: it was torn down, or ended by itself."""


class Conflict(SandboxError):
    """The sandbox is in a state in which this cannot be done."""


class NotFound(SandboxError):
    """No sandbox, snapshot or template of this name."""


class Unavailable(SandboxError):
    """This host cannot do it: a program, a device or a permission is missing."""


class Exhausted(SandboxError):
    """Memory, disk quota or a count is used up; nothing was started."""


class BadSnapshot(SandboxError):
    """A snapshot of another format, or one whose bytes do not match their checksums."""


class GuestError(SandboxError):
    """The guest refused an operation: a file that is not there, a program that cannot be started."""


__all__ = [
    "BadSnapshot",
    "Conflict",
    "Exhausted",
    "GuestError",
    "NotFound",
    "Recoverable",
    "SandboxError",
    "Terminal",
    "Unavailable",
]
