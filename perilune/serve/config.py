"""What an engine may use and how it divides it."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral

from perilune.errors import Error
from perilune.serve.cache.geometry import GRID
from perilune.serve.cache.placement import Placement


@dataclass(frozen=True)
class EngineConfig:
    """arena_bytes: device memory for KV pages and cached states together; host_bytes: the host tier (0: none).

    slots: requests that run at once; each has a private KDA state outside the arena. token_budget: tokens of one step.
    page_tokens, match_unit: tokens of a KV page and of a hash (the published layout of Kimi-K3: 6144 and 512).
    exact: compute every token by the chunk arithmetic of prefill (CPU): scheduling, caching and speculation then never
        change a bit of the logits. kv: number format of the KV pages, "model" (the model's) or "fp8".
    watermark: share of the arena's pages that admission leaves free. reserve: share of max_tokens that admission
        sets aside; below 1 requests may have to be parked when memory runs out.
    long_tokens: prompt + max_tokens from which a request is of class "long"; long_share: share of slots, pages and of a
        step's prefill tokens that long requests may take together.
    ageing: tokens of cached prefix that a second of waiting is worth in the order of admission; max_wait: seconds after
        which requests are served in order of arrival, and nobody overtakes.
    drafts: most draft tokens a step and sequence (0: no speculation). seed: of requests that have none.
    park: whether a preempted request leaves its state in the cache instead of computing its tokens again.
    graphs: largest decode batch that is captured as a CUDA graph (0: none). overlap: begin a decode step before the
        tokens of the one before are on the host (not with drafts, nor in exact mode).
    Raises Error for a value out of range.
    """

    arena_bytes: int
    host_bytes: int = 0
    slots: int = 64
    token_budget: int = 8192
    page_tokens: int = 64
    match_unit: int = 64
    exact: bool = False
    kv: str = "model"
    placement: Placement = field(default_factory=Placement)
    eviction: str = "auto"
    watermark: float = 0.01
    reserve: float = 1.0
    long_tokens: int = 32768
    long_share: float = 0.75
    ageing: float = 1000.0
    max_wait: float = 30.0
    drafts: int = 0
    seed: int = 0
    park: bool = True
    graphs: int = 256
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in INTEGERS:
            if not isinstance(getattr(self, name), Integral):
                raise Error(f"engine.{name} is {getattr(self, name)!r}; must be an integer")
        for name in ("slots", "page_tokens", "match_unit", "long_tokens"):
            if getattr(self, name) < 1:
                raise Error(f"engine.{name} is {getattr(self, name)}; must be >= 1")
        for name in ("arena_bytes", "host_bytes", "ageing", "max_wait", "graphs"):
            if not getattr(self, name) >= 0:
                raise Error(f"engine.{name} is {getattr(self, name)}; must be >= 0")
        if self.token_budget < GRID + self.slots:
            raise Error(
                f"engine.token_budget is {self.token_budget}; must be >= {GRID + self.slots}: a token for each of the "
                f"{self.slots} slots and a chunk of the grid"
            )
        if not 0 <= self.drafts <= MAX_DRAFTS:
            raise Error(f"engine.drafts is {self.drafts}; allowed: 0..{MAX_DRAFTS}")
        for name in ("watermark", "reserve"):
            if not 0 <= getattr(self, name) <= 1:
                raise Error(f"engine.{name} is {getattr(self, name)}; must be in [0, 1]")
        if not 0 < self.long_share <= 1:
            raise Error(f"engine.long_share is {self.long_share}; must be in (0, 1]")
        if self.kv not in ("model", "fp8"):
            raise Error(f"engine.kv is {self.kv!r}; allowed: 'model', 'fp8'")


INTEGERS = ("arena_bytes", "host_bytes", "slots", "token_budget", "page_tokens", "match_unit", "drafts", "graphs")
MAX_DRAFTS = 7  # a verified row of drafts and the token before them are at most 8 tokens

__all__ = ["MAX_DRAFTS", "EngineConfig"]
