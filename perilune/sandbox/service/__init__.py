"""Sandboxes over HTTP: E2B's paths and status codes, so that its SDKs work, and ours beside them.

The service needs `pip install 'perilune[sandbox]'`; its client (client.py) needs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perilune.sandbox.service.app import build_app
    from perilune.sandbox.service.config import ServiceConfig

_PLACES = {"ServiceConfig": "config", "build_app": "app"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


__all__ = ["ServiceConfig", "build_app"]
