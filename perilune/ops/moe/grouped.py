"""The experts themselves: two grouped matrix products around a gated activation, as one autograd function.

rows of expert e: y = down_e @ a, a = w glu(gate_up_e[:F] @ x, gate_up_e[F:] @ x), with w = 1 or one weight a row.
A row's weight multiplies a and not y, so its gradient needs no expert output: with u = down_e^T d_y,
d_w = sum_F u glu(...) and d_glu = w u (Kimi-K3 report, memory-efficient MoE). Only rows, weights and offs are kept for
the backward pass; the activations are computed again there.

Legend: R rows sorted by expert, E experts, L latent (input and output) width, F expert width, G weight rows,
K weight columns.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any, Literal

import torch

from perilune.config import Activation
from perilune.errors import Error
from perilune.ops.moe import products
from perilune.ops.moe.products import Weight
from perilune.ops.moe.routing import spread, sum_choices
from perilune.ops.moe.weights import Dense, Packed, Tensors, check_out, check_shape, checked, tensors_of

Save = Literal["inputs", "all"]


def experts(
    rows_RL: torch.Tensor,
    weights: Dense | Packed,
    offs_E: torch.Tensor,
    activation: Activation,
    exact: bool = False,
    row_weights_R: torch.Tensor | None = None,
    save: Save = "inputs",
    clean: bool = True,
    order_R: torch.Tensor | None = None,
    out_RL: torch.Tensor | None = None,
) -> torch.Tensor:
    """y_RL, each row through its expert: expert e owns rows offs_E[e-1]:offs_E[e] (offs_E int32 ends, from 0).

    order_R: of `permute`; then rows_RL is x_TL and row r is x[order_R[r] // (R / T)]: `dispatch` and this in one, for
    which x alone is kept and dispatched again in the backward pass.
    out_RL: where y_RL is written, contiguous on 16 bytes, possibly rows_RL itself; only where no gradient is taken.

    row_weights_R: fp32 (fp64 for fp64 rows) [R], y_r = w_r * down(a_r), the routing weights where the combination is a
    plain sum. Applied to the activation before it is rounded, and differentiable: d_w_r comes from the activation, so
    the outputs need not be kept (nor are they, whatever `save` says).
    save: "inputs" keeps rows, weights and offs for the backward pass and computes gate_up @ x again there, "all" keeps
    that product too (2F more numbers a row, a quarter less work backward). Gradients are the same bits.

    Rows past offs_E[-1] and their weights are not read; their outputs and gradients are zero, or undefined without
    `clean` (for static buffers whose tail nobody reads: the pass over it is spared). Experts without rows get
    zero weight gradients. Products accumulate in max(fp32, dtype). `exact` makes each row's bits depend on that row
    alone (bitwise-batch, CPU, fp32 and fp64); without it the level is bitwise-layout. Packed weights get no gradient,
    the rows do. Raises Error when shapes or dtypes do not fit together.
    """
    tensors = checked(rows_RL, weights, offs_E, row_weights_R, order_R)
    if save not in ("inputs", "all"):
        raise Error(f"experts: save is {save!r}; allowed: 'inputs', 'all'")
    if out_RL is not None:
        check_out("out_RL", out_RL, rows_RL, (rows_RL if order_R is None else order_R).shape[0])
        if torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (rows_RL, row_weights_R, *tensors)
        ):
            raise Error("experts: out_RL is given but a gradient is wanted; call it under torch.no_grad()")
    # All dispatched rows are some expert's: there is no tail.
    options = (activation, exact, save, clean and order_R is None)
    if out_RL is not None:
        return _forward(rows_RL.contiguous(), row_weights_R, order_R, offs_E, options, tensors, out_RL)[0]
    y_RL: torch.Tensor = _Experts.apply(rows_RL, row_weights_R, order_R, offs_E, options, *tensors)  # type: ignore[no-untyped-call]
    return y_RL


_Options = tuple[Activation, bool, Save, bool]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RL: torch.Tensor,
        row_weights_R: torch.Tensor | None,
        order_R: torch.Tensor | None,
        offs_E: torch.Tensor,
        options: _Options,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_scales: torch.Tensor | None,
        down_scales: torch.Tensor | None,
    ) -> torch.Tensor:
        x_RL, tensors = rows_RL.contiguous(), (gate_up, down, gate_up_scales, down_scales)
        y_RL, h_R2F = _forward(x_RL, row_weights_R, order_R, offs_E, options, tensors, None)
        ctx.options = options
        ctx.save_for_backward(x_RL, row_weights_R, order_R, offs_E, *tensors, h_R2F)
        return y_RL

    @staticmethod
    def backward(ctx: Any, d_y_RL: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_RL, row_weights_R, order_R, offs_E, *tensors, h_R2F = ctx.saved_tensors
        activation, exact, _, clean = ctx.options
        wanted = tuple(ctx.needs_input_grad[i] for i in (0, 5, 6))
        if order_R is not None:
            top_k = _choices(rows_RL, order_R)
            rows_RL = spread(rows_RL, order_R, top_k)
        d_rows_RL, d_row_weights_R, d_gate_up, d_down = _backward(
            d_y_RL, rows_RL, row_weights_R, offs_E, (*tensors,), activation, exact, clean, h_R2F, wanted
        )
        if order_R is not None and d_rows_RL is not None:
            d_rows_RL = sum_choices(d_rows_RL, order_R, top_k)
        return d_rows_RL, d_row_weights_R, None, None, None, d_gate_up, d_down, None, None


def _forward(
    x_RL: torch.Tensor,
    row_weights_R: torch.Tensor | None,
    order_R: torch.Tensor | None,
    offs_E: torch.Tensor,
    options: _Options,
    tensors: Tensors,
    out_RL: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y_RL, h_R2F where it is to be kept). The last product reads a alone, so y may be written over the rows."""
    activation, exact, save, clean = options
    gate_up, down, gate_up_scales, down_scales = tensors
    rows_RL = x_RL if order_R is None else spread(x_RL, order_R, _choices(x_RL, order_R))
    room = _room(rows_RL, tensors, exact)
    up_weight, down_weight = Weight(gate_up, gate_up_scales), Weight(down, down_scales)
    a_RF, h_R2F = room.glu_product(rows_RL, up_weight, offs_E, activation, row_weights_R, save == "all", exact)
    y_RL = room.product(a_RF, down_weight, offs_E, exact, out_RL)
    return room.zero_tail(y_RL, offs_E) if clean else y_RL, h_R2F


def _choices(x_TL: torch.Tensor, order_R: torch.Tensor) -> int:
    return max(1, order_R.shape[0] // max(1, x_TL.shape[0]))


@torch.no_grad()
def experts_backward(
    d_y_RL: torch.Tensor,
    rows_RL: torch.Tensor,
    weights: Dense | Packed,
    offs_E: torch.Tensor,
    activation: Activation,
    exact: bool = False,
    row_weights_R: torch.Tensor | None = None,
    clean: bool = True,
    skip_empty: bool = False,
    out_RL: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(d_rows_RL, d_row_weights_R, d_gate_up_E2FL, d_down_ELF): the backward pass of `experts`, called directly.

    For a caller that has the rows at hand again and needs no graph; arguments and bits are those of `experts` under
    autograd. None for row weights that were not given and for Packed weights. skip_empty: the weight gradients of
    experts without rows may be left undefined, which spares writing them where few of many have rows. out_RL: where
    d_rows_RL is written, contiguous on 16 bytes, possibly rows_RL or d_y_RL itself.
    """
    tensors = checked(rows_RL, weights, offs_E, row_weights_R)
    check_shape("d_y_RL", d_y_RL, rows_RL.shape)
    if out_RL is not None:
        check_out("out_RL", out_RL, rows_RL, rows_RL.shape[0])
    dense = isinstance(weights, Dense)
    d_rows_RL, d_row_weights_R, d_gate_up, d_down = _backward(
        d_y_RL,
        rows_RL.contiguous(),
        row_weights_R,
        offs_E,
        tensors,
        activation,
        exact,
        clean,
        None,
        (True, dense, dense),
        skip_empty,
        out_RL,
    )
    assert d_rows_RL is not None
    return d_rows_RL, d_row_weights_R, d_gate_up, d_down


def _backward(
    d_y_RL: torch.Tensor,
    rows_RL: torch.Tensor,
    row_weights_R: torch.Tensor | None,
    offs_E: torch.Tensor,
    tensors: Tensors,
    activation: Activation,
    exact: bool,
    clean: bool,
    h_R2F: torch.Tensor | None,
    wanted: tuple[bool, ...],
    skip_empty: bool = False,
    out_RL: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """wanted: the gradients of rows, gate_up and down. h_R2F is computed again if it was not kept."""
    gate_up, down, gate_up_scales, down_scales = tensors
    up_weight, down_weight = Weight(gate_up, gate_up_scales), Weight(down, down_scales)
    d_y_RL = d_y_RL.contiguous()
    room = _room(rows_RL, (gate_up, down, gate_up_scales, down_scales), exact)
    if h_R2F is None:
        h_R2F = room.product(rows_RL, up_weight, offs_E, exact)
    u_RF = room.product(d_y_RL, down_weight.transposed(), offs_E, exact)
    d_h_R2F, a_RF, d_row_weights_R = room.glu_backward(u_RF, h_R2F, offs_E, activation, row_weights_R, wanted[2])
    d_down = room.weight_gradient(d_y_RL, a_RF, offs_E, skip_empty) if wanted[2] and a_RF is not None else None
    d_gate_up = room.weight_gradient(d_h_R2F, rows_RL, offs_E, skip_empty) if wanted[1] else None
    d_rows_RL = None
    if wanted[0]:
        # Last: nothing reads the rows or d_y any more.
        d_rows_RL = room.product(d_h_R2F, up_weight.transposed(), offs_E, exact, out_RL)
        if clean:
            room.zero_tail(d_rows_RL, offs_E)
    return d_rows_RL, d_row_weights_R, d_gate_up, d_down


def implementation(
    rows_RL: torch.Tensor, weights: Dense | Packed, exact: bool = False
) -> Literal["triton", "reference"]:
    """Which code `experts` runs: Triton kernels on CUDA for bfloat16 rows, Dense weights of widths that are multiples
    of 64 or Packed ones of 128, else plain torch, with `grouped_mm` where that fits. Packed weights meet their kernel
    with up to 64 rows an expert on average and in the forward direction."""
    return "reference" if _room(rows_RL, tensors_of(weights), exact) is products else "triton"


def _room(rows_RL: torch.Tensor, tensors: Tensors, exact: bool) -> ModuleType:
    """The module whose products run: `products`, or `triton_experts`, which has the same functions."""
    if rows_RL.is_cuda and not exact and importlib.util.find_spec("triton"):
        room = _triton()
        if room.supports(rows_RL, *tensors):
            return room
    return products


def _triton() -> ModuleType:
    """Imported late: Triton is an optional dependency."""
    return importlib.import_module("perilune.ops.moe.triton_experts")


__all__ = ["Dense", "Packed", "Save", "experts", "experts_backward"]
