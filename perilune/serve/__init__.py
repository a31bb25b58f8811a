"""The serve room: a language model that answers many requests at once, its prefix cache and the cache's simulator.

The cache and the simulator import without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perilune.serve.answer import Answer
    from perilune.serve.async_llm import AsyncLLM, Delta
    from perilune.serve.cache import Chain, Geometry, PrefixCache
    from perilune.serve.config import EngineConfig
    from perilune.serve.engine import Engine, Hold
    from perilune.serve.errors import EngineError
    from perilune.serve.llm import LLM
    from perilune.serve.replicas import Replicas
    from perilune.serve.request import Logprob, Output, Params
    from perilune.serve.segment import Segment
    from perilune.serve.speculate import Drafter, NgramDrafter

_HOMES = {
    "perilune.serve.answer": ("Answer",),
    "perilune.serve.async_llm": ("AsyncLLM", "Delta"),
    "perilune.serve.cache": ("Chain", "Geometry", "PrefixCache"),
    "perilune.serve.config": ("EngineConfig",),
    "perilune.serve.engine": ("Engine", "Hold"),
    "perilune.serve.errors": ("EngineError",),
    "perilune.serve.llm": ("LLM",),
    "perilune.serve.replicas": ("Replicas",),
    "perilune.serve.request": ("Logprob", "Output", "Params"),
    "perilune.serve.segment": ("Segment",),
    "perilune.serve.speculate": ("Drafter", "NgramDrafter"),
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that each part is imported alone (PEP 562)."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "LLM",
    "Answer",
    "AsyncLLM",
    "Chain",
    "Delta",
    "Drafter",
    "Engine",
    "EngineConfig",
    "EngineError",
    "Geometry",
    "Hold",
    "Logprob",
    "NgramDrafter",
    "Output",
    "Params",
    "PrefixCache",
    "Replicas",
    "Segment",
]
