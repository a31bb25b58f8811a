"""What operations ask of their tensors before any work."""

from __future__ import annotations

import torch

from perilune.errors import Error

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_floats(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise Error unless all that are given are bf16, fp16, fp32 or fp64, and on the first one's device."""
    first = next(iter(tensors))
    for name, x in tensors.items():
        if x is None:
            continue
        if x.dtype not in FLOATS:
            raise Error(f"{op}: {name} is {x.dtype}; allowed: bfloat16, float16, float32, float64")
        check_device(op, first, tensors[first], name, x)


def check_device(op: str, first: str, held: torch.Tensor | None, name: str, x: torch.Tensor) -> None:
    """Raise Error unless x is where `held`, called `first`, is."""
    if held is not None and x.device != held.device:
        raise Error(f"{op}: {name} is on {x.device}; must be on {held.device} as {first} is")


__all__ = ["check_device", "check_floats"]
