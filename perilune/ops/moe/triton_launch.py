"""Launches of the grouped products and of the activation on a GPU, with a given tile.

Legend: R rows sorted by expert, E experts, L latent width, F expert width, G weight rows, K weight columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from perilune.config import Activation
from perilune.ops.moe.triton_glu import glu_backward_kernel, glu_kernel, zero_tail_kernel
from perilune.ops.moe.triton_packed import packed_glu_product_kernel, packed_product_kernel
from perilune.ops.moe.triton_product import glu_product_kernel, product_kernel, weight_gradient_kernel

# Row tiles of an expert whose rows all columns pass over before the next ones come: their rows stay in the L2 cache.
BAND = 16


@dataclass(frozen=True)
class Tile:
    """rows x columns of the output, the step along the inner dim, and the launch."""

    rows: int
    columns: int
    inner: int
    stages: int
    warps: int
    programs: int = 1
    swap: bool = False
    copy: bool = False


def product(
    x_RK: torch.Tensor,
    weight_EGK: torch.Tensor,
    offs_E: torch.Tensor,
    turned: bool,
    tile: Tile,
    out_RG: torch.Tensor | None = None,
) -> torch.Tensor:
    """y_RG = x W_e^T (x W_e with `turned`) for the rows of each expert, into out_RG (contiguous, on 16 bytes) if given.

    Rows past offs_E[-1] are not written.
    """
    experts, (G, K) = offs_E.shape[0], weight_EGK.shape[1:]
    if turned:
        G, K = K, G
    y_RG = x_RK.new_empty(x_RK.shape[0], G) if out_RG is None else out_RG
    if not y_RG.numel():
        return y_RG
    block = [tile.inner, tile.columns] if turned else [tile.columns, tile.inner]
    product_kernel[_programs(x_RK, tile)](
        _descriptor(x_RK, [tile.rows, tile.inner]),
        _descriptor(weight_EGK.flatten(0, 1), block),
        _descriptor(y_RG, [tile.rows, tile.columns]) if tile.copy else None,
        y_RG, offs_E, experts, G=G, K=K, BE=_padded(experts), BM=tile.rows, BG=tile.columns, BK=tile.inner,
        TURNED=turned, SWAP=tile.swap, STAGES=tile.stages, BAND=BAND, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y_RG


def glu_product(
    x_RL: torch.Tensor,
    gate_up_E2FL: torch.Tensor,
    offs_E: torch.Tensor,
    activation: Activation,
    row_weights_R: torch.Tensor | None,
    keep: bool,
    tile: Tile,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(a_RF, h_R2F or None): both products and the activation in one kernel; `tile.columns` columns of each half."""
    experts, F = offs_E.shape[0], gate_up_E2FL.shape[1] // 2
    a_RF = x_RL.new_empty(x_RL.shape[0], F)
    h_R2F = x_RL.new_empty(x_RL.shape[0], 2 * F) if keep else None
    if not a_RF.numel():
        return a_RF, h_R2F
    glu_product_kernel[_programs(x_RL, tile)](
        _descriptor(x_RL, [tile.rows, tile.inner]),
        _descriptor(gate_up_E2FL.flatten(0, 1), [tile.columns, tile.inner]),
        row_weights_R, h_R2F, a_RF, offs_E, experts, activation.beta, activation.linear_beta,
        F=F, K=x_RL.shape[1], BE=_padded(experts), BM=tile.rows, BF=tile.columns, BK=tile.inner,
        SITU=activation.kind == "situ", WEIGHTED=row_weights_R is not None, KEEP=keep, SWAP=tile.swap,
        STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return a_RF, h_R2F


def packed_product(
    x_RK: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offs_E: torch.Tensor,
    tile: Tile,
    out_RG: torch.Tensor | None = None,
) -> torch.Tensor:
    """`product` through MXFP4 weights: codes uint8 [E, G, K/2], scales uint8 [E, G, K/32]; tile.inner is in bytes."""
    (R, K), G, experts = x_RK.shape, codes.shape[1], offs_E.shape[0]
    y_RG = x_RK.new_empty(R, G) if out_RG is None else out_RG
    if y_RG.numel():
        packed_product_kernel[_programs(x_RK, tile)](
            _descriptor(_split(x_RK), [tile.rows, tile.inner]),
            _descriptor(codes.flatten(0, 1), [tile.columns, tile.inner]),
            scales, y_RG, offs_E, R, experts, G=G, K=K, BE=_padded(experts), BM=tile.rows, BG=tile.columns,
            BB=tile.inner, STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return y_RG


def packed_glu_product(
    x_RL: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offs_E: torch.Tensor,
    activation: Activation,
    row_weights_R: torch.Tensor | None,
    tile: Tile,
) -> torch.Tensor:
    """`glu_product` through MXFP4 weights."""
    (R, L), F, experts = x_RL.shape, codes.shape[1] // 2, offs_E.shape[0]
    a_RF = x_RL.new_empty(R, F)
    if a_RF.numel():
        packed_glu_product_kernel[_programs(x_RL, tile)](
            _descriptor(_split(x_RL), [tile.rows, tile.inner]),
            _descriptor(codes.flatten(0, 1), [tile.columns, tile.inner]),
            scales, row_weights_R, a_RF, offs_E, R, experts, activation.beta, activation.linear_beta,
            F=F, K=L, BE=_padded(experts), BM=tile.rows, BF=tile.columns, BB=tile.inner,
            SITU=activation.kind == "situ", WEIGHTED=row_weights_R is not None,
            STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return a_RF


def weight_gradient(
    d_RG: torch.Tensor,
    x_RK: torch.Tensor,
    offs_E: torch.Tensor,
    tile: Tile,
    skip_empty: bool = False,
    out_EGK: torch.Tensor | None = None,
) -> torch.Tensor:
    """dW [E, G, K] = sum over an expert's rows of d x^T; for an expert without rows zero, or untouched (skip_empty).

    Written to out_EGK (contiguous) if given.
    """
    experts, G, K = offs_E.shape[0], d_RG.shape[1], x_RK.shape[1]
    dw_EGK = x_RK.new_empty(experts, G, K) if out_EGK is None else out_EGK
    if not x_RK.shape[0]:
        return dw_EGK.zero_()
    weight_gradient_kernel[_programs(x_RK, tile)](
        _descriptor(d_RG, [tile.inner, tile.rows]),
        _descriptor(x_RK, [tile.inner, tile.columns]),
        dw_EGK, offs_E, experts, G=G, K=K, BE=_padded(experts), BG=tile.rows, BK=tile.columns, BR=tile.inner,
        SKIP=skip_empty, STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dw_EGK


def glu_forward(
    h_R2F: torch.Tensor, offs_E: torch.Tensor, activation: Activation, row_weights_R: torch.Tensor | None
) -> torch.Tensor:
    """a_RF = w glu(h); rows past offs_E[-1] stay undefined."""
    rows, F = h_R2F.shape[0], h_R2F.shape[1] // 2
    a_RF = h_R2F.new_empty(rows, F)
    if rows:
        glu_kernel[_passes(h_R2F, rows)](
            h_R2F, row_weights_R, a_RF, offs_E, offs_E.shape[0], activation.beta, activation.linear_beta,
            F=F, BF=min(1024, _padded(F)), SITU=activation.kind == "situ", WEIGHTED=row_weights_R is not None,
            num_warps=4,
        )  # fmt: skip
    return a_RF


def glu_backward(
    u_RF: torch.Tensor,
    h_R2F: torch.Tensor,
    offs_E: torch.Tensor,
    activation: Activation,
    row_weights_R: torch.Tensor | None,
    need_a: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(d_h_R2F, the weighted a_RF if needed, d_w_R if there are weights) from u_RF = d_y W_down, not yet weighted."""
    rows, F = u_RF.shape
    d_h_R2F = torch.empty_like(h_R2F)
    a_RF = torch.empty_like(u_RF) if need_a else None
    d_w_R = None if row_weights_R is None else torch.empty_like(row_weights_R)
    if rows:
        glu_backward_kernel[_passes(h_R2F, rows)](
            u_RF, h_R2F, row_weights_R, d_h_R2F, a_RF, d_w_R, offs_E, rows, offs_E.shape[0],
            activation.beta, activation.linear_beta, F=F, BF=min(1024, _padded(F)),
            SITU=activation.kind == "situ", WEIGHTED=row_weights_R is not None, NEED_A=need_a, num_warps=4,
        )  # fmt: skip
    return d_h_R2F, a_RF, d_w_R


def zero_tail(x_RL: torch.Tensor, offs_E: torch.Tensor) -> torch.Tensor:
    """Zero rows past offs_E[-1] of a contiguous [R, L] in place; costs a launch where there are none."""
    rows, L = x_RL.shape
    if x_RL.numel():
        zero_tail_kernel[_passes(x_RL, rows)](
            x_RL, offs_E, offs_E.shape[0], rows, L=L, BL=min(1024, _padded(L)), num_warps=4
        )
    return x_RL


def _split(x_RK: torch.Tensor) -> torch.Tensor:
    """[2R, K/2]: the even columns of all rows, then the odd ones."""
    R, K = x_RK.shape
    return x_RK.view(R, K // 2, 2).permute(2, 0, 1).reshape(2 * R, K // 2)


def _descriptor(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """A tile of x for the copy engine. A thread of autograd's may not have made the device's context its own yet,
    without which the driver refuses to encode the descriptor: any question about the stream does that."""
    if x.is_cuda:
        torch.cuda.is_current_stream_capturing()
    return TensorDescriptor.from_tensor(x, block)


def _padded(number: int) -> int:
    return int(triton.next_power_of_2(number))


def _programs(x: torch.Tensor, tile: Tile) -> tuple[int]:
    return (_processors(x.device) * tile.programs,)


def _passes(x: torch.Tensor, rows: int) -> tuple[int]:
    """Programs of four warps that fill the device; each takes every so-manieth row, and none past the last."""
    return (min(rows, _processors(x.device) * 16),)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
