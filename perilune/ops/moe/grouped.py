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
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch

from perilune.config import Activation
from perilune.errors import Error
from perilune.ops.moe import products
from perilune.ops.moe.products import Weight
from perilune.ops.moe.routing import spread, sum_choices
from perilune.ops.moe.weights import Dense, Packed, Tensors, check_out, check_shape, checked, tensors_of
from perilune.ops.mx import fake_quantize

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
    inner_rule: str | None = None,
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
    inner_rule: a_r is rounded to MXFP8 by this scale rule (`ops.mx`) before it meets down, with straight-through
    gradients; down's gradient is of the rounded one. F must then be a multiple of 32.

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
    options = (activation, exact, save, clean and order_R is None, inner_rule)
    if out_RL is not None:
        return _forward(rows_RL.contiguous(), row_weights_R, order_R, offs_E, options, tensors, out_RL)[0]
    y_RL: torch.Tensor = _Experts.apply(rows_RL, row_weights_R, order_R, offs_E, options, *tensors)  # type: ignore[no-untyped-call]
    return y_RL


_Options = tuple[Activation, bool, Save, bool, str | None]


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
        activation, exact, _, clean, inner_rule = ctx.options
        wanted = tuple(ctx.needs_input_grad[i] for i in (0, 5, 6))
        if order_R is not None:
            top_k = _choices(rows_RL, order_R)
            rows_RL = spread(rows_RL, order_R, top_k)
        half = _begin(d_y_RL, rows_RL, row_weights_R, offs_E, (*tensors,), activation, exact, h_R2F, need_a=wanted[2])
        gradient, d_rows_RL, d_gate_up, d_down = half.room.weight_gradient, None, None, None
        if half.a_RF is not None:
            d_down = gradient(half.d_y_RL, _rounded(half.a_RF, inner_rule), offs_E)
        if wanted[1]:
            d_gate_up = gradient(half.d_h_R2F, rows_RL, offs_E)
        if wanted[0]:
            d_rows_RL = row_gradients(half, clean)
            if order_R is not None:
                d_rows_RL = sum_choices(d_rows_RL, order_R, top_k)
        return d_rows_RL, half.d_row_weights_R, None, None, None, d_gate_up, d_down, None, None


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
    activation, exact, save, clean, inner_rule = options
    gate_up, down, gate_up_scales, down_scales = tensors
    row_weights_R = None if row_weights_R is None else row_weights_R.contiguous()
    rows_RL = x_RL if order_R is None else spread(x_RL, order_R, _choices(x_RL, order_R))
    room = _room(rows_RL, tensors, exact)
    up_weight, down_weight = Weight(gate_up, gate_up_scales), Weight(down, down_scales)
    a_RF, h_R2F = room.glu_product(rows_RL, up_weight, offs_E, activation, row_weights_R, save == "all", exact)
    y_RL = room.product(_rounded(a_RF, inner_rule), down_weight, offs_E, exact, out_RL)
    return room.zero_tail(y_RL, offs_E) if clean else y_RL, h_R2F


def _rounded(a_RF: torch.Tensor, rule: str | None) -> torch.Tensor:
    return a_RF if rule is None else fake_quantize(a_RF, "mxfp8", rule, out=a_RF.contiguous())


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
    if out_RL is not None:
        check_out("out_RL", out_RL, rows_RL, rows_RL.shape[0])
    halfway = begin_backward(d_y_RL, rows_RL, weights, offs_E, activation, exact, row_weights_R)
    d_gate_up, d_down = weight_gradients(halfway, skip_empty)
    return row_gradients(halfway, clean, out_RL), halfway.d_row_weights_R, d_gate_up, d_down


@dataclass(frozen=True)
class Halfway:
    """Where `begin_backward` stops: what the gradients of weights and rows are made of, of the rows of `offs_E`.

    d_row_weights_R: None for row weights that were not given. a_RF: None where down gets no gradient.
    """

    rows_RL: torch.Tensor
    d_y_RL: torch.Tensor
    d_h_R2F: torch.Tensor
    a_RF: torch.Tensor | None
    d_row_weights_R: torch.Tensor | None
    offs_E: torch.Tensor
    gate_up: Weight
    room: ModuleType
    exact: bool


@torch.no_grad()
def begin_backward(
    d_y_RL: torch.Tensor,
    rows_RL: torch.Tensor,
    weights: Dense | Packed,
    offs_E: torch.Tensor,
    activation: Activation,
    exact: bool = False,
    row_weights_R: torch.Tensor | None = None,
    h_R2F: torch.Tensor | None = None,
) -> Halfway:
    """`experts_backward` up to the gradients of the row weights; `weight_gradients` and `row_gradients` are the rest.

    For a caller with something to do in between. h_R2F: of `gate_up_product`, which needs no d_y yet. The rows'
    gradient may be written over the rows, so it comes last.
    """
    tensors = checked(rows_RL, weights, offs_E, row_weights_R)
    check_shape("d_y_RL", d_y_RL, rows_RL.shape)
    dense = isinstance(weights, Dense)
    return _begin(d_y_RL, rows_RL.contiguous(), row_weights_R, offs_E, tensors, activation, exact, h_R2F, dense)


@torch.no_grad()
def gate_up_product(
    rows_RL: torch.Tensor, weights: Dense | Packed, offs_E: torch.Tensor, exact: bool = False
) -> torch.Tensor:
    """h_R2F, gate_up_e x of each row, as `experts` computes it; undefined past offs_E[-1]."""
    tensors = checked(rows_RL, weights, offs_E, None)
    room = _room(rows_RL, tensors, exact)
    h_R2F: torch.Tensor = room.product(rows_RL.contiguous(), Weight(tensors[0], tensors[2]), offs_E, exact)
    return h_R2F


@torch.no_grad()
def weight_gradients(
    halfway: Halfway, skip_empty: bool = False, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(d_gate_up_E2FL, d_down_ELF), written to `out` if given; (None, None) for Packed weights."""
    if halfway.gate_up.scales is not None or halfway.a_RF is None:
        return None, None
    gradient, offs_E = halfway.room.weight_gradient, halfway.offs_E
    out_up, out_down = out or (None, None)
    d_down = gradient(halfway.d_y_RL, halfway.a_RF, offs_E, skip_empty, out_down)
    return gradient(halfway.d_h_R2F, halfway.rows_RL, offs_E, skip_empty, out_up), d_down


@torch.no_grad()
def row_gradients(halfway: Halfway, clean: bool = True, out_RL: torch.Tensor | None = None) -> torch.Tensor:
    """d_rows_RL, in out_RL if given; the rows and d_y are not read."""
    room, up_weight = halfway.room, halfway.gate_up.transposed()
    d_rows_RL: torch.Tensor = room.product(halfway.d_h_R2F, up_weight, halfway.offs_E, halfway.exact, out_RL)
    return room.zero_tail(d_rows_RL, halfway.offs_E) if clean else d_rows_RL


def _begin(
    d_y_RL: torch.Tensor,
    rows_RL: torch.Tensor,
    row_weights_R: torch.Tensor | None,
    offs_E: torch.Tensor,
    tensors: Tensors,
    activation: Activation,
    exact: bool,
    h_R2F: torch.Tensor | None,
    need_a: bool,
) -> Halfway:
    """h_R2F is computed again if it was not kept; need_a: whether down gets a gradient."""
    gate_up, down, gate_up_scales, down_scales = tensors
    up_weight, down_weight = Weight(gate_up, gate_up_scales), Weight(down, down_scales)
    d_y_RL = d_y_RL.contiguous()
    row_weights_R = None if row_weights_R is None else row_weights_R.contiguous()
    room = _room(rows_RL, tensors, exact)
    if h_R2F is None:
        h_R2F = room.product(rows_RL, up_weight, offs_E, exact)
    u_RF = room.product(d_y_RL, down_weight.transposed(), offs_E, exact)
    d_h_R2F, a_RF, d_row_weights_R = room.glu_backward(u_RF, h_R2F, offs_E, activation, row_weights_R, need_a)
    return Halfway(rows_RL, d_y_RL, d_h_R2F, a_RF if need_a else None, d_row_weights_R, offs_E, up_weight, room, exact)


def implementation(
    rows_RL: torch.Tensor, weights: Dense | Packed, exact: bool = False
) -> Literal["triton", "reference"]:
    """Which code `experts` runs: Triton kernels on CUDA for bfloat16 rows, Dense weights of widths that are multiples
    of 64 or Packed ones of 128, else plain torch, with `grouped_mm` where that fits. Packed weights are multiplied by
    CUDA kernels on Hopper (`packed_cuda`); elsewhere they are decoded in registers up to 64 rows an expert on average,
    all at once beyond that, and in the backward direction everywhere."""
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


__all__ = [
    "Dense",
    "Halfway",
    "Packed",
    "Save",
    "begin_backward",
    "experts",
    "experts_backward",
    "gate_up_product",
    "row_gradients",
    "weight_gradients",
]
