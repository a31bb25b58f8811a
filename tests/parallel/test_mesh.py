"""The mesh: who is in which group, and that a group gives up on a rank that never comes after the run's timeout."""

from __future__ import annotations

import sys
import time
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from perilune.ops.sequences import Sequences
from perilune.parallel import mesh
from perilune.parallel.slices import Order, cut_stream

sys.path.insert(0, str(Path(__file__).parent))

from test_expert_training import spawn

TIMEOUT = 4.0
LAYOUTS = (1, 2, 4)


def look(rank: int) -> tuple[list[Any], str]:
    """Members of the groups of every layout; then rank 3 stays away from both of its groups in the layout of 2."""
    seen = []
    for shards in LAYOUTS:
        made = mesh.start(torch.device("cpu"), shards, 60.0)
        seen.append((made.shard, made.shards, *map(_members, (made.experts, made.twins, made.everyone))))
    made = mesh.start(torch.device("cpu"), 2, TIMEOUT)
    group = {1: made.twins, 2: made.experts}.get(rank)
    if group is None:
        # Its end would cut the others off, so it outlives their wait by far.
        time.sleep(3 * TIMEOUT if rank == 3 else 0)
        return seen, "does not wait"
    begin = time.monotonic()
    try:
        dist.all_reduce(torch.zeros(1), group=group)
    except RuntimeError:
        return seen, "gave up" if abs(time.monotonic() - begin - TIMEOUT) < TIMEOUT - 0.5 else "was cut off"
    return seen, "went on"


def _members(group: dist.ProcessGroup | None) -> list[int] | None:
    """By an all-gather in the group."""
    if group is None:
        return None
    out = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(out, torch.tensor([dist.get_rank()]), group=group)
    return [int(x) for x in out]


def test_rows_are_the_most_that_a_cut_gives_a_rank() -> None:
    """What buffers are made for, against the cut itself, in both orders."""
    for cp, tp, tokens in product(range(1, 6), (1, 3), range(1, 100)):
        rows = mesh.Mesh(sizes=(1, 1, 1, cp, tp)).rows(tokens)
        for order in get_args(Order):
            most = cut_stream(Sequences.from_lengths([tokens]), cp, order).most_rows
            assert rows == -(-most // tp), (cp, tp, tokens, order)


def test_groups_of_four_ranks_and_their_timeout() -> None:
    # Without a timeout of their own the groups of the layout of 2 would wait for torch's half hour.
    got = spawn(look, 4, limit=90)
    everyone = [0, 1, 2, 3]
    groups = (
        ([None] * 4, [everyone] * 4),
        ([[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]),
        ([everyone] * 4, [None] * 4),
    )
    for rank in range(4):
        assert not isinstance(got[rank], str), got[rank]
        seen, end = got[rank]
        assert seen == [
            (rank % shards, shards, experts[rank], twins[rank], everyone)
            for shards, (experts, twins) in zip(LAYOUTS, groups, strict=True)
        ]
        assert end == ("gave up" if rank in (1, 2) else "does not wait")
