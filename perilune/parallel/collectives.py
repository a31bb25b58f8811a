"""Rows of all ranks on every rank, and its opposite, as operations that carry gradients.

Both communicate in the forward and in the backward pass whatever the numbers are, also with no rows: a rank that left
out a collective would let the others wait for ever.

Legend: R ranks, T rows of one rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

# Names that torch 2.13 gave them; older ones have the others.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def local(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded parameter or gradient, sharing its memory; plain tensors as they are."""
    part: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return part


def ranks_of(group: dist.ProcessGroup | None) -> int:
    """Its size; no group is one rank alone."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This rank's place in the group."""
    return 0 if group is None else dist.get_rank(group)


def gather_rows(x_T: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[T, ...] of every rank -> [R * T, ...], rank by rank; T must be the same on all. Gradient: `scatter_rows`."""
    y: torch.Tensor = x_T if group is None else _Gather.apply(x_T, group)  # type: ignore[no-untyped-call]
    return y


def scatter_rows(x_RT: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[R * T, ...] of every rank, added up -> this rank's [T, ...] of the sum. Gradient: `gather_rows`."""
    y: torch.Tensor = x_RT if group is None else _Scatter.apply(x_RT, group)  # type: ignore[no-untyped-call]
    return y


def add_up(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum over ranks, on every rank; its gradient is passed on as it is, for a sum that all ranks use alike."""
    y: torch.Tensor = x if group is None else _AddUp.apply(x, group)  # type: ignore[no-untyped-call]
    return y


def _gather(x_T: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x_T.new_empty(dist.get_world_size(group) * x_T.shape[0], *x_T.shape[1:])
    if x_T.numel():
        all_gather(out, x_T.contiguous(), group=group)
    return out


def _scatter(x_RT: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x_RT.new_empty(x_RT.shape[0] // dist.get_world_size(group), *x_RT.shape[1:])
    if x_RT.numel():
        reduce_scatter(out, x_RT.contiguous(), group=group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_T: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gather(x_T, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scatter(d_y, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RT: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _scatter(x_RT, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(d_y, ctx.group), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, None]:
        return d_y, None


__all__ = ["add_up", "all_gather", "gather_rows", "local", "rank_in", "ranks_of", "reduce_scatter", "scatter_rows"]
