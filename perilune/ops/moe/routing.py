"""Routing of tokens to experts, and the way to expert rows and back: the public functions, and which code runs.

Legend: T tokens, E experts, J experts per token, R = T J rows sorted by expert, L latent width.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any, Literal

import torch

from perilune.errors import Error
from perilune.ops.checks import check_device, check_floats
from perilune.ops.moe import reference
from perilune.ops.moe.reference import Routing


def route(logits_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int, scale: float, renormalize: bool = True) -> Routing:
    """Sigmoid routing with a selection bias (Kimi-K3 report; DeepSeek-V3's auxiliary-loss-free form).

    s = sigmoid(logits) in fp32 (fp64 for fp64 logits); the top_k of s + bias are chosen; the weights are
    s / (sum of the chosen s + 1e-20) * scale, or s * scale without renormalize. The bias only selects: neither
    weights nor gradients see it. Bitwise-batch; on a GPU ids, scores and threshold are those of the reference to the
    bit, the weights to 2 ulp. Raises Error unless logits_TE is [T, E], bias_E [E] on its device,
    and 1 <= top_k <= E.
    """
    if logits_TE.ndim != 2:
        raise Error(f"route: logits_TE has shape {tuple(logits_TE.shape)}; must be [T, E]")
    check_floats("route", logits_TE=logits_TE, bias_E=bias_E)
    experts = logits_TE.shape[-1]
    if not 1 <= top_k <= experts:
        raise Error(f"route: top_k is {top_k}; must be in 1..{experts}")
    if bias_E.shape != (experts,):
        raise Error(f"route: bias_E has shape {tuple(bias_E.shape)}; must be ({experts},)")
    return _room(logits_TE).route(logits_TE, bias_E, top_k, scale, renormalize)  # type: ignore[no-any-return]


def permute(ids_TJ: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order that groups rows by expert: (order_R int64, offs_E int32). Every id must be in 0..experts-1.

    Row r of the grouped layout is choice order_R[r] of the flattened ids_TJ, that is token order_R[r] // J; within
    an expert, rows keep the order of tokens. Expert e owns rows offs_E[e-1]:offs_E[e] (from 0 for e = 0).
    On a GPU nothing is read back. Raises Error unless ids_TJ is int64 [T, J].
    """
    if ids_TJ.ndim != 2 or ids_TJ.dtype != torch.int64 or experts < 1:
        raise Error(
            f"permute: ids_TJ is {ids_TJ.dtype} {tuple(ids_TJ.shape)}, of {experts} experts; "
            "must be int64 [T, J] of at least one"
        )
    order_R, offs_E = _room(ids_TJ).permute(ids_TJ, experts)
    return order_R, offs_E


def dispatch(x_TL: torch.Tensor, order_R: torch.Tensor, top_k: int) -> torch.Tensor:
    """rows_RL: each token's input copied to its top_k rows. The gradient adds a token's rows in choice order.

    Raises Error unless x_TL is [T, L] and order_R has T top_k rows, on its device.
    """
    if x_TL.ndim != 2 or order_R.shape != (x_TL.shape[0] * top_k,):
        raise Error(
            f"dispatch: x_TL is {tuple(x_TL.shape)} and order_R {tuple(order_R.shape)} with top_k {top_k}; "
            "must be [T, L] and [T * top_k]"
        )
    check_device("dispatch", "x_TL", x_TL, "order_R", order_R)
    rows_RL: torch.Tensor = _Dispatch.apply(x_TL, order_R, top_k)  # type: ignore[no-untyped-call]
    return rows_RL


def combine(
    rows_RL: torch.Tensor, order_R: torch.Tensor, weights_TJ: torch.Tensor | None, top_k: int | None = None
) -> torch.Tensor:
    """y_TL = sum_j weights_TJ[:, j] * (token's row of choice j), added in choice order in max(fp32, dtype), cast once.

    weights_TJ None is the plain sum of top_k rows a token (rows weighted earlier, `experts(row_weights_R=...)`), of
    which nothing is kept for the backward pass. rows_RL may be longer than T J: what lies past the routed rows is
    neither read nor given a gradient but zero. Raises Error when neither weights_TJ nor a top_k that fits is given, for
    shapes that do not fit, and on mixed devices.
    """
    if weights_TJ is None and (top_k is None or top_k < 1 or order_R.shape[0] % top_k):
        raise Error(f"combine: top_k is {top_k}; without weights_TJ it must divide the {order_R.shape[0]} rows")
    routed = order_R.shape[0]
    if rows_RL.ndim != 2 or rows_RL.shape[0] < routed or (weights_TJ is not None and weights_TJ.numel() != routed):
        weights = None if weights_TJ is None else tuple(weights_TJ.shape)
        raise Error(
            f"combine: rows_RL is {tuple(rows_RL.shape)} and weights_TJ {weights} for the {routed} rows of order_R; "
            "must be [>= R, L] and [T, J] with T J = R"
        )
    check_floats("combine", rows_RL=rows_RL, weights_TJ=weights_TJ)
    check_device("combine", "rows_RL", rows_RL, "order_R", order_R)
    y_TL: torch.Tensor = _Combine.apply(rows_RL, order_R, weights_TJ, top_k)  # type: ignore[no-untyped-call]
    return y_TL


def spread(x_TL: torch.Tensor, order_R: torch.Tensor, top_k: int) -> torch.Tensor:
    """`dispatch` without a graph."""
    rows_RL: torch.Tensor = _room(x_TL).spread(x_TL, order_R, top_k)
    return rows_RL


def sum_choices(rows_RL: torch.Tensor, order_R: torch.Tensor, top_k: int) -> torch.Tensor:
    """The plain sum of `combine` without a graph: the gradient of `dispatch`."""
    room = _room(rows_RL)
    y_TL: torch.Tensor = room.gather_sum(rows_RL, room.row_of_choice(order_R).view(-1, top_k), None)
    return y_TL


def implementation(x: torch.Tensor) -> Literal["triton", "reference"]:
    """Which code `route`, `permute`, `dispatch` and `combine` run: Triton kernels on CUDA, except for fp64."""
    if x.is_cuda and x.dtype != torch.float64 and importlib.util.find_spec("triton"):
        return "triton"
    return "reference"


def _room(x: torch.Tensor) -> ModuleType:
    """Imported late: Triton is an optional dependency."""
    return importlib.import_module("perilune.ops.moe.triton_routing") if implementation(x) == "triton" else reference


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TL: torch.Tensor, order_R: torch.Tensor, top_k: int) -> torch.Tensor:
        ctx.save_for_backward(order_R)
        ctx.top_k = top_k
        return spread(x_TL, order_R, top_k)

    @staticmethod
    def backward(ctx: Any, d_RL: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order_R,) = ctx.saved_tensors
        return sum_choices(d_RL, order_R, ctx.top_k), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RL: torch.Tensor, order_R: torch.Tensor, weights_TJ: torch.Tensor | None, top_k: int | None
    ) -> torch.Tensor:
        room = _room(rows_RL)
        ctx.top_k, ctx.length = top_k, rows_RL.shape[0]
        ctx.save_for_backward(order_R, *(() if weights_TJ is None else (weights_TJ, rows_RL)))
        row_R = room.row_of_choice(order_R)
        row_TJ = row_R.view(-1, top_k) if weights_TJ is None else row_R.view(weights_TJ.shape)
        y_TL: torch.Tensor = room.gather_sum(rows_RL, row_TJ, weights_TJ)
        return y_TL

    @staticmethod
    def backward(ctx: Any, d_TL: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        order_R, *rest = ctx.saved_tensors
        room, d_weights_TJ = _room(d_TL), None
        if rest:
            weights_TJ, rows_RL = rest
            d_RL, d_weights_TJ = room.gather_sum_backward(d_TL, rows_RL, order_R, weights_TJ)
        else:
            d_RL = spread(d_TL, order_R, ctx.top_k)
        if ctx.length > d_RL.shape[0]:
            d_RL = torch.cat([d_RL, d_RL.new_zeros(ctx.length - d_RL.shape[0], d_RL.shape[1])])
        return d_RL, None, d_weights_TJ, None


__all__ = ["combine", "dispatch", "implementation", "permute", "route"]
