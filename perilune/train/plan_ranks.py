"""Which part of a run a rank has: its layers, its micro-batches, its rows."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from math import ceil

import torch

from perilune.config import ModelConfig
from perilune.parallel.mesh import Mesh
from perilune.parallel.stages import Place, places_of, rank_of
from perilune.train.config import TrainConfig


@dataclass(frozen=True)
class Part:
    """What the bytes of a rank follow from. mesh: as that rank sees it; places: its stages of the pipeline.

    shapes: of all parameters by name; muon: names of those that Muon trains; micro: micro-batches of a step.
    """

    config: TrainConfig
    shape: ModelConfig
    mesh: Mesh
    places: list[Place]
    shapes: dict[str, tuple[int, ...]]
    muon: Container[str]
    micro: int


def of_rank(places: list[Place], rank: int, config: TrainConfig) -> list[Place]:
    return [p for p in places if rank_of(p.index, config.parallel.pp, config.parallel.schedule) == rank]


def following(shape: ModelConfig, config: TrainConfig, places: list[Place]) -> list[Place]:
    every = places_of(shape, config.parallel.pp, config.parallel.schedule, config.parallel.virtual)
    return [every[place.index + 1] for place in places if not place.is_last]


def is_here(name: str, places: list[Place]) -> bool:
    parts = name.split(".")
    if parts[0] == "layers":
        return any(place.first <= int(parts[1]) < place.last for place in places)
    if parts[0] == "embed":
        return any(place.index == 0 for place in places)
    return any(place.is_last for place in places)


def live_micro_batches(config: TrainConfig, stage: int, micro: int) -> int:
    """Micro-batches whose activations a pipeline rank holds at once."""
    pp, virtual = config.parallel.pp, config.parallel.virtual
    if pp == 1:
        return 1
    if virtual == 1:
        return min(micro, pp - stage)
    # Warm-up of the interleaved schedule, in stages of 1 / virtual of a rank's layers.
    chunks = (pp - stage - 1) * 2 + (virtual - 1) * pp + 1
    return min(micro, ceil(chunks / virtual))


def bubble(config: TrainConfig, micro: int) -> float:
    pp = config.parallel.pp
    if pp == 1:
        return 0.0
    if config.parallel.schedule == "ZBVZeroBubble":
        # One third of a micro-batch's time a rank at most (forward, input gradient, weight gradient of equal length).
        return (pp - 1) / 3 / ((pp - 1) / 3 + micro)
    return (pp - 1) / (pp - 1 + config.parallel.virtual * micro)


def documents(config: TrainConfig) -> list[int]:
    """Of one micro-batch."""
    total, longest = config.data.batch_tokens, config.data.sequence_tokens
    lengths = [longest] * (total // longest)
    return [*lengths, total % longest] if total % longest else lengths


def itemsize(config: TrainConfig) -> int:
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype.itemsize


def numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


__all__ = [
    "Part",
    "bubble",
    "documents",
    "following",
    "is_here",
    "itemsize",
    "live_micro_batches",
    "numel",
    "of_rank",
]
