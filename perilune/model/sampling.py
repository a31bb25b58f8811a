"""From logits to tokens, many rows at once: temperature, top-k, top-p, min-p, and the draw.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perilune.errors import Error
from perilune.ops.upload import upload


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 takes the most likely one; None switches a filter off.

    The filters apply in the order top_k, top_p, min_p, each to the distribution after temperature.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise Error(f"temperature is {self.temperature}; must be >= 0")
        if self.top_k is not None and self.top_k < 1:
            raise Error(f"top_k is {self.top_k}; must be >= 1")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise Error(f"{name} is {value}; must be in (0, 1]")


def ordered(logits_NV: torch.Tensor, samplings: Sequence[Sampling]) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights_NV, largest first, 0 where a filter takes a token out, and the token ids_NV they belong to.

    temperature must be > 0. Weights do not add up to 1 again after a filter. In the dtype of the logits.
    """
    temperature_N1 = _column([s.temperature for s in samplings], logits_NV)
    weights_NV, ids_NV = torch.softmax(logits_NV / temperature_N1, dim=-1).sort(descending=True, stable=True)
    vocabulary = logits_NV.shape[-1]
    if any(s.top_k is not None for s in samplings):
        top_k_N1 = _column([s.top_k or vocabulary for s in samplings], logits_NV)
        weights_NV[torch.arange(vocabulary, device=logits_NV.device) >= top_k_N1] = 0
    if any(s.top_p is not None for s in samplings):
        # A token stays if the mass before it has not yet reached top_p; the first always stays.
        top_p_N1 = _column([2.0 if s.top_p is None else s.top_p for s in samplings], logits_NV)
        total_N1 = weights_NV.sum(-1, keepdim=True)
        weights_NV[weights_NV.cumsum(-1) - weights_NV >= top_p_N1 * total_N1] = 0
    if any(s.min_p is not None for s in samplings):
        min_p_N1 = _column([s.min_p or 0.0 for s in samplings], logits_NV)
        weights_NV[weights_NV < min_p_N1 * weights_NV[:, :1]] = 0
    return weights_NV, ids_NV


def draw(weights_NV: torch.Tensor, ids_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """ids_N: the token in whose share of the cumulated weights the number uniform_N in [0, 1) falls."""
    cumulated_NV = weights_NV.cumsum(-1)
    at_N1 = (uniform_N.to(weights_NV.dtype) * cumulated_NV[:, -1]).unsqueeze(-1)
    place_N1 = torch.searchsorted(cumulated_NV, at_N1, right=True)
    # Rounding may push the number past the last token that has weight.
    last_N1 = (weights_NV > 0).sum(-1, keepdim=True) - 1
    return ids_NV.gather(-1, torch.minimum(place_N1, last_N1)).squeeze(-1)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return upload(list(values), like.dtype, like.device).unsqueeze(-1)


__all__ = ["Sampling", "draw", "ordered"]
