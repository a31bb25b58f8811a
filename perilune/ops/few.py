"""Products of one or two rows with small weights on a GPU, where a library's kernels leave most of it idle.

Legend: T tokens, D input width, F output width.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch

from perilune.config import Activation

ROWS = 2
# Larger weights fill an H200 by the library's kernels too.
WEIGHTS = 10_000_000


def fits(x_TD: torch.Tensor, w_FD: torch.Tensor) -> bool:
    """Whether `multiply` takes these and is the faster way: bf16, one or two rows, no gradient."""
    few = x_TD.is_cuda and x_TD.dim() == 2 and 0 < x_TD.shape[0] <= ROWS and w_FD.numel() <= WEIGHTS
    plain = few and x_TD.dtype == w_FD.dtype == torch.bfloat16 and x_TD.stride(1) == w_FD.stride(1) == 1
    return plain and not torch.is_grad_enabled() and importlib.util.find_spec("triton") is not None


def multiply(x_TD: torch.Tensor, w_FD: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """y_TF = x w^T of tensors that fit, added in fp32 and rounded once to out_dtype (default: x's)."""
    y_TF: torch.Tensor = _triton().multiply_few(x_TD, w_FD, out_dtype)
    return y_TF


def glu(x_TD: torch.Tensor, gate_FD: torch.Tensor, up_FD: torch.Tensor, activation: Activation) -> torch.Tensor:
    """glu(x gate^T, x up^T) [T, F] of tensors that fit; both products are rounded to bf16 before the activation."""
    a_TF: torch.Tensor = _triton().glu_few(x_TD, gate_FD, up_FD, activation)
    return a_TF


@cache
def _triton() -> ModuleType:
    return importlib.import_module("perilune.ops.few_triton")


__all__ = ["fits", "glu", "multiply"]
