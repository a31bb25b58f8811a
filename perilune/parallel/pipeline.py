"""The layers of a model dealt out to stages, run by the schedules of torch.distributed.pipelining.

A stage can begin at any layer, since what a layer needs of those before it is the residual stream: the current sum and
the finished blocks of attention residuals. A hop between stages carries the sum and those blocks that the receiving
rank does not hold for that micro-batch: with several stages a rank it has earlier ones, and keeps them until the
micro-batch ends. Their gradients meet where the rank held them first.

Legend: T tokens of a micro-batch on this rank, D model width, P ranks with stages, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.model import Stats, Transformer
from perilune.model.moe import SparseMoe
from perilune.model.residual import Site, Stream
from perilune.ops.names import layer as name_layer
from perilune.ops.names import region
from perilune.ops.sequences import Sequences

Schedule = Literal["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
# Schedules that compute gradients of weights apart from those of inputs: kept blocks are not supported there.
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble")


def splits_backward() -> bool:
    """Whether this torch can compute gradients of inputs and of weights apart for autograd functions in Python."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= (2, 13)


@dataclass(frozen=True)
class Place:
    """Stage `index` of `count`: layers first .. last - 1. keeps: blocks that its rank holds from an earlier stage."""

    index: int
    count: int
    first: int
    last: int
    keeps: int

    @property
    def is_last(self) -> bool:
        """Whether the head is here."""
        return self.index == self.count - 1


def blocks_before(config: ModelConfig, layer: int) -> int:
    """Finished blocks of attention residuals that a layer finds."""
    return sum(config.starts_block(i) for i in range(layer))


def rank_of(stage: int, ranks: int, schedule: Schedule) -> int:
    """Who runs a stage: in turns, or there and back again (ZBV)."""
    return min(stage, 2 * ranks - 1 - stage) if schedule == "ZBVZeroBubble" else stage % ranks


def places_of(config: ModelConfig, ranks: int, schedule: Schedule, virtual: int) -> list[Place]:
    """All stages, `virtual` a rank. Raises Error for more stages than layers, or others than the schedule needs."""
    needed = {"1F1B": 1, "ZBVZeroBubble": 2}.get(schedule, virtual)
    if virtual != needed:
        raise Error(f"parallel.virtual is {virtual}; schedule {schedule!r} needs {needed}")
    count = ranks * virtual
    if count > config.num_layers:
        raise Error(f"parallel.pp is {ranks}, virtual {virtual}: {count} stages for {config.num_layers} layers")
    ends = [config.num_layers * i // count for i in range(count + 1)]
    places: list[Place] = []
    for i in range(count):
        earlier = [p for p in places if rank_of(p.index, ranks, schedule) == rank_of(i, ranks, schedule)]
        keeps = blocks_before(config, earlier[-1].last) if earlier and schedule not in SPLIT else 0
        places.append(Place(i, count, ends[i], ends[i + 1], keeps))
    return places


def check_micro_batches(count: int, ranks: int, schedule: Schedule) -> None:
    """Raise Error for a number of micro-batches a rank that the schedule cannot run over `ranks` stages."""
    if schedule == "1F1B" and count < ranks:
        raise Error(
            f"accumulate gives a rank {count} micro-batches; schedule '1F1B' needs parallel.pp = {ranks} or more"
        )
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and count % max(1, count // ranks):
        raise Error(
            f"accumulate gives a rank {count} micro-batches; schedule {schedule!r} needs a multiple of "
            f"{count // ranks}, or fewer than {2 * ranks}"
        )


def hop_blocks(config: ModelConfig, place: Place) -> int:
    """Blocks that a hop into a stage carries beside the sum."""
    return blocks_before(config, place.first) - place.keeps if place.index else 0


def trim(model: Transformer, places: Sequence[Place]) -> None:
    """Keep only the parameters of some stages, in place; names stay as they are."""
    for index in range(len(model.layers)):
        if not any(place.first <= index < place.last for place in places):
            model.layers[index] = nn.Module()
    if not any(place.index == 0 for place in places):
        model.embed = nn.Module()  # type: ignore[assignment]
    if not any(place.is_last for place in places):
        model.lm_head = nn.Module()  # type: ignore[assignment]
        del model.norm_D
        if model.config.attn_res is not None:
            model.output_res = nn.Module()  # type: ignore[assignment]


@dataclass(frozen=True)
class MicroBatch:
    """What a rank has of one micro-batch."""

    tokens_T: torch.Tensor
    sequences: Sequences


# (hidden x_TD, number of the micro-batch) -> the loss that is differentiated.
Loss = Callable[[torch.Tensor, int], torch.Tensor]


class Kept:
    """Blocks of the micro-batches under way that a later stage of this rank needs again, and their gradients."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[torch.Tensor]] = {}
        self.gradients: dict[tuple[int, int], torch.Tensor] = {}

    def put(self, micro: int, number: int, block: torch.Tensor) -> torch.Tensor:
        """The block, for use in this stage; what later stages add to its gradient arrives in the backward pass."""
        held: torch.Tensor = _Join.apply(block, self, (micro, number))  # type: ignore[no-untyped-call]
        self.blocks.setdefault(micro, []).append(held)
        return held

    def get(self, micro: int, count: int) -> list[torch.Tensor]:
        """The first `count` blocks as leaves whose gradients are taken to where the block was put."""
        leaves = []
        for number, block in enumerate(self.blocks[micro][:count]):
            leaf = block.detach()
            if block.requires_grad and torch.is_grad_enabled():
                leaf.requires_grad_()
                leaf.register_post_accumulate_grad_hook(lambda x, key=(micro, number): self._add(key, x))
            leaves.append(leaf)
        return leaves

    def _add(self, key: tuple[int, int], leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        self.gradients[key] = self.gradients[key] + leaf.grad if key in self.gradients else leaf.grad
        leaf.grad = None

    def clear(self) -> None:
        """Forget everything; at the end of a step."""
        self.blocks.clear()
        self.gradients.clear()


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: torch.Tensor, kept: Kept, key: tuple[int, int]) -> torch.Tensor:
        ctx.kept, ctx.key = kept, key
        return block.view_as(block)

    @staticmethod
    def backward(ctx: Any, d_block: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        more = ctx.kept.gradients.pop(ctx.key, None)
        ctx.kept.blocks.pop(ctx.key[0], None)
        return (d_block if more is None else d_block + more), None, None


class StageModule(nn.Module):
    """The layers of one stage: (sum, blocks that were sent ...) -> the same for the next stage, or the loss [1]."""

    model: Transformer

    def __init__(self, model: Transformer, places: Sequence[Place], place: Place, kept: Kept, loss: Loss) -> None:
        super().__init__()
        # The model is not a submodule, but what of it is used here is: schedules ask for the stage's parameters.
        self.__dict__["model"] = model
        self.layers = nn.ModuleList(model.layers[place.first : place.last])
        if place.index == 0:
            self.embed = model.embed
        if place.is_last:
            self.norm_D, self.lm_head = model.norm_D, model.lm_head
            self.output_res = getattr(model, "output_res", None)
        self.place, self.kept, self.loss = place, kept, loss
        following = places[place.index + 1 : place.index + 2]
        self.sends = hop_blocks(model.config, following[0]) if following else 0
        self.batches: Sequence[MicroBatch] = ()
        self.sent_bytes = 0
        self.observe: Callable[[Stats], None] = lambda stats: None

    def forward(self, *carry: torch.Tensor, index: torch.Tensor) -> Any:
        """index: int64 [1], the number of the micro-batch; the first stage takes nothing else."""
        micro, place, model = int(index), self.place, self.model
        batch, stats = self.batches[micro], Stats()
        if place.index == 0:
            live, bank = model.embed(batch.tokens_T), []
        else:
            bank = self.kept.get(micro, place.keeps) if place.keeps else []
            live, *sent = carry
            bank += [self.kept.put(micro, place.keeps + i, block) for i, block in enumerate(sent)]
        stream = Stream(live, self._sites(), False)
        stream.bank = bank
        for layer in range(place.first, place.last):
            module: Any = model.layers[layer]
            name_layer(layer)
            x_TD = stream.enter()
            if module.starts_block:
                block = self.kept.put(micro, len(stream.bank) - 1, stream.bank[-1])
                stream.bank = [*stream.bank[:-1], block]
            y_TD, _, *rest = region(
                "attn", lambda x_TD, attn=module.attn: attn(x_TD, batch.sequences, model.parts), x_TD
            )
            if rest:
                stats.max_logit[layer] = rest[0]
            stream.leave(y_TD)
            x_TD = stream.enter()
            if isinstance(module.ffn, SparseMoe):
                y_TD, stats.routing[layer] = region("ffn", module.ffn, x_TD, model.parts)
            else:
                y_TD = region("ffn", module.ffn, x_TD, model.parts)
            stream.leave(y_TD)
        name_layer(None)
        self.observe(stats)
        if place.is_last:
            return self.loss(stream.enter(), micro).reshape(1)
        *bank, live = stream.finish()
        # The schedules detach what they are given in place, which views do not allow; nor may an input come out again.
        carried = tuple(x.clone() for x in (live, *bank[len(bank) - self.sends :]))
        self.sent_bytes = sum(x.nbytes for x in carried)
        return carried

    def _sites(self) -> list[Site]:
        model, sites = self.model, []
        blocks = blocks_before(model.config, self.place.first)
        for index in range(self.place.first, self.place.last):
            layer: Any = model.layers[index]
            sites.append(Site(layer.attn_res if blocks else None, layer.attn_norm_D, layer.eps, layer.starts_block))
            blocks += layer.starts_block
            sites.append(Site(layer.ffn_res if blocks else None, layer.ffn_norm_D, layer.eps))
        if self.place.is_last:
            # The stage's own, which are gathered when it runs where they are cut over ranks.
            sites.append(Site(self.output_res if blocks else None, self.norm_D, model.config.rms_norm_eps))
        return sites


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


__all__ = [
    "MicroBatch",
    "Pipeline",
    "Place",
    "Schedule",
    "blocks_before",
    "check_micro_batches",
    "hop_blocks",
    "places_of",
    "rank_of",
    "splits_backward",
    "trim",
]
