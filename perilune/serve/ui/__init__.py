"""The page at /ui: talk with the model and watch the prefix cache. Imports without torch; `routes` needs fastapi."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perilune.serve.ui.view import Watch

if TYPE_CHECKING:
    from perilune.serve.ui.web import routes


def __getattr__(name: str) -> Any:
    """Import `routes` on first use: the picture of the cache needs no web framework (PEP 562)."""
    if name == "routes":
        from perilune.serve.ui.web import routes

        return routes
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Watch", "routes"]
