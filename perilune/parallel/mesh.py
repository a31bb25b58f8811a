"""The processes of a run as a mesh with named axes; the only place that knows which rank stands where.

Axes, the outermost first: pp (stages of the model's layers) x replicate (copies of everything) x shard (parameters cut
over ranks with tokens of their own) x cp (one stream of tokens cut over ranks) x tp (matrices cut over ranks). Within a
stage ep is folded over all of them: `ep` neighbours share one set of experts.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
import torch.distributed as dist

from perilune.errors import Error


@dataclass(frozen=True)
class Axes:
    """Sizes of the axes; shard 0: all ranks that are left, ep 0: all ranks of a stage."""

    pp: int = 1
    shard: int = 0
    cp: int = 1
    tp: int = 1
    ep: int = 0


@dataclass(frozen=True)
class Mesh:
    """rank and ranks of the run; shard: this rank's place among the `shards` that share one set of experts.

    experts: the ranks of this set; twins: the ranks with the same experts. stage: all ranks with this rank's layers;
    stages: those with the same place in every stage, in order. streams: the ranks of this stage with the same part of
    a matrix cut by tp. parts: those over which parameters are sharded (shard x cp); copies: those with the same shard.
    block: the ranks that hold all of a matrix together (shard x cp x tp).
    A group of one rank is None. places: this rank's coordinate on each axis; sizes: of all of them.
    """

    rank: int = 0
    ranks: int = 1
    shard: int = 0
    shards: int = 1
    everyone: dist.ProcessGroup | None = None
    experts: dist.ProcessGroup | None = None
    twins: dist.ProcessGroup | None = None
    stage: dist.ProcessGroup | None = None
    stages: dist.ProcessGroup | None = None
    streams: dist.ProcessGroup | None = None
    parts: dist.ProcessGroup | None = None
    copies: dist.ProcessGroup | None = None
    block: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    places: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    sizes: tuple[int, int, int, int, int] = (1, 1, 1, 1, 1)

    @property
    def data(self) -> tuple[int, int]:
        """(which of the ranks with tokens of their own this is, how many there are); cp and tp share tokens."""
        return self.places[1] * self.sizes[2] + self.places[2], self.sizes[1] * self.sizes[2]

    @property
    def part(self) -> tuple[int, int]:
        """(place, size) in `parts`."""
        return self.places[2] * self.sizes[3] + self.places[3], self.sizes[2] * self.sizes[3]

    def rows(self, tokens: int) -> int:
        """Most rows of the residual stream that a rank has of so many tokens: cp and tp cut them evenly."""
        return ceil(ceil(tokens / self.sizes[3]) / self.sizes[4])


def processes() -> int:
    """How many processes torchrun started; 1 without it. Raises Error for a launcher that says nonsense."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise Error(f"WORLD_SIZE is {text!r}; must be the number of processes (torchrun sets it)")
    return int(text)


def local_rank() -> int:
    """Which of this machine's processes this is, so which GPU it takes."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def leads() -> bool:
    """Whether this process is the first of its run, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def fill_axes(ranks: int, axes: Axes) -> tuple[tuple[int, int, int, int, int], int]:
    """((pp, replicate, shard, cp, tp), ep) for so many ranks. Raises Error naming the axis that does not divide."""
    left = ranks
    for name in ("pp", "tp", "cp", "shard"):
        size = getattr(axes, name)
        if size < (0 if name == "shard" else 1) or (size and left % size):
            total = f"the {ranks} processes of the run"
            what = total if left == ranks else f"the {left} of {total} that the axes before it leave"
            raise Error(f"parallel.{name} is {size}; must divide {what}")
        left //= size or left
    shard = axes.shard or ranks // (axes.pp * axes.tp * axes.cp)
    in_stage = ranks // axes.pp
    ep = axes.ep or in_stage
    if ep < 1 or in_stage % ep:
        of = "processes of the run" if axes.pp == 1 else "processes of a stage"
        raise Error(f"parallel.ep is {axes.ep}; must divide the {in_stage} {of}, or be 0 for all of them")
    return (axes.pp, in_stage // (shard * axes.cp * axes.tp), shard, axes.cp, axes.tp), ep


def without_groups(ranks: int, axes: Axes, rank: int) -> Mesh:
    """The mesh as rank `rank` of so many would see it, without any process: for planning."""
    sizes, ep = fill_axes(ranks, axes)
    pp, replicate, shard, cp, tp = (int(place) for place in (torch.arange(ranks).view(sizes) == rank).nonzero()[0])
    return Mesh(rank, ranks, rank % ep, ep, places=(pp, replicate, shard, cp, tp), sizes=sizes)


def start(device: torch.device, shards: int = 0, timeout: float = 600.0, axes: Axes | None = None) -> Mesh:
    """The mesh of the processes that torchrun started, or of this one alone.

    shards: over how many ranks one set of experts is spread, 0 for all of a stage (or `axes.ep`). timeout: seconds
    after which a collective that some rank never reaches ends the program on the others. Raises Error for sizes that
    do not divide the processes.
    """
    axes = Axes(ep=shards) if axes is None else axes
    ranks = processes()
    sizes, ep = fill_axes(ranks, axes)
    if ranks == 1:
        return Mesh()
    if device.type == "cuda":
        torch.cuda.set_device(local_rank() if device.index is None else device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    rank = dist.get_rank()
    grid = torch.arange(ranks).view(sizes)
    folded = torch.arange(ranks).view(sizes[0], -1, ep)
    made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}

    def group(order: Sequence[int], inner: int, of: torch.Tensor = grid) -> dist.ProcessGroup | None:
        """The group along the last `inner` dims after a permutation."""
        sets = of.permute(*order).flatten(len(order) - inner)
        key = tuple(map(tuple, sets.reshape(-1, sets.shape[-1]).tolist()))
        if key not in made:
            made[key] = _group([list(ranks_of) for ranks_of in key], rank, timeout)
        return made[key]

    pp, replicate, shard, cp, tp = (int(place) for place in (grid == rank).nonzero()[0])
    return Mesh(
        rank=rank,
        ranks=ranks,
        shard=rank % ep,
        shards=ep,
        everyone=dist.group.WORLD,
        experts=group((0, 1, 2), 1, folded),
        twins=group((0, 2, 1), 1, folded),
        stage=group((0, 1, 2, 3, 4), 4),
        stages=group((1, 2, 3, 4, 0), 1),
        streams=group((0, 4, 1, 2, 3), 3),
        parts=group((0, 1, 4, 2, 3), 2),
        copies=group((0, 2, 3, 4, 1), 1),
        block=group((0, 1, 2, 3, 4), 3),
        cp=group((0, 1, 2, 4, 3), 1),
        tp=group((0, 1, 2, 3, 4), 1),
        places=(pp, replicate, shard, cp, tp),
        sizes=sizes,
    )


def _group(sets: list[list[int]], rank: int, timeout: float) -> dist.ProcessGroup | None:
    """The group of the set that `rank` is in; all ranks make all groups, as torch asks."""
    if len(sets) == 1:
        return dist.group.WORLD
    if len(sets[0]) == 1:
        return None
    # A group takes torch's half hour, not the timeout of the whole run's group, where none is given.
    groups = [dist.new_group(of, timeout=datetime.timedelta(seconds=timeout)) for of in sets]
    mine: dist.ProcessGroup = next(group for of, group in zip(sets, groups, strict=True) if rank in of)
    return mine


def fails_first() -> bool:
    """Called by a rank that fails: whether none has failed before it, so that it is the one to say why."""
    if not dist.is_initialized():
        # Before that all ranks fail alike.
        return leads()
    try:
        store = dist.distributed_c10d._get_default_store()
        return bool(store.add("perilune/failed", 1) == 1)
    except RuntimeError:
        return True


def stop() -> None:
    """End the process group, if there is one; the last thing before a process exits."""
    if dist.is_initialized():
        gloo = dist.get_backend() == "gloo"
        dist.destroy_process_group()
        if gloo:
            # Its threads outlive the group, and one that frees its last tensor while Python shuts down aborts.
            time.sleep(0.2)


__all__ = [
    "Axes",
    "Mesh",
    "fails_first",
    "fill_axes",
    "leads",
    "local_rank",
    "processes",
    "start",
    "stop",
    "without_groups",
]
