"""The serve room: the hybrid prefix cache and its trace-driven simulator. Neither imports torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perilune.serve.cache import Chain, Geometry, PrefixCache

_HOMES = {"Chain": "perilune.serve.cache", "Geometry": "perilune.serve.cache", "PrefixCache": "perilune.serve.cache"}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that each part is imported alone (PEP 562)."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Chain", "Geometry", "PrefixCache"]
