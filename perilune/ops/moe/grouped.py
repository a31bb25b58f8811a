"""The experts themselves: two grouped matrix products around a gated activation, as one autograd function.

rows of expert e: y = down_e @ glu(gate_up_e[:F] @ x, gate_up_e[F:] @ x).
Only rows, weights and offs are kept for the backward pass; the activations are computed again there.

Legend: R rows sorted by expert, E experts, L latent (input and output) width, F expert width, G weight rows,
K weight columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as nnf

from perilune.config import Activation
from perilune.errors import Error
from perilune.ops.activation import glu_backward, glu_forward
from perilune.ops.linear import linear_exact
from perilune.ops.mx import decode_mxfp4


@dataclass(frozen=True)
class Dense:
    """Trainable weights: gate_up_E2FL holds w1 (gate) in its first F rows and w3 (up) in the next F; down_ELF is w2."""

    gate_up_E2FL: torch.Tensor
    down_ELF: torch.Tensor


@dataclass(frozen=True)
class Packed:
    """Frozen MXFP4 weights (`perilune.ops.mx`), decoded one expert at a time while they are used.

    gate_up_codes uint8 [E, 2F, L/2], gate_up_scales uint8 [E, 2F, L/32];
    down_codes uint8 [E, L, F/2], down_scales uint8 [E, L, F/32].
    """

    gate_up_codes: torch.Tensor
    gate_up_scales: torch.Tensor
    down_codes: torch.Tensor
    down_scales: torch.Tensor


def experts(
    rows_RL: torch.Tensor, weights: Dense | Packed, offs_E: torch.Tensor, activation: Activation, exact: bool = False
) -> torch.Tensor:
    """y_RL, each row through its expert: expert e owns rows offs_E[e-1]:offs_E[e] (offs_E int32 ends, from 0).

    Rows past offs_E[-1] are not read; their outputs and input gradients are zero. Experts without rows get zero
    weight gradients. Products accumulate in max(fp32, dtype). `exact` makes each row's bits depend on that row alone
    (bitwise-batch, CPU, fp32 and fp64); without it the level is bitwise-layout. Packed weights get no gradient,
    the rows do. Raises Error when shapes do not fit together.
    """
    if isinstance(weights, Packed):
        _check_packed(rows_RL, weights, offs_E)
        tensors: _Tensors = (weights.gate_up_codes, weights.down_codes, weights.gate_up_scales, weights.down_scales)
    else:
        _check_dense(rows_RL, weights, offs_E)
        tensors = (weights.gate_up_E2FL, weights.down_ELF, None, None)
    y_RL: torch.Tensor = _Experts.apply(rows_RL, offs_E, activation, exact, *tensors)  # type: ignore[no-untyped-call]
    return y_RL


_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RL: torch.Tensor,
        offs_E: torch.Tensor,
        activation: Activation,
        exact: bool,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_scales: torch.Tensor | None,
        down_scales: torch.Tensor | None,
    ) -> torch.Tensor:
        rows_RL = rows_RL.contiguous()
        ctx.save_for_backward(rows_RL, offs_E, gate_up, down, gate_up_scales, down_scales)
        ctx.activation, ctx.exact = activation, exact
        h_R2F = _product(rows_RL, _Weight(gate_up, gate_up_scales), offs_E, exact)
        gate_RF, up_RF = h_R2F.chunk(2, -1)
        a_RF = glu_forward(gate_RF, up_RF, activation)
        return _zero_tail(_product(a_RF, _Weight(down, down_scales), offs_E, exact), offs_E)

    @staticmethod
    def backward(ctx: Any, d_y_RL: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_RL, offs_E, gate_up, down, gate_up_scales, down_scales = ctx.saved_tensors
        need_rows, need_gate_up, need_down = (ctx.needs_input_grad[i] for i in (0, 4, 5))
        up_weight, down_weight = _Weight(gate_up, gate_up_scales), _Weight(down, down_scales)
        d_y_RL = d_y_RL.contiguous()
        h_R2F = _product(rows_RL, up_weight, offs_E, ctx.exact)
        gate_RF, up_RF = h_R2F.chunk(2, -1)
        d_down = None
        if need_down:
            d_down = _weight_gradient(d_y_RL, glu_forward(gate_RF, up_RF, ctx.activation), offs_E)
        d_a_RF = _product(d_y_RL, down_weight.transposed(), offs_E, ctx.exact)
        d_h_R2F = glu_backward(d_a_RF, gate_RF, up_RF, ctx.activation)
        d_gate_up = _weight_gradient(d_h_R2F, rows_RL, offs_E) if need_gate_up else None
        d_rows_RL = None
        if need_rows:
            d_rows_RL = _zero_tail(_product(d_h_R2F, up_weight.transposed(), offs_E, ctx.exact), offs_E)
        return d_rows_RL, None, None, None, d_gate_up, d_down, None, None


@dataclass(frozen=True)
class _Weight:
    """[E, G, K], dense (scales is None) or MXFP4; `turned` means that its transpose multiplies."""

    stored: torch.Tensor
    scales: torch.Tensor | None
    turned: bool = False

    def transposed(self) -> _Weight:
        return _Weight(self.stored, self.scales, not self.turned)

    def expert(self, e: int, dtype: torch.dtype) -> torch.Tensor:
        w_GK = self.stored[e] if self.scales is None else decode_mxfp4(self.stored[e], self.scales[e], dtype)
        return w_GK.t() if self.turned else w_GK


def _product(x_RK: torch.Tensor, weight: _Weight, offs_E: torch.Tensor, exact: bool) -> torch.Tensor:
    """y_RG with y = x W_e^T for the rows of expert e. What stands past offs_E[-1] is undefined."""
    if weight.scales is None and not exact and _fits_grouped_mm(x_RK, *weight.stored.shape[1:]):
        w_EKG = weight.stored if weight.turned else weight.stored.transpose(1, 2)
        return nnf.grouped_mm(x_RK, w_EKG, offs=offs_E)
    # One product per expert: the bits of grouped_mm depend on the other rows, and it cannot decode.
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = linear_exact if exact else nnf.linear
    ends = [0, *offs_E.tolist()]
    parts = [
        multiply(x_RK[start:end], weight.expert(e, x_RK.dtype))
        for e, (start, end) in enumerate(pairwise(ends))
        if end > start
    ]
    width = _columns(weight)
    parts.append(x_RK.new_zeros(x_RK.shape[0] - ends[-1], width))
    return torch.cat(parts)


def _weight_gradient(d_RG: torch.Tensor, x_RK: torch.Tensor, offs_E: torch.Tensor) -> torch.Tensor:
    """[E, G, K]: sum over the rows of each expert of d x^T; zero for an expert without rows."""
    if _fits_grouped_mm(x_RK, d_RG.shape[1], x_RK.shape[1]):
        return nnf.grouped_mm(d_RG.t(), x_RK, offs=offs_E)
    ends = [0, *offs_E.tolist()]
    return torch.stack([d_RG[a:b].t() @ x_RK[a:b] for a, b in pairwise(ends)])


def _fits_grouped_mm(x_RK: torch.Tensor, *widths: int) -> bool:
    """Whether grouped_mm takes these operands: no fp64, only bf16 on a GPU, rows of whole 16 bytes, some rows."""
    known = x_RK.dtype == torch.bfloat16 or (x_RK.device.type == "cpu" and x_RK.dtype != torch.float64)
    return known and x_RK.shape[0] > 0 and all(width * x_RK.element_size() % 16 == 0 for width in widths)


def _zero_tail(x_RL: torch.Tensor, offs_E: torch.Tensor) -> torch.Tensor:
    """Zero rows past offs_E[-1] in place (grouped_mm leaves them uninitialised)."""
    if x_RL.device.type == "cpu":
        x_RL[int(offs_E[-1]) :].zero_()
        return x_RL
    # On a device, without reading offs_E back.
    past_R = torch.arange(x_RL.shape[0], device=x_RL.device) >= offs_E[-1]
    return x_RL.masked_fill_(past_R.unsqueeze(-1), 0)


def _columns(weight: _Weight) -> int:
    rows, columns = weight.stored.shape[1:]
    if weight.scales is not None:
        columns *= 2
    return columns if weight.turned else rows


def _check_dense(rows_RL: torch.Tensor, weights: Dense, offs_E: torch.Tensor) -> None:
    gate_up, down = weights.gate_up_E2FL, weights.down_ELF
    number, width, latent = offs_E.shape[0], down.shape[-1], rows_RL.shape[-1]
    _check_shape("gate_up_E2FL", gate_up, (number, 2 * width, latent))
    _check_shape("down_ELF", down, (number, latent, width))
    for name, w in (("gate_up_E2FL", gate_up), ("down_ELF", down)):
        if w.dtype != rows_RL.dtype:
            raise Error(f"experts: {name} is {w.dtype} but the rows are {rows_RL.dtype}; they must be equal")


def _check_packed(rows_RL: torch.Tensor, weights: Packed, offs_E: torch.Tensor) -> None:
    number, width, latent = offs_E.shape[0], weights.down_codes.shape[-1] * 2, rows_RL.shape[-1]
    _check_shape("gate_up_codes", weights.gate_up_codes, (number, 2 * width, latent // 2))
    _check_shape("gate_up_scales", weights.gate_up_scales, (number, 2 * width, latent // 32))
    _check_shape("down_codes", weights.down_codes, (number, latent, width // 2))
    _check_shape("down_scales", weights.down_scales, (number, latent, width // 32))


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise Error(f"experts: {name} has shape {tuple(tensor.shape)}; rows and offs_E need {shape}")


__all__ = ["Dense", "Packed", "experts"]
