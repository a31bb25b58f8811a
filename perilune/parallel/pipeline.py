"""The layers of a model dealt out to stages, run by the schedules of torch.distributed.pipelining.

A hop between stages carries the sum and those blocks that the receiving rank does not hold for that micro-batch: with
several stages a rank it has earlier ones, and keeps them until the micro-batch ends. Their gradients meet where the
rank held them first. What a stage has is in `stages`, how it runs in `stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from perilune.errors import Error
from perilune.model import Stats, Transformer
from perilune.parallel.stage import Kept, Loss, MicroBatch, StageModule
from perilune.parallel.stages import SPLIT, Place, Schedule, hop_blocks, places_of, rank_of, splits_backward, trim


class Pipeline:
    """The stages of one rank and their schedule. Every rank of the group makes the same calls."""

    def __init__(
        self,
        model: Transformer,
        group: dist.ProcessGroup,
        schedule: Schedule,
        virtual: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if schedule in SPLIT and not splits_backward():
            raise Error(f"parallel.schedule is {schedule!r}; it needs torch 2.13 or newer, this is {torch.__version__}")
        self.group, self.name, self.device, self.dtype = group, schedule, device, dtype
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.config, self.kept = model.config, Kept()
        self.places = places_of(model.config, self.ranks, schedule, virtual)
        self.mine = [p for p in self.places if rank_of(p.index, self.ranks, schedule) == self.rank]
        self.loss: Loss = lambda x_TD, micro: x_TD.sum()
        trim(model, self.mine)
        self.modules = [
            StageModule(model, self.places, place, self.kept, lambda x_TD, micro: self.loss(x_TD, micro))
            for place in self.mine
        ]
        self._made: tuple[tuple[int, int], Any] | None = None

    def share(self, model: Transformer) -> None:
        """Let the model have the parameters of its stages again, after those of the stages were replaced."""
        if self.has_loss:
            model.norm_D = self.modules[-1].norm_D

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is here."""
        return any(place.is_last for place in self.mine)

    def step(self, batches: Sequence[MicroBatch], rows: int, loss: Loss, observe: Callable[[Stats], None]) -> None:
        """Forward and backward pass of all micro-batches. rows: of each in the residual stream, the same for all."""
        self.loss = loss
        for module in self.modules:
            module.batches, module.observe = batches, observe
        schedule = self._schedule(len(batches), rows)
        index = torch.arange(len(batches))
        first = [index] if self.mine[0].index == 0 else []
        target = index if self.has_loss else None
        schedule.step(*first, index=index, target=target, return_outputs=False)
        self.kept.clear()

    def forward(self, batch: MicroBatch, rows: int, loss: Loss, gradients: bool = False) -> torch.Tensor:
        """The loss of one micro-batch on every rank of the group.

        gradients: build the stages' graphs as a step does, for whoever watches; there is no backward pass.
        """
        self.loss = loss
        out = torch.zeros(1, dtype=torch.float64, device=self.device)
        passed: Any = ()
        with torch.set_grad_enabled(gradients):
            for place in self.places:
                owner, sender = (rank_of(i, self.ranks, self.name) for i in (place.index, place.index - 1))
                carry = [torch.empty(s, dtype=self.dtype, device=self.device) for s in self._shapes(place, rows)]
                if place.index and owner != sender:
                    if self.rank == sender:
                        for value in passed:
                            dist.send(value.detach().contiguous(), group=self.group, group_dst=owner)
                    elif self.rank == owner:
                        for value in carry:
                            dist.recv(value, group=self.group, group_src=sender)
                            value.requires_grad_(gradients)
                elif place.index and self.rank == owner:
                    carry = list(passed)
                if self.rank == owner:
                    module = self.modules[self.mine.index(place)]
                    module.batches = [batch]
                    module.observe = lambda stats: None
                    passed = module(*carry, index=torch.zeros(1, dtype=torch.int64))
                    if place.is_last:
                        out = passed.detach().to(torch.float64)
        self.kept.clear()
        last = rank_of(len(self.places) - 1, self.ranks, self.name)
        dist.broadcast(out, group=self.group, group_src=last)
        return out[0]

    def sent_bytes(self) -> dict[int, int]:
        """What the stages of this rank sent on in the last micro-batch: stage -> bytes."""
        return {module.place.index: module.sent_bytes for module in self.modules if not module.place.is_last}

    def _shapes(self, place: Place, rows: int) -> list[tuple[int, int]]:
        """Of what a hop into a stage carries."""
        return [(rows, self.config.hidden_size)] * (1 + hop_blocks(self.config, place) if place.index else 0)

    def _schedule(self, count: int, rows: int) -> Any:
        if self._made is not None and self._made[0] == (count, rows):
            return self._made[1]
        stages = []
        for module in self.modules:
            place = module.place
            taken = (
                self._like(self._shapes(place, rows))
                if place.index
                else [torch.empty(1, dtype=torch.int64, device="meta")]
            )
            given = (
                [torch.empty(1, dtype=torch.float64, device="meta")]
                if place.is_last
                else self._like(self._shapes(self.places[place.index + 1], rows))
            )
            stages.append(
                PipelineStage(
                    module, place.index, place.count, self.device, tuple(taken), tuple(given), group=self.group
                )
            )
        kind = get_schedule_class(self.name)
        single = issubclass(kind, PipelineScheduleSingle)
        made = kind(
            stages[0] if single else stages,
            count,
            loss_fn=lambda loss, _: loss.sum(),
            scale_grads=False,
        )
        self._made = ((count, rows), made)
        return made

    def _like(self, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True) for shape in shapes]


__all__ = ["MicroBatch", "Pipeline"]
