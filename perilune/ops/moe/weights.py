"""The experts' weights, and the checks that the arguments of `experts` fit together.

Legend: R rows sorted by expert, T tokens, E experts, L latent (input and output) width, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perilune.errors import Error
from perilune.ops.checks import check_device, check_floats

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Dense:
    """Trainable weights: gate_up_E2FL holds w1 (gate) in its first F rows and w3 (up) in the next F; down_ELF is w2."""

    gate_up_E2FL: torch.Tensor
    down_ELF: torch.Tensor


@dataclass(frozen=True)
class Packed:
    """Frozen MXFP4 weights (`perilune.ops.mx`), decoded while they are used: one expert at a time, or in registers.

    gate_up_codes uint8 [E, 2F, L/2], gate_up_scales uint8 [E, 2F, L/32];
    down_codes uint8 [E, L, F/2], down_scales uint8 [E, L, F/32].
    """

    gate_up_codes: torch.Tensor
    gate_up_scales: torch.Tensor
    down_codes: torch.Tensor
    down_scales: torch.Tensor


def checked(
    rows_RL: torch.Tensor,
    weights: Dense | Packed,
    offs_E: torch.Tensor,
    row_weights_R: torch.Tensor | None,
    order_R: torch.Tensor | None = None,
) -> Tensors:
    """The tensors of the weights, once everything fits together."""
    tokens, rows = rows_RL.shape[0], (rows_RL if order_R is None else order_R).shape[0]
    if order_R is not None and (rows % max(1, tokens) or bool(rows) != bool(tokens)):
        raise Error(f"experts: order_R has {rows} rows; must be a multiple of the {tokens} tokens")
    if row_weights_R is not None:
        check_shape("row_weights_R", row_weights_R, (rows,))
        wide = torch.promote_types(rows_RL.dtype, torch.float32)
        if row_weights_R.dtype != wide:
            raise Error(f"experts: row_weights_R is {row_weights_R.dtype}; must be {wide} for rows of {rows_RL.dtype}")
        check_device("experts", "rows_RL", rows_RL, "row_weights_R", row_weights_R)
    if offs_E.dtype != torch.int32 or offs_E.dim() != 1 or not offs_E.is_contiguous():
        raise Error(f"experts: offs_E is {offs_E.dtype} {tuple(offs_E.shape)}; must be contiguous torch.int32 [E]")
    check_floats("experts", rows_RL=rows_RL)
    for name, x in {"offs_E": offs_E, "order_R": order_R, **vars(weights)}.items():
        if x is not None:
            check_device("experts", "rows_RL", rows_RL, name, x)
    if isinstance(weights, Packed):
        _check_packed(rows_RL, weights, offs_E)
    else:
        _check_dense(rows_RL, weights, offs_E)
    return tensors_of(weights)


def tensors_of(weights: Dense | Packed) -> Tensors:
    if isinstance(weights, Packed):
        return weights.gate_up_codes, weights.down_codes, weights.gate_up_scales, weights.down_scales
    return weights.gate_up_E2FL, weights.down_ELF, None, None


def _check_dense(rows_RL: torch.Tensor, weights: Dense, offs_E: torch.Tensor) -> None:
    gate_up, down = weights.gate_up_E2FL, weights.down_ELF
    number, width, latent = offs_E.shape[0], down.shape[-1], rows_RL.shape[-1]
    check_shape("gate_up_E2FL", gate_up, (number, 2 * width, latent))
    check_shape("down_ELF", down, (number, latent, width))
    for name, w in (("gate_up_E2FL", gate_up), ("down_ELF", down)):
        if w.dtype != rows_RL.dtype:
            raise Error(f"experts: {name} is {w.dtype} but the rows are {rows_RL.dtype}; they must be equal")


def _check_packed(rows_RL: torch.Tensor, weights: Packed, offs_E: torch.Tensor) -> None:
    number, width, latent = offs_E.shape[0], weights.down_codes.shape[-1] * 2, rows_RL.shape[-1]
    check_shape("gate_up_codes", weights.gate_up_codes, (number, 2 * width, latent // 2))
    check_shape("gate_up_scales", weights.gate_up_scales, (number, 2 * width, latent // 32))
    check_shape("down_codes", weights.down_codes, (number, latent, width // 2))
    check_shape("down_scales", weights.down_scales, (number, latent, width // 32))


def check_out(name: str, out_RL: torch.Tensor, rows_RL: torch.Tensor, rows: int) -> None:
    check_shape(name, out_RL, (rows, rows_RL.shape[1]))
    if out_RL.dtype != rows_RL.dtype or not out_RL.is_contiguous() or out_RL.data_ptr() % 16:
        raise Error(f"experts: {name} is {out_RL.dtype}; must be contiguous {rows_RL.dtype} on 16 bytes")


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise Error(f"experts: {name} has shape {tuple(tensor.shape)}; rows and offs_E need {tuple(shape)}")


__all__ = ["Dense", "Packed", "Tensors", "check_out", "check_shape", "checked", "tensors_of"]
