"""The balanced layer: one autograd function over the five steps, and a module that owns the experts of its ranks.

Kept for the backward pass are the layer's input, the routing weights and the plan. The backward pass dispatches the
input again, fetches the copies again, runs the experts again, and sends each copy's weight gradient home.

Legend: T tokens of the ranks in this process, J choices a token, E experts, H experts of the ranks in this process,
M experts of one rank, N rows of a rank's buffer, L width, F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from perilune.config import Activation
from perilune.errors import Error
from perilune.ops import moe
from perilune.ops.moe import Dense, Packed
from perilune.ops.precision import widen
from perilune.parallel.expert.slots import Copies
from perilune.parallel.expert.stats import Stats
from perilune.parallel.expert.steps import ExpertParallel, Planned, Weights


def balanced_experts(
    parallel: ExpertParallel,
    x_TL: torch.Tensor,
    weights_TJ: torch.Tensor,
    weights: Dense | Packed,
    planned: Planned,
    activation: Activation,
    exact: bool = False,
) -> torch.Tensor:
    """y_TL = sum_j weights_TJ[:, j] expert_{id_j}(x), computed where `planned = parallel.plan(ids)` says.

    x and weights_TJ are those of the ranks in this process one after the other; `weights` holds the experts they are
    home to (all E on `Local`). Gradients: x, weights_TJ, Dense weights. With `exact` y and dx are bitwise the dense
    layer's, whatever the number of ranks (CPU, fp32 and fp64); without it the experts' level is bitwise-layout.
    Every rank must call the forward and the backward pass, also with 0 tokens. Raises Error for shapes that do not fit.
    """
    tokens = sum(route.tokens for route in planned.routes)
    if x_TL.dim() != 2 or x_TL.shape[0] != tokens or weights_TJ.shape != (tokens, parallel.top_k):
        raise Error(
            f"balanced_experts: x is {tuple(x_TL.shape)} and weights_TJ {tuple(weights_TJ.shape)}; "
            f"the plan is for {tokens} tokens of {parallel.top_k} choices"
        )
    tensors = _tensors(weights)
    held = parallel.home * len(parallel.transport.held)
    if any(t.shape[0] != held for t in tensors):
        raise Error(f"balanced_experts: weights of {tensors[0].shape[0]} experts; this process is home to {held}")
    run = (parallel, planned, activation, exact, type(weights))
    y_TL: torch.Tensor = _Balanced.apply(run, x_TL, weights_TJ, *tensors)  # type: ignore[no-untyped-call]
    return y_TL


class BalancedExperts(nn.Module):
    """The routed experts of a mixture, spread over the ranks of `parallel`; a drop-in for the experts of a plain layer.

    Parameters gate_up_E2FL [H, 2F, L] and down_ELF [H, L, F] are the experts at home in this process: all E on
    `Local`, E / R on `Collective`. Copies are never parameters.
    """

    def __init__(
        self,
        parallel: ExpertParallel,
        width: int,
        inner: int,
        activation: Activation,
        exact: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.parallel, self.activation, self.exact = parallel, activation, exact
        held = parallel.home * len(parallel.transport.held)
        self.gate_up_E2FL = nn.Parameter(torch.empty(held, 2 * inner, width, device=device, dtype=dtype))
        self.down_ELF = nn.Parameter(torch.empty(held, width, inner, device=device, dtype=dtype))
        self.planned: Planned | None = None
        nn.init.normal_(self.gate_up_E2FL, std=width**-0.5)
        nn.init.normal_(self.down_ELF, std=inner**-0.5)

    @torch.no_grad()
    def load(self, weights: Dense) -> None:
        """Take this process's experts from the weights of all E."""
        first = self.parallel.transport.held[0] * self.parallel.home
        mine = slice(first, first + self.gate_up_E2FL.shape[0])
        self.gate_up_E2FL.copy_(weights.gate_up_E2FL[mine])
        self.down_ELF.copy_(weights.down_ELF[mine])

    def forward(
        self, x_TL: torch.Tensor, ids_TJ: torch.Tensor, weights_TJ: torch.Tensor, tokens: Sequence[int] | None = None
    ) -> torch.Tensor:
        """x_TL, ids_TJ int64 (-1: not routed), weights_TJ -> y_TL.

        tokens: how many of the T belong to each rank in this process; as even as possible without it.
        """
        held = len(self.parallel.transport.held)
        sizes = even_split(ids_TJ.shape[0], held) if tokens is None else list(tokens)
        if len(sizes) != held or sum(sizes) != ids_TJ.shape[0]:
            raise Error(f"tokens is {sizes}; must be {held} numbers that add up to {ids_TJ.shape[0]}")
        self.planned = self.parallel.plan(ids_TJ.split(sizes))
        weights = Dense(self.gate_up_E2FL, self.down_ELF)
        return balanced_experts(
            self.parallel, x_TL, weights_TJ, weights, self.planned, self.activation, exact=self.exact
        )

    def stats(self) -> Stats:
        """Of the last forward pass; reads from the device. Raises Error before the first one."""
        if self.planned is None:
            raise Error("stats: the layer has not run yet; call it first")
        one = self.gate_up_E2FL[0].numel() + self.down_ELF[0].numel()
        size = self.gate_up_E2FL.element_size()
        return self.parallel.stats(self.planned, self.down_ELF.shape[1] * size, one * size)


def even_split(total: int, parts: int) -> list[int]:
    """Sizes that differ by at most one, the larger first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Any, x_TL: torch.Tensor, weights_TJ: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        parallel, planned = run[:2]
        ctx.run = run
        ctx.save_for_backward(x_TL, weights_TJ, *tensors)
        sizes = [route.tokens for route in planned.routes]
        rows = parallel.dispatch(x_TL.split(sizes), planned)
        own = _own(parallel, tensors)
        copies = parallel.prefetch(own, planned)
        for i in range(len(rows)):
            rows[i] = _compute(run, i, rows[i], own[i], _used(planned, parallel, i, copies))
        return torch.cat(parallel.combine(rows, weights_TJ.split(sizes), planned))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TL: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TL, weights_TJ, *tensors = ctx.saved_tensors
        parallel, planned, _, _, kind = ctx.run
        sizes = [route.tokens for route in planned.routes]
        rows = parallel.dispatch(x_TL.split(sizes), planned)
        own = _own(parallel, tensors)
        copies = parallel.prefetch(own, planned)
        d_out = parallel.dispatch(d_y_TL.split(sizes), planned)
        w_rows = parallel.dispatch_weights(weights_TJ.split(sizes), planned)
        d_rows, d_weight, d_own, d_copies = [], [], [], []
        for i in range(len(rows)):
            leaves = [rows[i].detach().requires_grad_()]
            mine, theirs = own[i], _used(planned, parallel, i, copies)
            if kind is Dense:
                leaves += [t.detach().requires_grad_() for t in (*mine, *theirs)]
                mine, theirs = tuple(leaves[1:3]), tuple(leaves[3:])
            with torch.enable_grad():
                out_NL = _compute(ctx.run, i, leaves[0], mine, theirs)
            used = int(planned.plan.ends_RG[parallel.transport.held[i], -1])
            d_wide_NL = widen(d_out[i])
            d_weight_N = (d_wide_NL[:used] * out_NL.detach()[:used]).sum(-1)
            d_weight.append(_lengthen(d_weight_N.to(weights_TJ.dtype), parallel.rows))
            d_out_NL = (d_wide_NL * w_rows[i].unsqueeze(-1)).to(out_NL.dtype)
            # A rank without copies has leaves of no expert that nothing depends on.
            grads = torch.autograd.grad(out_NL, leaves, d_out_NL, materialize_grads=True)
            d_rows.append(grads[0])
            d_own.append(grads[1:3])
            d_copies.append(grads[3:])
        d_x = [_sum_choices(d_TJL) for d_TJL in parallel.give_back(d_rows, planned)]
        d_w = [d_TJ1.squeeze(-1) for d_TJ1 in parallel.give_back(d_weight, planned)]
        d_tensors: list[torch.Tensor | None] = [None] * len(tensors)
        if kind is Dense:
            home = parallel.reduce_grads(d_own, d_copies, planned)
            d_tensors = [torch.cat([grads[k] for grads in home]) for k in range(2)]
        return None, torch.cat(d_x), torch.cat(d_w), *d_tensors


def _compute(run: Any, held_index: int, rows_NL: torch.Tensor, own: Weights, copies: Weights) -> torch.Tensor:
    """Own experts on the first rows, copies on the following; neither set of weights is moved to stand by the other."""
    parallel, planned, activation, exact, kind = run
    rank = parallel.transport.held[held_index]
    ends_G, cut = planned.plan.ends_RG[rank], planned.own_rows[rank]
    home, used = parallel.home, len(planned.slots[rank])
    if not used:
        return moe.experts(rows_NL, kind(*own), ends_G[:home], activation, exact=exact)
    parts = [
        moe.experts(rows_NL[:cut], kind(*own), ends_G[:home], activation, exact=exact),
        moe.experts(rows_NL[cut:], kind(*copies), ends_G[home : home + used] - cut, activation, exact=exact),
    ]
    return torch.cat(parts)


def _used(planned: Planned, parallel: ExpertParallel, held_index: int, copies: Copies) -> Weights:
    """The slots that hold something: no gradients are made for the others."""
    used = len(planned.slots[parallel.transport.held[held_index]])
    return tuple(t[:used] for t in copies.weights(held_index))


def _tensors(weights: Dense | Packed) -> Weights:
    if isinstance(weights, Dense):
        return (weights.gate_up_E2FL, weights.down_ELF)
    return (weights.gate_up_codes, weights.gate_up_scales, weights.down_codes, weights.down_scales)


def _own(parallel: ExpertParallel, tensors: Sequence[torch.Tensor]) -> list[Weights]:
    """Each held rank's experts."""
    return list(zip(*(t.split(parallel.home) for t in tensors), strict=True))


def _sum_choices(d_TJL: torch.Tensor) -> torch.Tensor:
    """Choices added in order, in max(fp32, dtype), cast once: what the gradient of `ops.moe.dispatch` does."""
    d_TL = widen(d_TJL[:, 0])
    for j in range(1, d_TJL.shape[1]):
        d_TL = d_TL + d_TJL[:, j]
    return d_TL.to(d_TJL.dtype)


def _lengthen(x_n: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([x_n, x_n.new_zeros(rows - x_n.shape[0])]).unsqueeze(-1)


__all__ = ["BalancedExperts", "balanced_experts", "even_split"]
