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
from perilune.parallel.expert.direct import DirectParallel, DirectPlanned
from perilune.parallel.expert.direct_copies import Weights


class DirectBalanced(torch.autograd.Function):
    """apply((parallel, planned, activation), x_TL, weights_TJ, gate_up_H2FL, down_HLF) -> y_TL."""

    @staticmethod
    def forward(
        ctx: Any, run: Any, x_TL: torch.Tensor, weights_TJ: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        parallel, planned, activation = ctx.run = run
        ctx.save_for_backward(x_TL, weights_TJ, *tensors)
        own = _own(parallel, tensors)
        parallel.exchange.send(x_TL.split(planned.tokens), planned, weights_TJ.split(planned.tokens))
        parallel.transport.barrier()
        arrived = parallel.exchange.receive(planned)
        mark = parallel.copies.aside.mark()
        out = [_experts(_own_half(parallel, planned, i, arrived, own[i]), activation) for i in range(len(own))]
        copied = out
        if parallel.slots:
            generation = parallel.copies.start(own, planned, mark)
            parallel.copies.wait()
            halves = [_copied_half(parallel, planned, i, arrived, generation) for i in range(len(own))]
            copied = [_experts(half, activation) for half in halves]
        parallel.exchange.return_rows(out, copied, planned)
        parallel.transport.barrier()
        return torch.cat(parallel.exchange.combine(planned))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TL: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TL, weights_TJ, *tensors = ctx.saved_tensors
        parallel, planned, activation = ctx.run
        own, d_y_TL = _own(parallel, tensors), d_y_TL.contiguous()
        parallel.exchange.begin_backward()
        parallel.exchange.send(x_TL.split(planned.tokens), planned, weights_TJ.split(planned.tokens))
        parallel.transport.barrier()
        arrived = parallel.exchange.receive(planned)
        here = range(len(own))
        own_halves = [_own_half(parallel, planned, i, arrived, own[i]) for i in here]
        # Under the product that needs no gradient the gradients arrive; under own experts, up to their weights'
        # gradients, the copies; and under their rows' gradients, which come last, those of copies travel home.
        d_out, d_copied = parallel.exchange.second()
        mark = parallel.copies.aside.mark()
        hidden = [moe.gate_up_product(rows, weights, offs) for rows, _, weights, offs in own_halves]
        parallel.exchange.start_second(d_y_TL.split(planned.tokens), (d_out, d_copied), planned, mark)
        if parallel.slots:
            generation = parallel.copies.start(own, planned, mark)
        parallel.exchange.aside.join()
        begun = [_begin(d_out[i], own_halves[i], activation, hidden[i]) for i in here]
        del hidden
        others = []
        if parallel.slots:
            parallel.copies.wait()
            for i in here:
                half = _begin(d_copied[i], _copied_half(parallel, planned, i, arrived, generation), activation)
                # Slots without a copy are left as they are: nobody reads them.
                up, down = parallel.copies.gradients(i)
                moe.weight_gradients(half, skip_empty=True, out=(up, down))
                others.append((moe.row_gradients(half, clean=False), half.d_row_weights_R))
        d_own = [_both(moe.weight_gradients(half)) for half in begun]
        mark = parallel.copies.aside.mark()
        grads = [(moe.row_gradients(half, clean=False), half.d_row_weights_R) for half in begun]
        if parallel.slots:
            parallel.copies.start_reduce(d_own, planned, mark)
        d_rows, d_numbers = zip(*grads, strict=True)
        d_other_rows, d_other_numbers = zip(*(others or grads), strict=True)
        parallel.exchange.return_rows(d_rows, d_other_rows, planned)
        parallel.exchange.return_numbers(d_numbers, d_other_numbers, planned)
        parallel.transport.barrier()
        d_x = parallel.exchange.combine(planned)
        d_weights = parallel.exchange.numbers(planned)
        if parallel.slots:
            parallel.copies.aside.join()
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
    return arrived[1][i], arrived[3][i], Dense(*parallel.copies.weights(i, generation)), offs


def _experts(half: Half, activation: Activation) -> torch.Tensor:
    rows, row_weights, weights, offs = half
    return moe.experts(rows, weights, offs, activation, row_weights_R=row_weights, clean=False)


def _begin(d_y: torch.Tensor, half: Half, activation: Activation, hidden: torch.Tensor | None = None) -> moe.Halfway:
    rows, row_weights, weights, offs = half
    return moe.begin_backward(d_y, rows, weights, offs, activation, row_weights_R=row_weights, h_R2F=hidden)


def _both(grads: tuple[torch.Tensor | None, torch.Tensor | None]) -> Weights:
    d_gate_up, d_down = grads
    assert d_gate_up is not None
    assert d_down is not None
    return d_gate_up, d_down


def _own(parallel: DirectParallel, tensors: Sequence[torch.Tensor]) -> list[Weights]:
    return list(zip(*(t.detach().split(parallel.home) for t in tensors), strict=True))


__all__ = ["DirectBalanced"]
