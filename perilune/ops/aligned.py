"""Tensors as the copy engine and vector loads read them."""

from __future__ import annotations

import torch


def on_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it: contiguous, and at an address that is a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


__all__ = ["on_16_bytes"]
