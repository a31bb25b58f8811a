"""Which layers a stage of the pipeline has, which rank runs it, and which blocks travel to it.

A stage can begin at any layer, since what a layer needs of those before it is the residual stream: the current sum and
the finished blocks of attention residuals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.model import Transformer

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


__all__ = [
    "SPLIT",
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
