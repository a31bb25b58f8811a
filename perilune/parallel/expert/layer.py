"""The balanced layer: one autograd function over the five steps, and a module that owns the experts of its ranks.

Kept for the backward pass are the layer's input, the routing weights and the plan. The backward pass dispatches the
input again, fetches the copies again, runs the experts again, and sends each copy's weight gradient home.

Legend: T tokens of the ranks in this process, J choices a token, E experts, H experts of the ranks in this process,
M experts of one rank, N rows of a rank's buffer, L width, F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from perilune.parallel.expert.direct import DirectParallel, DirectPlanned


def balanced_experts(
    parallel: ExpertParallel | DirectParallel,
    x_TL: torch.Tensor,
    weights_TJ: torch.Tensor,
    weights: Dense | Packed,
    planned: Planned | DirectPlanned,
    activation: Activation,
    exact: bool = False,
) -> torch.Tensor:
    """y_TL = sum_j down(w_j act(x)) of the chosen experts, computed where `planned = parallel.plan(ids)` says.

    A routing weight multiplies the expert's activation (`ops.moe.experts`), so its gradient needs no expert output;
    the choices are added in order. x and weights_TJ are those of the ranks in this process one after the other;
    `weights` holds the experts they are home to (all E on `Local` and `Virtual`). Gradients: x, weights_TJ, Dense
    weights. With `exact` y and dx are bitwise the dense layer's, whatever the number of ranks (CPU, fp32 and fp64);
    without it the experts' level is bitwise-layout. Every rank must call the forward and the backward pass, also with
    0 tokens. Raises Error for shapes that do not fit, and on `DirectParallel` for `exact` and for Packed weights.
    """
    tokens = sum(planned.tokens)
    if x_TL.dim() != 2 or x_TL.shape[0] != tokens or weights_TJ.shape != (tokens, parallel.top_k):
        raise Error(
            f"balanced_experts: x is {tuple(x_TL.shape)} and weights_TJ {tuple(weights_TJ.shape)}; "
            f"the plan is for {tokens} tokens of {parallel.top_k} choices"
        )
    tensors = _tensors(weights)
    held = parallel.home * len(parallel.transport.held)
    if any(t.shape[0] != held for t in tensors):
        raise Error(f"balanced_experts: weights of {tensors[0].shape[0]} experts; this process is home to {held}")
    w_TJ = widen(weights_TJ)
    y_TL: torch.Tensor
    if isinstance(parallel, ExpertParallel):
        run = (parallel, planned, activation, exact, type(weights))
        y_TL = _Balanced.apply(run, x_TL, w_TJ, *tensors)  # type: ignore[no-untyped-call]
        return y_TL
    # Only here: its kernels need triton.
    from perilune.parallel.expert.direct_layer import DirectBalanced

    if exact or not isinstance(weights, Dense):
        raise Error(
            f"balanced_experts: exact is {exact}, weights {type(weights).__name__}; direct ranks take Dense only"
        )
    if x_TL.dtype != parallel.dtype or x_TL.shape[1] != parallel.width:
        raise Error(
            f"balanced_experts: x is {x_TL.dtype} of width {x_TL.shape[1]}; "
            f"the buffers are for {parallel.dtype} of width {parallel.width}"
        )
    y_TL = DirectBalanced.apply((parallel, planned, activation), x_TL, w_TJ, *tensors)  # type: ignore[no-untyped-call]
    return y_TL


class BalancedExperts(nn.Module):
    """The routed experts of a mixture, spread over the ranks of `parallel`; a drop-in for the experts of a plain layer.

    Parameters gate_up_E2FL [H, 2F, L] and down_ELF [H, L, F] are the experts at home in this process: all E on
    `Local` and `Virtual`, E / R on `Collective` and `Symmetric`. Copies are never parameters.
    """

    def __init__(
        self,
        parallel: ExpertParallel | DirectParallel,
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
        self.planned: Any = None
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
        return self.parallel.stats(self.planned, self.down_ELF.shape[1] * size, self.parallel.copy_bytes(one, size))


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
        inputs, weights_of = x_TL.split(planned.tokens), weights_TJ.split(planned.tokens)
        arrived = parallel.dispatch_together([inputs], weights_of, planned)
        rows, row_weights = [of_rank[0][0] for of_rank in arrived], [of_rank[1] for of_rank in arrived]
        own = split_own(parallel, tensors)
        copies = parallel.prefetch(own, planned)
        for i in range(len(rows)):
            theirs = _used(planned, parallel, i, copies)
            for x, w, weights, offs in _halves(run, i, rows[i], row_weights[i], own[i], theirs):
                options = {"exact": run[3], "row_weights_R": w, "clean": False, "out_RL": _room_of(x)}
                _keep(x, moe.experts(x, weights, offs, run[2], **options))
        return _joined(parallel.combine(rows, planned))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TL: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TL, weights_TJ, *tensors = ctx.saved_tensors
        run = parallel, planned, activation, exact, kind = ctx.run
        inputs = [t.split(planned.tokens) for t in (x_TL, d_y_TL)]
        arrived = parallel.dispatch_together(inputs, weights_TJ.split(planned.tokens), planned)
        rows, d_out = ([of_rank[0][k] for of_rank in arrived] for k in range(2))
        row_weights = [of_rank[1] for of_rank in arrived]
        own = split_own(parallel, tensors)
        copies = parallel.prefetch(own, planned)
        d_weights, d_tensors = [], []
        for i in range(len(rows)):
            theirs = _used(planned, parallel, i, copies)
            halves = _halves(run, i, rows[i], row_weights[i], own[i], theirs)
            grads, start = [], 0
            for x, w, weights, offs in halves:
                d_part = d_out[i][start : start + x.shape[0]]
                options = {"exact": exact, "row_weights_R": w, "clean": False, "out_RL": _room_of(x)}
                grads.append(moe.experts_backward(d_part, x, weights, offs, activation, **options))
                _keep(x, grads[-1][0])
                start += x.shape[0]
            d_weights.append(_joined([g[1] for g in grads if g[1] is not None]).unsqueeze(-1))
            none = tuple(t[:0] for t in own[i])
            d_tensors.append((grads[0][2:], grads[1][2:] if len(grads) > 1 else none))
        d_x = parallel.combine(rows, planned)
        d_w = [d_TJ1.squeeze(-1) for d_TJ1 in parallel.give_back(d_weights, planned)]
        d_home: list[torch.Tensor | None] = [None] * len(tensors)
        if kind is Dense:
            home = parallel.reduce_grads([d[0] for d in d_tensors], [d[1] for d in d_tensors], planned)
            d_home = [_joined([grads[k] for grads in home]) for k in range(2)]
        return None, _joined(d_x), _joined(d_w), *d_home


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Those of all ranks here; of one rank its own, since even that much is copied by `cat`."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _halves(
    run: Any, held_index: int, rows_NL: torch.Tensor, weights_N: torch.Tensor, own: Weights, copies: Weights
) -> list[tuple[torch.Tensor, torch.Tensor, Dense | Packed, torch.Tensor]]:
    """(rows, their weights, experts, offs) of own experts and, where there are any, of copies: the rows that follow.

    Rows that belong to no expert are left out: a buffer is as long as the worst case, and products make longer ones.
    """
    parallel, planned, kind = run[0], run[1], run[4]
    rank = parallel.transport.held[held_index]
    ends_G, cut = planned.plan.ends_RG[rank], planned.own_rows[rank]
    home, used = parallel.home, copies[0].shape[0]
    halves = [(rows_NL[:cut], weights_N[:cut], kind(*own), ends_G[:home])]
    if used:
        end = planned.all_rows[rank]
        halves.append((rows_NL[cut:end], weights_N[cut:end], kind(*copies), ends_G[home : home + used] - cut))
    return halves


def _room_of(rows_NL: torch.Tensor) -> torch.Tensor | None:
    """Results go over the rows that they are made of, where kernels can write them there."""
    return rows_NL if rows_NL.data_ptr() % 16 == 0 else None


def _keep(rows_NL: torch.Tensor, out_NL: torch.Tensor) -> None:
    if out_NL is not rows_NL:
        rows_NL.copy_(out_NL)


def _used(planned: Planned, parallel: ExpertParallel, held_index: int, copies: Copies) -> Weights:
    """The slots that hold something, and idle ones up to the next of few numbers: kernels are compiled for a number."""
    used = len(planned.slots[parallel.transport.held[held_index]])
    used = min(max(16, 1 << (used - 1).bit_length()), parallel.slots) if used else 0
    return tuple(t[:used] for t in copies.weights(held_index))


def _tensors(weights: Dense | Packed) -> Weights:
    if isinstance(weights, Dense):
        return (weights.gate_up_E2FL, weights.down_ELF)
    return (weights.gate_up_codes, weights.gate_up_scales, weights.down_codes, weights.down_scales)


def split_own(parallel: ExpertParallel | DirectParallel, tensors: Sequence[torch.Tensor]) -> list[Weights]:
    """Each held rank's experts."""
    return list(zip(*(t.split(parallel.home) for t in tensors), strict=True))


__all__ = ["BalancedExperts", "balanced_experts", "even_split"]
