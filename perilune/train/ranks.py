"""What the processes of one training run tell each other; of one process, nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.errors import Error
from perilune.parallel import mesh as meshes
from perilune.parallel.collectives import gather_rows
from perilune.train.config import ParallelConfig
from perilune.train.pieces import pieces

# Numbers that are reduced in one call.
_SMALL = 1 << 22


class Ranks:
    """The run's mesh and collectives over it. Every rank makes the same calls.

    joined: this rank runs the whole model by itself, so those of a micro-batch do nothing.
    """

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        self.config, self.device, self.joined = config, device, False
        axes = meshes.Axes(config.pp, config.shard, config.cp, config.tp, config.ep)
        self.mesh = meshes.start(device, timeout=config.timeout, axes=axes)

    @property
    def leads(self) -> bool:
        """Whether this rank writes the run's files."""
        return self.mesh.rank == 0

    def agree(self, problem: BaseException | None) -> None:
        """Raise the problem of the first rank that has one, on all of them."""
        if self.mesh.ranks == 1:
            if problem is not None:
                raise problem
            return
        told: list[str | None] = [None] * self.mesh.ranks
        dist.all_gather_object(told, None if problem is None else f"{problem}")
        if problem is not None:
            raise problem
        for rank, text in enumerate(told):
            if text is not None:
                raise Error(f"rank {rank}: {text}")

    def add(self, values: Iterable[Tensor]) -> None:
        """Sum over all ranks, in place."""
        _reduce(values, self.mesh.everyone, dist.ReduceOp.SUM)

    def add_in_stage(self, values: Iterable[Tensor]) -> None:
        """Sum over the ranks with this rank's layers, in place."""
        _reduce(values, self.mesh.stage, dist.ReduceOp.SUM)

    def largest_in_stage(self, values: Iterable[Tensor]) -> None:
        """Maximum over the ranks with this rank's layers, in place."""
        _reduce(values, self.mesh.stage, dist.ReduceOp.MAX)

    def all_heads(self, value_H: Tensor) -> Tensor:
        """One number for each head of this rank -> of all heads."""
        return gather_rows(value_H, self.mesh.tp)

    def add_context(self, values: Tensor) -> Tensor:
        """Sum over the ranks that share a micro-batch."""
        if self.mesh.cp is not None and not self.joined:
            dist.all_reduce(values, group=self.mesh.cp)
        return values

    def add_squares(self, squares: Tensor) -> Tensor:
        """Sum over all ranks."""
        if self.mesh.ranks > 1:
            dist.all_reduce(squares)
        return squares

    def of_stage(self, value: Any) -> list[Any]:
        """A value of every rank with this rank's layers."""
        if self.mesh.stage is None:
            return [value]
        told: list[Any] = [None] * dist.get_world_size(self.mesh.stage)
        dist.all_gather_object(told, value, group=self.mesh.stage)
        return told

    def of_stages(self, value: Any) -> list[Any]:
        """A value of every stage, in order."""
        if self.mesh.stages is None or self.joined:
            return [value]
        told: list[Any] = [None] * self.mesh.sizes[0]
        dist.all_gather_object(told, value, group=self.mesh.stages)
        return told


def _reduce(values: Iterable[Tensor], group: dist.ProcessGroup | None, op: Any) -> None:
    """Small tensors side by side: what one of them costs is the call."""
    for piece in pieces(values, _SMALL) if group is not None else ():
        if len(piece) == 1:
            dist.all_reduce(piece[0], op=op, group=group)
            continue
        flat = torch.cat([value.reshape(-1) for value in piece])
        dist.all_reduce(flat, op=op, group=group)
        reduced = flat.split([value.numel() for value in piece])
        torch._foreach_copy_(piece, [part.view_as(value) for value, part in zip(piece, reduced, strict=True)])


__all__ = ["Ranks"]
