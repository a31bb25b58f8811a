"""How ranks add up what each has a term of: over torch's process group, or through memory that all GPUs reach."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import torch
import torch.distributed as dist

from perilune.errors import Error
from perilune.parallel.expert import Symmetric

log = logging.getLogger(__name__)

Transport = Literal["symmetric", "collective"]
# Bytes that a rank would read of the others: past them the process group is sooner (bench/results/serve_ranks.json).
LARGEST = 1_250_000


class Link:
    """One rank's end; without `symmetric` everything goes over the process group."""

    def __init__(self, symmetric: Symmetric | None = None) -> None:
        self.symmetric = symmetric
        self._adders: dict[torch.dtype, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._largest = 0 if symmetric is None else LARGEST // (symmetric.ranks - 1)

    @property
    def transport(self) -> Transport:
        """What is used, the same on all ranks."""
        return "collective" if self.symmetric is None else "symmetric"

    def prepare(self, dtype: torch.dtype) -> None:
        """Make room for terms of a dtype. All ranks call it at the same time, outside of graphs."""
        if self.symmetric is not None and dtype in (torch.bfloat16, torch.float32) and dtype not in self._adders:
            self._adders[dtype] = self.symmetric.adder(self._largest // dtype.itemsize, dtype)

    def add(self, y: torch.Tensor) -> torch.Tensor:
        """The sum of `y` over the ranks, the same bits on all; y is not to be used afterwards."""
        add = self._adders.get(y.dtype)
        if add is not None and 0 < y.nbytes <= self._largest and y.nbytes % 16 == 0:
            return add(y)
        dist.all_reduce(y)
        return y


def connect(device: torch.device, rank: int, ranks: int, wanted: Transport, seconds: float) -> Link:
    """The link of the default process group: symmetric if that is wanted and all GPUs reach each other.

    All ranks call it.
    """
    if device.type != "cuda" or wanted == "collective":
        return Link()
    # Nothing here uses multicast, and not every machine lets it be set up.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    symmetric = None
    if _all_say(all(torch.cuda.can_device_access_peer(rank, other) for other in range(ranks) if other != rank), device):
        with suppress(Error):
            symmetric = Symmetric(timeout=seconds)
    link = Link(symmetric if _all_say(symmetric is not None, device) else None)
    if rank == 0:
        log.info("ranks: sums of few tokens and experts over %s memory", link.transport)
    return link


def _all_say(yes: bool, device: torch.device) -> bool:
    votes = torch.tensor([yes], dtype=torch.int32, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


__all__ = ["LARGEST", "Link", "Transport", "connect"]
