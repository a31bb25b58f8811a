"""Rank 0's side: it starts the other processes, and its runner tells them every call that it gets itself.

Commands go through a pipe to each rank, in order; those that move nothing between ranks wait for the next that does.
Tensors (tokens that are on the device only, hidden states, new weights) go through torch's process group.
"""

from __future__ import annotations

import datetime
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from perilune.errors import Error
from perilune.model import Stats, Transformer
from perilune.serve import processes
from perilune.serve.cache.cache import Copy
from perilune.serve.config import EngineConfig
from perilune.serve.loading import Loaded
from perilune.serve.ranks.shard import BALANCED, Cuts, Place, gather, load_part, parts_of
from perilune.serve.work import Chunk


@dataclass(frozen=True)
class Setup:
    """What a rank needs to know before its first command. group: file where the ranks meet; seconds: its timeout."""

    place: Place
    folder: Path
    config: EngineConfig
    device: str
    dtype: torch.dtype | None
    packed: bool
    group: str
    seconds: float
    threads: int


def meet(setup: Setup) -> torch.device:
    """Join the ranks; this rank's device."""
    device = torch.device(setup.device)
    if device.type == "cuda":
        device = torch.device("cuda", setup.place.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{setup.group}",
        rank=setup.place.rank,
        world_size=setup.place.ranks,
        timeout=datetime.timedelta(seconds=setup.seconds),
        device_id=device if device.type == "cuda" else None,
    )
    return device


class Ranks:
    """The other processes of an engine. model: rank 0's part; loaded: what each rank read.

    count: processes, this one included; rank r takes cuda:r. seconds: after which a call that some rank never reaches
    fails on the others. balanced: tokens of a step from which experts are balanced over the ranks. Raises Error where
    the model cannot be cut so, or a rank does not start.
    """

    def __init__(
        self,
        folder: str | Path,
        config: EngineConfig,
        count: int,
        device: str,
        dtype: torch.dtype | None = None,
        packed: bool = False,
        seconds: float = 300.0,
        balanced: int = BALANCED,
    ) -> None:
        if config.exact:
            raise Error(f"ranks is {count}; an exact engine (engine.exact) is one process")
        if dist.is_initialized():
            raise Error("ranks needs torch.distributed for itself; this process is in a process group already")
        if device.startswith("cuda") and torch.cuda.device_count() < count:
            raise Error(f"ranks is {count}; this machine has {torch.cuda.device_count()} GPUs")
        self.config, self.packed = config, packed
        self.failure: str | None = None
        self._queued: list[tuple[str, tuple[Any, ...]]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="perilune-ranks-")
        meeting = str(Path(self._folder.name) / "group")
        setups = [
            Setup(
                Place(r, count, balanced),
                Path(folder),
                config,
                device,
                dtype,
                packed,
                meeting,
                seconds,
                torch.get_num_threads(),
            )
            for r in range(count)
        ]
        self._processes, self._pipes = list[processes.Process](), list[Connection]()
        for setup in setups[1:]:
            process, pipe = processes.start("perilune.serve.ranks.worker")
            self._processes.append(process)
            self._pipes.append(pipe)
            pipe.send(setup)
        try:
            self.device = meet(setups[0])
            self.model, self.cuts, mine = load_part(folder, setups[0].place, self.device, dtype, packed)
            self.loaded = [mine, *map(self._ready, self._pipes)]
        except BaseException:
            self._kill()
            raise
        for rank, pipe in enumerate(self._pipes, 1):
            threading.Thread(target=self._watch, args=(rank, pipe), daemon=True).start()

    def _ready(self, pipe: Connection) -> Loaded:
        try:
            kind, what = pipe.recv()
        except EOFError:
            raise Error("a rank has ended before it was ready; its own output says why") from None
        if kind != "ready":
            raise Error(f"a rank has failed: {what}")
        loaded: Loaded = what
        return loaded

    def _watch(self, rank: int, pipe: Connection) -> None:
        """Wait for what a rank says: it only ever says that it failed, or ends."""
        text = "it has ended"
        with suppress(EOFError, OSError):
            text = str(pipe.recv()[1])
        if self.failure is None and self._processes:
            self.failure = f"rank {rank} has failed: {text}"
            # Whoever waits for that rank inside a collective waits no longer.
            with suppress(Exception):
                dist.distributed_c10d._abort_process_group()

    def later(self, name: str, *arguments: Any) -> None:
        """Tell all ranks with the next `now`."""
        self._queued.append((name, arguments))

    def now(self, name: str, *arguments: Any) -> None:
        """Tell all ranks. Raises Error if one has failed."""
        self._queued.append((name, arguments))
        if self.failure is None:
            try:
                for pipe in self._pipes:
                    pipe.send(self._queued)
            except OSError as error:
                self.failure = f"a rank has ended: {error}"
        self._queued = []
        if self.failure is not None:
            raise Error(self.failure)

    @contextmanager
    def together(self) -> Iterator[None]:
        """For what all ranks do: where a collective fails because one has failed, that one's error is raised."""
        try:
            yield
        except Error:
            raise
        except (RuntimeError, ValueError) as error:  # a group that was left is a ValueError
            for _ in range(200):
                if self.failure is not None:
                    raise Error(self.failure) from error
                time.sleep(0.01)
            raise

    def close(self) -> None:
        """End the other processes and leave their group."""
        others, self._processes = self._processes, []
        if not others:
            return
        with suppress(Error):
            self.now("end")
        for process in others:
            processes.end(process)
        with suppress(Exception):
            dist.destroy_process_group()
        self._folder.cleanup()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self._processes = []
        with suppress(Exception):
            dist.destroy_process_group()


class LeadRunner:
    """The runner of rank 0, which the others follow. Every call has the meaning that it has in `inner`."""

    def __init__(self, inner: Any, ranks: Ranks) -> None:
        self.inner, self.ranks = inner, ranks
        self.on_grid: bool = inner.on_grid
        self._known: dict[int, int] = {}  # pages of each slot's table that the others have

    def forward(
        self, chunks: Sequence[Chunk], stats: Stats | None = None, tokens_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        pieces = []
        for chunk in chunks:
            known, table = self._known.get(chunk.slot, 0), chunk.request.table
            self._known[chunk.slot] = len(table)
            what = (chunk.tokens, chunk.start, chunk.drafts, chunk.sampled, chunk.scored, chunk.decodes, chunk.exports)
            pieces.append((chunk.slot, table[known:], what))
        self.ranks.now("forward", pieces, stats is not None, 0 if tokens_T is None else len(tokens_T))
        with self.ranks.together():
            if tokens_T is not None:
                tokens_T = tokens_T.contiguous()
                dist.broadcast(tokens_T, 0)
            x_RD: torch.Tensor = self.inner.forward(chunks, stats, tokens_T)
        return x_RD

    def head(self, x_RD: torch.Tensor) -> torch.Tensor:
        x_RD = x_RD.contiguous()
        self.ranks.now("head", tuple(x_RD.shape), x_RD.dtype)
        with self.ranks.together():
            return share_head(self.inner, x_RD)

    def weights(self) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            return Transformer(self.ranks.cuts.config, packed=self.ranks.packed).state_dict()

    def put_weight(self, name: str, value: torch.Tensor) -> None:
        whole = value.detach().to(self.ranks.device).contiguous()
        self.ranks.now("put_weight", name, tuple(whole.shape), whole.dtype)
        with self.ranks.together():
            share_weight(self.inner, self.ranks.cuts, name, whole)

    def load(self, slot: int, state: Sequence[int], depth: int) -> None:
        self._known[slot] = 0
        self.ranks.later("load", slot, list(state), depth)
        self.inner.load(slot, state, depth)

    def save(self, slot: int, depth: int, state: Sequence[int]) -> None:
        self.ranks.later("save", slot, depth, list(state))
        self.inner.save(slot, depth, state)

    def accept(self, kept: Sequence[tuple[int, int, int]]) -> None:
        self.ranks.later("accept", list(kept))
        self.inner.accept(kept)

    def free(self, slot: int) -> None:
        self.ranks.later("free", slot)
        self.inner.free(slot)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if sources:
            self.ranks.later("copy_pages", list(sources), list(targets))
            self.inner.copy_pages(sources, targets)

    def move(self, copy: Copy) -> None:
        self.ranks.later("move", copy)
        self.inner.move(copy)

    def fetch(self, copies: Sequence[Copy]) -> Callable[[], bool]:
        self.ranks.later("fetch", list(copies))
        here, told = self.inner.fetch(copies), False

        def arrived() -> bool:
            nonlocal told
            if not here():
                return False
            if not told:
                # The others' copies may be slower; what comes next there waits for them.
                self.ranks.later("settle")
                told = True
            return True

        return arrived

    def settle(self) -> None:
        self.ranks.later("settle")
        self.inner.settle()

    def refresh(self) -> None:
        self.ranks.later("refresh")
        self.inner.refresh()

    def release(self, weights: bool = False) -> None:
        self.ranks.now("release", weights)
        self.inner.release(weights)

    def take(self, weights: bool = False) -> None:
        self._known = {}
        self.ranks.now("take", weights)
        take_part(self.inner, self.ranks.cuts, weights)


def share_head(runner: Any, x_RD: torch.Tensor) -> torch.Tensor:
    """logits_RV from rank 0's hidden states, a part of the vocabulary from each rank."""
    dist.broadcast(x_RD, 0)
    part_RV = runner.head(x_RD)
    ranks, rows = dist.get_world_size(), part_RV.shape[0]
    logits_RV: torch.Tensor = gather(part_RV, ranks).unflatten(0, (ranks, rows)).transpose(0, 1).flatten(1)
    return logits_RV


def take_part(runner: Any, cuts: Cuts, weights: bool) -> None:
    """`Runner.take` of a rank: weights that were made anew have to be told apart again."""
    runner.take(weights)
    runner.model.parts = parts_of(runner.model, cuts)


def share_weight(runner: Any, cuts: Cuts, name: str, whole: torch.Tensor) -> None:
    """Each rank's part of a weight that rank 0 has."""
    dist.broadcast(whole, 0)
    runner.put_weight(name, cuts.part(name, whole))


__all__ = ["LeadRunner", "Ranks", "Setup", "meet", "share_head", "share_weight", "take_part"]
