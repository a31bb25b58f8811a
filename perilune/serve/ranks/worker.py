"""A rank that is not the first: `python -m perilune.serve.ranks.worker FD`, started by `lead`, does what it is told.

It ends when its pipe does, whatever it is waiting for.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from perilune.model import Stats
from perilune.serve.pools import Layout, Pools
from perilune.serve.processes import end_with_pipe
from perilune.serve.ranks.lead import Setup, meet, take_device
from perilune.serve.ranks.runner import share_head, share_weight, take_part
from perilune.serve.ranks.segments import cut_state, join_state, take_rows
from perilune.serve.ranks.shard import Cuts, load_part
from perilune.serve.runner_paged import PagedRunner
from perilune.serve.work import Chunk


@dataclass
class Seat:
    """What a runner wants to know of a request."""

    slot: int
    table: list[int] = field(default_factory=list)


class Worker:
    """A runner under commands. whole: the layout of the whole model's states."""

    def __init__(self, runner: PagedRunner, cuts: Cuts, whole: Layout, device: torch.device) -> None:
        self.runner, self.cuts, self.whole, self.device = runner, cuts, whole, device
        self.seats: dict[int, Seat] = {}

    def do(self, name: str, arguments: tuple[Any, ...]) -> None:
        """One command: a method of this class, or else of the runner."""
        mine = getattr(self, f"_{name}", None)
        # Weights are made and changed outside of inference mode, as rank 0 does.
        with torch.no_grad() if name in ("take", "release", "put_weight") else torch.inference_mode():
            (mine or getattr(self.runner, name))(*arguments)

    def _load(self, slot: int, state: list[int], depth: int) -> None:
        self.seats[slot] = Seat(slot)
        self.runner.load(slot, state, depth)

    def _forward(self, pieces: list[tuple[int, list[int], tuple[Any, ...]]], routing: bool, on_device: int) -> None:
        chunks = []
        for slot, pages, what in pieces:
            seat = self.seats[slot]
            seat.table += pages
            chunks.append(Chunk(seat, *what))  # type: ignore[arg-type]
        tokens_T = None
        if on_device:
            tokens_T = torch.empty(on_device, dtype=torch.int64, device=self.device)
            dist.broadcast(tokens_T, 0)
        self.runner.forward(chunks, Stats() if routing else None, tokens_T)

    def _head(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        share_head(self.runner, torch.empty(shape, dtype=dtype, device=self.device))

    def _join_state(self, pages: list[int]) -> None:
        join_state(self.runner.pools, self.whole, self.cuts.place, pages)

    def _take_rows(self, pages: list[int], size: int) -> None:
        take_rows(self.runner.pools, pages, torch.empty(size, dtype=torch.uint8, device=self.device))

    def _cut_state(self, pages: list[int], size: int) -> None:
        whole_B = torch.empty(size, dtype=torch.uint8, device=self.device)
        cut_state(self.runner.pools, self.whole, self.cuts.place, pages, whole_B)

    def _take(self, weights: bool) -> None:
        take_part(self.runner, self.cuts, weights)

    def _put_weight(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        share_weight(self.runner, self.cuts, name, torch.empty(shape, dtype=dtype, device=self.device))


def build(setup: Setup, device: torch.device) -> tuple[Worker, Any]:
    """This rank's part of the model, its memory, and what it read. Waits for the other ranks."""
    link = meet(setup, device)
    model, cuts, loaded = load_part(setup.folder, setup.place, device, setup.dtype, setup.packed, setup.reader, link)
    layout, whole = (
        Layout.of(config, setup.config, model.lm_head.weight.dtype) for config in (model.config, cuts.config)
    )
    size = layout.geometry().page_bytes
    pools = Pools(layout, setup.config.arena_bytes // size, setup.config.host_bytes // size, device)
    return Worker(PagedRunner(model.eval(), pools, setup.config), cuts, whole, device), loaded


def listen(pipe: Connection, commands: queue.SimpleQueue[Any]) -> None:
    """Take what comes, so that a rank that waits for the others sees the end of the pipe."""
    try:
        while True:
            commands.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(1)


def main() -> None:
    end_with_pipe()
    pipe = Connection(int(sys.argv[1]))
    setup: Setup = pipe.recv()
    torch.set_num_threads(setup.threads)
    commands: queue.SimpleQueue[list[tuple[str, tuple[Any, ...]]]] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(pipe, commands), daemon=True).start()
    try:
        device = take_device(setup)
        pipe.send(("here", None))
        worker, loaded = build(setup, device)
        pipe.send(("ready", loaded))
        worker.cuts.link.prepare(worker.runner.model.lm_head.weight.dtype)
        while True:
            for name, arguments in commands.get():
                if name == "end":
                    worker.runner.forget_graphs()
                    dist.destroy_process_group()
                    os._exit(0)
                worker.do(name, arguments)
    except BaseException:
        with suppress(OSError):
            pipe.send(("failed", traceback.format_exc()))
        os._exit(1)


if __name__ == "__main__":
    main()
