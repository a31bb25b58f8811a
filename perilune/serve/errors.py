"""What an engine says of itself, as opposed to what is wrong with a request."""

from __future__ import annotations

from typing import Any, Literal

from perilune.errors import Error

# draining: it takes no new request. unavailable: not now, or not there (asleep, paused, a replica that has ended); to
# ask again may help. failed: something broke inside it.
Kind = Literal["draining", "unavailable", "failed"]


class EngineError(Error):
    """Nothing is wrong with the request: `kind` says why the engine does not answer it."""

    def __init__(self, message: str, kind: Kind) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.kind)


__all__ = ["EngineError", "Kind"]
