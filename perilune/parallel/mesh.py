"""The processes of a run as a mesh with named axes; the only place that knows which rank stands where.

Axes: replicate (copies of everything) x shard (one set of experts, spread over its ranks; ep is folded over it). Every
rank has its own tokens. More axes (pp, cp, tp) come with what needs them.
"""

from __future__ import annotations

import datetime
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from perilune.errors import Error


@dataclass(frozen=True)
class Mesh:
    """rank and ranks of the run; shard: this rank's place among the `shards` that share one set of experts.

    experts: the ranks of this set; twins: the ranks with the same experts. A group of one rank is None.
    """

    rank: int = 0
    ranks: int = 1
    shard: int = 0
    shards: int = 1
    everyone: dist.ProcessGroup | None = None
    experts: dist.ProcessGroup | None = None
    twins: dist.ProcessGroup | None = None


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


def start(device: torch.device, shards: int = 0, timeout: float = 600.0) -> Mesh:
    """The mesh of the processes that torchrun started, or of this one alone.

    shards: over how many ranks one set of experts is spread, 0 for all. timeout: seconds after which a collective that
    some rank never reaches ends the program on the others. Raises Error when shards does not divide the processes.
    """
    ranks = processes()
    shards = shards or ranks
    if shards < 1 or ranks % shards:
        raise Error(f"parallel.ep is {shards}; must divide the {ranks} processes of the run, or be 0 for all of them")
    if ranks == 1:
        return Mesh()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    rank = dist.get_rank()
    grid = torch.arange(ranks).view(-1, shards)
    experts, twins = (_group(axis.tolist(), rank, timeout) for axis in (grid, grid.T))
    return Mesh(rank, ranks, rank % shards, shards, dist.group.WORLD, experts, twins)


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


def stop() -> None:
    """End the process group, if there is one; the last thing before a process exits."""
    if dist.is_initialized():
        gloo = dist.get_backend() == "gloo"
        dist.destroy_process_group()
        if gloo:
            # Its threads outlive the group, and one that frees its last tensor while Python shuts down aborts.
            time.sleep(0.2)


__all__ = ["Mesh", "leads", "local_rank", "processes", "start", "stop"]
