"""The balanced layer over memory that all ranks reach: one autograd function, static shapes, no host reads.

Kept for the backward pass are the layer's input, the routing weights, the plan and the destinations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from perilune.config import Activation
from perilune.ops import moe
from perilune.ops.moe import Dense
from perilune.parallel.expert.direct import DirectParallel, DirectPlanned, Weights


class DirectBalanced(torch.autograd.Function):
    """apply((parallel, planned, activation), x_TL, weights_TJ, gate_up_H2FL, down_HLF) -> y_TL."""

    @staticmethod
    def forward(
        ctx: Any, run: Any, x_TL: torch.Tensor, weights_TJ: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        parallel, planned, activation = ctx.run = run
        ctx.save_for_backward(x_TL, weights_TJ, *tensors)
        own = _own(parallel, tensors)
        generation = parallel.start_copies(own, planned)
        parallel.send(x_TL.split(planned.tokens), planned, weights_TJ.split(planned.tokens))
        parallel.transport.barrier()
        arrived = parallel.receive(planned, weights=True)
        out = [_experts(_own_half(parallel, planned, i, arrived, own[i]), activation) for i in range(len(own))]
        copied = out
        if parallel.slots:
            parallel.wait_for_copies()
            halves = [_copied_half(parallel, planned, i, arrived, generation) for i in range(len(own))]
            copied = [_experts(half, activation) for half in halves]
        parallel.return_rows(out, copied, planned)
        parallel.transport.barrier()
        return torch.cat(parallel.combine(planned))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TL: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TL, weights_TJ, *tensors = ctx.saved_tensors
        parallel, planned, activation = ctx.run
        own = _own(parallel, tensors)
        parallel.begin_backward()
        generation = parallel.start_copies(own, planned)
        parallel.send(x_TL.split(planned.tokens), planned, weights_TJ.split(planned.tokens))
        parallel.send(d_y_TL.split(planned.tokens), planned, None, buffer=1)
        parallel.transport.barrier()
        arrived = parallel.receive(planned, weights=True)
        d_out, d_copied, _, _ = parallel.receive(planned, weights=False, buffer=1)
        grads = [
            _backward(d_out[i], _own_half(parallel, planned, i, arrived, own[i]), activation, skip_empty=False)
            for i in range(len(own))
        ]
        others = grads
        if parallel.slots:
            parallel.wait_for_copies()
            halves = [_copied_half(parallel, planned, i, arrived, generation) for i in range(len(own))]
            others = [_backward(d, half, activation, skip_empty=True) for d, half in zip(d_copied, halves, strict=True)]
            parallel.offer_grads([weights for _, _, weights in others], planned)
        parallel.return_rows([rows for rows, _, _ in grads], [rows for rows, _, _ in others], planned)
        parallel.return_numbers([w for _, w, _ in grads], [w for _, w, _ in others], planned)
        parallel.transport.barrier()
        d_x = parallel.combine(planned)
        d_weights = parallel.numbers(planned)
        d_own = [weights for _, _, weights in grads]
        parallel.reduce_grads(d_own, planned)
        d_home = d_own[0] if len(d_own) == 1 else tuple(torch.cat(grads) for grads in zip(*d_own, strict=True))
        return None, torch.cat(d_x), torch.cat(d_weights), *d_home


# Rows, their weights, experts, offs.
Half = tuple[torch.Tensor, torch.Tensor, Dense, torch.Tensor]


def _own_half(
    parallel: DirectParallel, planned: DirectPlanned, i: int, arrived: tuple[Sequence[torch.Tensor], ...], own: Weights
) -> Half:
    ends_G = planned.plan.ends_RG[parallel.transport.held[i]]
    return arrived[0][i], arrived[2][i], Dense(*own), ends_G[: parallel.home]


def _copied_half(
    parallel: DirectParallel,
    planned: DirectPlanned,
    i: int,
    arrived: tuple[Sequence[torch.Tensor], ...],
    generation: int,
) -> Half:
    ends_G = planned.plan.ends_RG[parallel.transport.held[i]]
    offs = ends_G[parallel.home :] - ends_G[parallel.home - 1]
    return arrived[1][i], arrived[3][i], Dense(*parallel.copies(i, generation)), offs


def _experts(half: Half, activation: Activation) -> torch.Tensor:
    rows, row_weights, weights, offs = half
    return moe.experts(rows, weights, offs, activation, row_weights_R=row_weights, clean=False)


def _backward(
    d_y: torch.Tensor, half: Half, activation: Activation, skip_empty: bool
) -> tuple[torch.Tensor, torch.Tensor, Weights]:
    """(d_rows, d_row_weights, gradients of the weights)."""
    rows, row_weights, weights, offs = half
    d_rows, d_row_weights, d_gate_up, d_down = moe.experts_backward(
        d_y, rows, weights, offs, activation, row_weights_R=row_weights, clean=False, skip_empty=skip_empty
    )
    assert d_row_weights is not None
    assert d_gate_up is not None
    assert d_down is not None
    return d_rows, d_row_weights, (d_gate_up, d_down)


def _own(parallel: DirectParallel, tensors: Sequence[torch.Tensor]) -> list[Weights]:
    return list(zip(*(t.detach().split(parallel.home) for t in tensors), strict=True))


__all__ = ["DirectBalanced"]
