"""Normalisations over the last dimension. All statistics are in max(fp32, dtype).

Every row's bits depend on that row alone (bitwise-batch) in outputs and input gradients; the gradient of a weight
depends on the layout.

Legend: T tokens, D width; leading dimensions may be several.
"""

from __future__ import annotations

import torch

from perilune.errors import Error
from perilune.ops.checks import check_floats
from perilune.ops.implementation import Implementation, room
from perilune.ops.implementation import implementation as _implementation
from perilune.ops.norm.reference import l2_norm

# The kernels hold whole rows in registers.
MAX_WIDTH = 16384


def rms_norm(x_TD: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
    """w * x / sqrt(mean(x^2) + eps) over the last dimension, in x's dtype.

    Rounded to x's dtype before it is multiplied by the weight, as the released model code does. Raises Error when the
    widths or devices differ, and for dtypes that are not bf16, fp16, fp32 or fp64.
    """
    _check("rms_norm", x_TD, w_D)
    y_TD: torch.Tensor = room(__name__, implementation(x_TD)).rms_norm(x_TD, w_D, eps)
    return y_TD


def add_rms_norm(
    x_TD: torch.Tensor, added_TD: torch.Tensor, w_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(s, rms_norm(s)) with s = x + added rounded to x's dtype: a residual addition and the norm behind it.

    One pass on a GPU, where the gradients of s and of the norm are added in one pass too.
    Raises Error when shapes or dtypes differ, and as `rms_norm`.
    """
    _check("add_rms_norm", x_TD, w_D, added=added_TD)
    if added_TD.shape != x_TD.shape or added_TD.dtype != x_TD.dtype:
        raise Error(
            f"add_rms_norm: added is {added_TD.dtype} {tuple(added_TD.shape)}, x is {x_TD.dtype} {tuple(x_TD.shape)}; "
            "they must be equal"
        )
    both: tuple[torch.Tensor, torch.Tensor] = room(__name__, implementation(x_TD)).add_rms_norm(
        x_TD, added_TD, w_D, eps
    )
    return both


def gated_rms_norm(x_TD: torch.Tensor, w_D: torch.Tensor, gate_TD: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm(x; w) * sigmoid(gate), in fp32 (fp64 for fp64 input) throughout, cast once to x's dtype.

    The output norm of KDA, per head: x_THV, w_V, gate_THV. Raises Error when the shapes differ, and as
    `rms_norm`.
    """
    _check("gated_rms_norm", x_TD, w_D, gate=gate_TD)
    if gate_TD.shape != x_TD.shape:
        raise Error(f"gated_rms_norm: gate has shape {tuple(gate_TD.shape)}, x has {tuple(x_TD.shape)}; must be equal")
    y_TD: torch.Tensor = room(__name__, implementation(x_TD)).gated_rms_norm(x_TD, w_D, gate_TD, eps)
    return y_TD


def implementation(x_TD: torch.Tensor) -> Implementation:
    """Which code the RMS norms run for such rows; `l2_norm` is the reference everywhere."""
    return _implementation(x_TD, 1 <= x_TD.shape[-1] <= MAX_WIDTH)


def _check(op: str, x: torch.Tensor, w: torch.Tensor, **more: torch.Tensor) -> None:
    if not x.ndim or w.shape != x.shape[-1:]:
        raise Error(f"{op}: weight has shape {tuple(w.shape)}; x of {tuple(x.shape)} needs {tuple(x.shape[-1:])}")
    check_floats(op, x=x, weight=w, **more)


__all__ = ["add_rms_norm", "gated_rms_norm", "implementation", "l2_norm", "rms_norm"]
