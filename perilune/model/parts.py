"""The callables a model is put together from: the seam for parallel, memory and exact versions of an operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from perilune.ops import kda as kda_ops
from perilune.ops import mla as mla_ops
from perilune.ops import moe as moe_ops
from perilune.ops.linear import linear, linear_exact


@dataclass(frozen=True)
class Parts:
    """One callable an operation, each with the signature of its namesake in `perilune.ops`.

    kda: `ops.kda.kda`; mla: `ops.mla.attention`; experts: `ops.moe.experts`; linear: `ops.linear.linear`.
    """

    kda: Callable[..., Any] = kda_ops.kda
    mla: Callable[..., Any] = mla_ops.attention
    experts: Callable[..., torch.Tensor] = moe_ops.experts
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = linear


DEFAULT = Parts()

# A token's numbers do not depend on what else is in the call (level bitwise-batch; fp32 or fp64, no gradient in MLA).
EXACT = Parts(
    mla=mla_ops.attention_exact,
    experts=partial(moe_ops.experts, exact=True),
    linear=linear_exact,
)
