"""The pieces of the experts on a GPU, of the same names as those of `products`: which kernel, which tile.

Many rows an expert: the products are bound by arithmetic, and the activation is a pass of its own over h. As the
product's epilogue it took longer than the pass, since no warp multiplies meanwhile. Few rows: the products are a stream
of weights, and the activation in the epilogue spares a launch and the trip through memory.

Legend: R rows sorted by expert, E experts, L latent width, F expert width, G weight rows, K weight columns.
"""

from __future__ import annotations

import torch

from perilune.config import Activation
from perilune.ops.aligned import on_16_bytes
from perilune.ops.moe import packed_cuda, products, triton_launch
from perilune.ops.moe.products import Weight
from perilune.ops.moe.triton_launch import Tile, glu_backward, zero_tail
from perilune.ops.mx import decode_mxfp4

# Rows an expert has on average, up to which its weights are streamed past few rows.
FEW = 64
# The fastest on an H200 at Kimi-K3 widths of those tried (bench/modules.py).
MANY = Tile(128, 256, 64, 3, 8, copy=True)
GRADIENT = Tile(128, 256, 64, 3, 8)


def supports(rows_RL: torch.Tensor, *weights: torch.Tensor | None) -> bool:
    """bfloat16 rows; weights bfloat16, widths of whole 64s, or MXFP4 (uint8), whole 128s; contiguous, on 16 bytes."""
    given = [t for t in weights if t is not None]
    dense = all(t.dtype == torch.bfloat16 and t.shape[-1] % 64 == 0 for t in given)
    # A block of codes is 64 bytes, 128 weights; its scales 4 bytes.
    packed = all(t.dtype == torch.uint8 and t.shape[-1] % 4 == 0 for t in given) and rows_RL.shape[-1] % 128 == 0
    placed = all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in given)
    return rows_RL.dtype == torch.bfloat16 and placed and (dense or packed)


def many(rows: int, experts: int) -> bool:
    """Whether the products are taken to be bound by arithmetic."""
    return rows > FEW * experts


def product(
    x_RK: torch.Tensor, weight: Weight, offs_E: torch.Tensor, exact: bool = False, out_RG: torch.Tensor | None = None
) -> torch.Tensor:
    """See `products.product`."""
    x_RK, experts = on_16_bytes(x_RK), offs_E.shape[0]
    stored = weight.stored
    if weight.scales is not None:
        if not weight.turned and packed_cuda.why_not(x_RK, stored, experts) is None:
            return packed_cuda.product(x_RK, stored, weight.scales, offs_E, out_RG)
        if not weight.turned and not many(x_RK.shape[0], experts):
            tile = _packed(x_RK.shape[0], experts)
            return triton_launch.packed_product(x_RK, stored, weight.scales, offs_E, tile, out_RG)
        # Each weight meets many rows: decoding all of them once costs less than decoding at every tile of rows.
        stored = decode_mxfp4(stored, weight.scales, x_RK.dtype)
    tile = MANY if many(x_RK.shape[0], experts) else _low(x_RK.shape[0], experts, halves=1)
    return triton_launch.product(x_RK, stored, offs_E, weight.turned, tile, out_RG)


def glu_product(
    x_RL: torch.Tensor,
    gate_up: Weight,
    offs_E: torch.Tensor,
    activation: Activation,
    row_weights_R: torch.Tensor | None,
    keep: bool,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `products.glu_product`."""
    experts = offs_E.shape[0]
    packed = gate_up.scales is not None
    hopper = packed and packed_cuda.why_not(x_RL, gate_up.stored, experts) is None
    few = packed_cuda.few(x_RL.shape[0], experts) if hopper else not many(x_RL.shape[0], experts)
    if not few or (packed and keep):
        h_R2F = product(x_RL, gate_up, offs_E)
        return triton_launch.glu_forward(h_R2F, offs_E, activation, row_weights_R), h_R2F if keep else None
    x_RL = on_16_bytes(x_RL)
    if gate_up.scales is not None:
        weights = (gate_up.stored, gate_up.scales)
        if hopper:
            return packed_cuda.glu_product(x_RL, *weights, offs_E, activation, row_weights_R), None
        tile = _packed(x_RL.shape[0], experts)
        return triton_launch.packed_glu_product(x_RL, *weights, offs_E, activation, row_weights_R, tile), None
    tile = _low(x_RL.shape[0], experts, halves=2)
    return triton_launch.glu_product(x_RL, gate_up.stored, offs_E, activation, row_weights_R, keep, tile)


def weight_gradient(
    d_RG: torch.Tensor,
    x_RK: torch.Tensor,
    offs_E: torch.Tensor,
    skip_empty: bool = False,
    out_EGK: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `products.weight_gradient`. `grouped_mm` is faster, but writes every expert."""
    if skip_empty:
        return triton_launch.weight_gradient(on_16_bytes(d_RG), on_16_bytes(x_RK), offs_E, GRADIENT, True, out_EGK)
    return products.weight_gradient(d_RG, x_RK, offs_E, out_EGK=out_EGK)


def _low(rows: int, experts: int, halves: int) -> Tile:
    """As low as an expert's rows are likely to be: a second row tile finds the weights in the L2 cache."""
    if rows <= 12 * experts:
        return Tile(16, 64, 128, 5 - halves, 4, 2, swap=True)
    return Tile(64, 128, 64 if halves == 2 else 128, 4, 8, 1, swap=True)


def _packed(rows: int, experts: int) -> Tile:
    return Tile(16 if rows <= 12 * experts else 64, 128, 64, 3, 4, 3, swap=True)


__all__ = ["glu_backward", "glu_product", "many", "product", "supports", "weight_gradient", "zero_tail"]
