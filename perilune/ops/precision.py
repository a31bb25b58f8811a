"""The dtype in which statistics and sums are taken: max(fp32, the input's dtype)."""

from __future__ import annotations

import torch


def widen(x: torch.Tensor) -> torch.Tensor:
    """x in fp32, or as it is when it is fp64."""
    return x if x.dtype == torch.float64 else x.float()


__all__ = ["widen"]
