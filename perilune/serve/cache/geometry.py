"""What the cache holds, in bytes: a page of MLA rows and the KDA state of one checkpoint.

Both are counted from the model's config. A page is the unit of the arena; a checkpoint takes as many whole pages as
its bytes need, anywhere in the arena, because a hit only ever copies it into the private state of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.sizes import count

GRID = 64  # the KDA kernel's chunk: states made by prefill lie on multiples of it
PRESETS = {"kimi-linear": "kimi-linear-48b-a3b"}


@dataclass(frozen=True)
class Geometry:
    """token_bytes: MLA rows of one token, all layers; state_bytes: one checkpoint, all KDA layers with windows.

    page_tokens: tokens of one KV page. match_unit: tokens of one hash. grid: where prefill can leave a state.
    Raises Error for sizes < 1 or a page that does not hold whole match units, or the reverse.
    """

    token_bytes: int
    state_bytes: int
    page_tokens: int = 64
    match_unit: int = 64
    grid: int = GRID

    def __post_init__(self) -> None:
        for name in ("token_bytes", "state_bytes", "page_tokens", "match_unit", "grid"):
            if getattr(self, name) < 1:
                raise Error(f"geometry.{name} is {getattr(self, name)}; must be >= 1")
        small, large = sorted((self.page_tokens, self.match_unit))
        if large % small:
            raise Error(
                f"geometry.page_tokens is {self.page_tokens}, match_unit {self.match_unit}; one must divide the other"
            )

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_tokens

    @property
    def state_pages(self) -> int:
        """Pages of the arena that one checkpoint takes."""
        return -(-self.state_bytes // self.page_bytes)

    def kv_pages(self, start: int, end: int) -> int:
        """Pages that rows [start, end) touch, the first one perhaps shared with or copied from earlier rows."""
        return -(-end // self.page_tokens) - start // self.page_tokens if end > start else 0

    @classmethod
    def of(cls, model: str | ModelConfig, kv: str = "bf16", page_tokens: int = 64, match_unit: int = 64) -> Geometry:
        """Sizes of a whole replica of `model`: a config, a preset ("kimi-k3", "kimi-linear", ...) or a checkpoint.

        kv is "bf16" or "fp8"; the state is fp32 with bf16 convolution windows. Raises Error for another kv.
        """
        if kv not in ("bf16", "fp8"):
            raise Error(f"kv is {kv!r}; allowed: 'bf16', 'fp8'")
        config = model if isinstance(model, ModelConfig) else ModelConfig.from_pretrained(PRESETS.get(model, model))
        sizes = count(config)
        token = sizes.kv_bytes_per_token // (2 if kv == "fp8" else 1)
        return cls(token, sizes.kda_state_with_conv_bytes, page_tokens, match_unit)


__all__ = ["GRID", "Geometry"]
