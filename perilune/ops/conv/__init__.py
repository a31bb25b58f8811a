"""Short causal depthwise convolution on packed sequences.

Legend: T tokens, N sequences, C channels, W taps (4).
"""

from __future__ import annotations

import torch

from perilune.errors import Error
from perilune.ops.checks import check_floats
from perilune.ops.conv.reference import WIDTH
from perilune.ops.implementation import Implementation, room
from perilune.ops.implementation import implementation as _implementation
from perilune.ops.sequences import Sequences


def short_conv(
    u_TC: torch.Tensor, w_CW: torch.Tensor, sequences: Sequences, window_N3C: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """y_t = silu(sum_j w[:, j] u_{t-3+j}) within each document; w[:, 3] weighs the current token.

    window_N3C: the last three inputs (before the convolution) of each document, oldest first; None means zeros.
    Returns y_TC and the window after the last token, both in u's dtype; computed in fp32 (fp64 for fp64 inputs).
    Differentiable once. Level: bitwise-batch in outputs and in the gradients of inputs and windows; the gradient of
    the weights depends on the layout. Raises Error on other shapes and dtypes, and on mixed devices.
    Source: short convolution of Mamba (arXiv:2312.00752) as used by Kimi Linear (arXiv:2510.26692).
    """
    if u_TC.ndim != 2:
        raise Error(f"short_conv: u has shape {tuple(u_TC.shape)}; must be [T, C]")
    sequences.check_total("short_conv: u", u_TC.shape[0])
    channels = u_TC.shape[1]
    if tuple(w_CW.shape) != (channels, WIDTH):
        raise Error(f"short_conv: w has shape {tuple(w_CW.shape)}; must be {(channels, WIDTH)}")
    shape = (sequences.count, WIDTH - 1, channels)
    if window_N3C is not None and tuple(window_N3C.shape) != shape:
        raise Error(f"short_conv: window has shape {tuple(window_N3C.shape)}; must be {shape}")
    check_floats("short_conv", u=u_TC, w=w_CW, window=window_N3C)
    module = room(__name__, implementation(u_TC, w_CW))
    both: tuple[torch.Tensor, torch.Tensor] = module.short_conv(u_TC, w_CW, sequences, window_N3C)
    return both


def implementation(u_TC: torch.Tensor, w_CW: torch.Tensor) -> Implementation:
    """Which code `short_conv` runs for such tensors."""
    return _implementation(u_TC, w_CW.dtype != torch.float64)


__all__ = ["WIDTH", "implementation", "short_conv"]
