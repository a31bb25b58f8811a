"""Rank 0's side: it starts the other processes, sends them commands (of `runner`), and learns when one ends.

Commands go through a pipe to each rank, in order; those that move nothing between ranks wait for the next that does.
Tensors (tokens that are on the device only, hidden states, new weights) go through torch's process group.
"""

from __future__ import annotations

import datetime
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from perilune.errors import Error
from perilune.model import Reader
from perilune.serve import processes
from perilune.serve.config import EngineConfig
from perilune.serve.errors import EngineError
from perilune.serve.pools import Layout, Pools
from perilune.serve.ranks.link import Link, Transport, connect
from perilune.serve.ranks.segments import WholePools
from perilune.serve.ranks.shard import BALANCED, Place, load_part

log = logging.getLogger(__name__)
LEAVE = 10.0  # seconds that the ranks of a sound engine have to leave each other
BLAME = 2.0  # seconds after a failed collective in which the rank that was the reason says so


@dataclass(frozen=True)
class Setup:
    """What a rank needs to know before its first command. group: file where the ranks meet; seconds: their timeout."""

    place: Place
    folder: Path
    config: EngineConfig
    device: str
    dtype: torch.dtype | None
    packed: bool
    reader: Reader
    group: str
    transport: Transport
    seconds: float
    threads: int


def take_device(setup: Setup) -> torch.device:
    """This rank's device, which is current from here on."""
    device = torch.device(setup.device)
    if device.type == "cuda":
        device = torch.device("cuda", setup.place.rank)
        torch.cuda.set_device(device)
    return device


def meet(setup: Setup, device: torch.device) -> Link:
    """Join the ranks; the link to the others."""
    place = setup.place
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{setup.group}",
        rank=place.rank,
        world_size=place.ranks,
        timeout=datetime.timedelta(seconds=setup.seconds),
        device_id=device if device.type == "cuda" else None,
    )
    return connect(device, place.rank, place.ranks, setup.transport, setup.seconds)


class Ranks:
    """The other processes of an engine. model: rank 0's part; loaded: what each rank read.

    count: processes, this one included; rank r takes cuda:r. seconds: after which a call that some rank never reaches
    fails on the others. balanced: tokens of a step from which experts are balanced over the ranks. transport:
    "symmetric" (docs/serve.md says what of it is unverified) is used where the GPUs can; `link.transport` is what is.
    Raises Error where the model cannot be cut so, or a rank does not start.
    """

    def __init__(
        self,
        folder: str | Path,
        config: EngineConfig,
        count: int,
        device: str,
        dtype: torch.dtype | None = None,
        packed: bool = False,
        reader: Reader = "safetensors",
        seconds: float = 300.0,
        balanced: int = BALANCED,
        transport: Transport = "collective",
    ) -> None:
        if config.exact:
            raise Error(f"ranks is {count}; an exact engine (engine.exact) is one process")
        if dist.is_initialized():
            raise Error("ranks needs torch.distributed for itself; this process is in a process group already")
        if device.startswith("cuda") and torch.cuda.device_count() < count:
            raise Error(f"ranks is {count}; this machine has {torch.cuda.device_count()} GPUs")
        self.config, self.packed = config, packed
        self.failure: str | None = None
        self.forget_graphs: Callable[[], None] = lambda: None  # of this rank, before it leaves the others
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
                reader,
                meeting,
                transport,
                seconds,
                torch.get_num_threads(),
            )
            for r in range(count)
        ]
        self._processes, self._pipes = list[processes.Process](), list[Connection]()
        try:
            for setup in setups[1:]:
                process, pipe = processes.start("perilune.serve.ranks.worker")
                self._processes.append(process)
                self._pipes.append(pipe)
                with suppress(OSError):  # one that has ended already is told of by `_said`
                    pipe.send(setup)
            for pipe in self._pipes:  # the meeting waits long for one that will not come
                if not pipe.poll(seconds):
                    raise Error(f"a rank has not come within {seconds:g} s; its own output may say why")
                self._said(pipe, "here")
            self.device = take_device(setups[0])
            self.link = meet(setups[0], self.device)
            self.model, self.cuts, mine = load_part(
                folder, setups[0].place, self.device, dtype, packed, reader, self.link
            )
            self.loaded = [mine, *(self._said(pipe, "ready") for pipe in self._pipes)]
            self.link.prepare(self.model.lm_head.weight.dtype)
        except BaseException:
            self._kill()
            raise
        for rank, pipe in enumerate(self._pipes, 1):
            threading.Thread(target=self._watch, args=(rank, pipe), daemon=True).start()

    def _said(self, pipe: Connection, expected: str) -> Any:
        """What a rank says on its way: it is "here", and can meet the others; it is "ready", with what it read."""
        try:
            kind, what = pipe.recv()
        except (EOFError, OSError):
            raise Error("a rank has ended before it was ready; its own output says why") from None
        if kind != expected:
            raise Error(f"a rank has failed: {what}")
        return what

    def _watch(self, rank: int, pipe: Connection) -> None:
        """Wait for what a rank says: it only ever says that it failed, or ends."""
        text = "it has ended"
        with suppress(EOFError, OSError):
            text = str(pipe.recv()[1])
        if self.failure is None and self._processes:
            self.failure = f"rank {rank} has failed: {text}"
            # Whoever waits for that rank waits no longer: in shared memory, or inside a collective.
            if self.link.symmetric is not None:
                threading.Thread(target=self.link.symmetric.release, args=(BLAME,), daemon=True).start()
            _abort()

    def later(self, name: str, *arguments: Any) -> None:
        """Tell all ranks with the next `now`."""
        self._queued.append((name, arguments))

    def now(self, name: str, *arguments: Any) -> None:
        """Tell all ranks. Raises EngineError if one has failed."""
        self._queued.append((name, arguments))
        queued, self._queued = self._queued, []
        if self.failure is None:
            try:
                for pipe in self._pipes:
                    pipe.send(queued)
            except OSError as error:
                self.failure = f"a rank has ended: {error}"
            except BaseException as error:
                self.failure = f"rank 0 has failed: {error!r}"  # some have the command, others not
                raise
        if self.failure is not None:
            raise EngineError(self.failure, "failed")

    @contextmanager
    def together(self, name: str, *arguments: Any) -> Iterator[None]:
        """`now`, and what this rank does of it. Whoever breaks off in it is out of step with the others, and the engine
        has failed: raises EngineError, with the reason of the rank that was first."""
        try:
            self.now(name, *arguments)
            yield
        except EngineError:
            raise
        except BaseException as error:
            end = time.monotonic() + BLAME
            while self.failure is None and isinstance(error, Exception) and time.monotonic() < end:
                time.sleep(0.01)
            if self.failure is None:
                self.failure = f"rank 0 has failed: {error!r}"
            if not isinstance(error, Exception):
                raise
            raise EngineError(self.failure, "failed") from error

    def together_as_one(self, pools: Pools) -> WholePools:
        """Memory of all ranks for segments, which are those of an engine without ranks. pools: of rank 0."""
        whole = Layout.of(self.cuts.config, self.config, self.model.lm_head.weight.dtype)
        return WholePools(pools, self, whole)

    def close(self) -> None:
        """End the other processes and leave their group, within LEAVE seconds and a few.

        What a rank that has ended left unfinished on this GPU may keep this process from leaving; that is logged.
        """
        others, self._processes = self._processes, []
        if not others:
            return
        if self.failure is None:
            with suppress(Error):
                self.now("end")
        # All leave at the same time: NCCL lets nobody go who is alone. After a failure there is none to wait for.
        sound = self.failure is None
        deadline = time.monotonic() + (LEAVE if sound else BLAME)
        leaving = threading.Thread(target=self._depart, args=(sound,), daemon=True)
        leaving.start()
        for process in others:
            processes.end(process, max(0.0, deadline - time.monotonic()) if sound else 0.0)
        leaving.join(max(BLAME, deadline - time.monotonic()))
        if leaving.is_alive() and sound:
            aborting = threading.Thread(target=_abort, daemon=True)
            aborting.start()
            aborting.join(BLAME)
        if dist.is_initialized():
            log.warning("ranks: the process group could not be left; this process should end")
        self._folder.cleanup()

    def _depart(self, together: bool) -> None:
        """together: with the other ranks; otherwise without waiting for any."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.forget_graphs()
        if not together:
            _abort()
        if dist.is_initialized():  # gloo cannot be aborted, and waits for nobody
            _leave()

    def _kill(self) -> None:
        for process in self._processes:
            processes.end(process, 0)
        self._processes = []
        _leave()
        self._folder.cleanup()


def _leave() -> None:
    with suppress(Exception):
        dist.destroy_process_group()


def _abort() -> None:
    with suppress(Exception):
        dist.distributed_c10d._abort_process_group()


__all__ = ["Ranks", "Setup", "meet", "take_device"]
