"""Perilune: train, serve and reinforcement-train Kimi-K3-style language models from one PyTorch code base."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perilune.config import ModelConfig
    from perilune.errors import Error
    from perilune.model import Transformer
    from perilune.ops.sequences import Sequences

__version__ = "0.1.0"

_HOMES = {
    "Error": "perilune.errors",
    "ModelConfig": "perilune.config",
    "Sequences": "perilune.ops.sequences",
    "Transformer": "perilune.model",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that rooms without torch import without torch (PEP 562)."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Error", "ModelConfig", "Sequences", "Transformer", "__version__"]
