"""A mixture over some of the sources, ready to be merged with the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Partial:
    """h_TD: the mixture over those sources alone, in their dtype. lse_T: log sum e^s over them, fp32 or wider."""

    h_TD: torch.Tensor
    lse_T: torch.Tensor


__all__ = ["Partial"]
