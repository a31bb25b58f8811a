"""Which code an operation runs: its folder's `triton.py` on a GPU, its `reference.py` elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Literal

import torch

Implementation = Literal["triton", "reference"]


def implementation(x: torch.Tensor, supported: bool = True) -> Implementation:
    """ "triton" on CUDA where Triton is installed, for bf16, fp16 and fp32 and what the kernels support."""
    narrow = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return "triton" if x.is_cuda and narrow and supported and _installed() else "reference"


def room(folder: str, name: str) -> ModuleType:
    """The module of a folder's implementation, imported late: Triton is an optional dependency."""
    return importlib.import_module(f"{folder}.{name}")


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


__all__ = ["Implementation", "implementation", "room"]
