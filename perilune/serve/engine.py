"""The engine: requests in, a step at a time, outputs of every step out. One thread; a server calls it from its own.

A step is `schedule`, the model, sampling, `postprocess`. Between steps, and only there, requests come and go and the
weights may change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from math import isnan
from typing import Any

import torch

from perilune.errors import Error
from perilune.model import Stats, Transformer
from perilune.serve import sampling, segment
from perilune.serve.cache import Chain, Lease, PrefixCache, check_integrity, live
from perilune.serve.config import EngineConfig
from perilune.serve.pools import Layout, Pools
from perilune.serve.request import Output, Params, Request, token_ids
from perilune.serve.runner import runner_for
from perilune.serve.scheduler import Scheduler
from perilune.serve.segment import Segment
from perilune.serve.speculate import Drafter, NgramDrafter, Width
from perilune.serve.work import Chunk


@dataclass(frozen=True)
class Hold:
    """A client's lease on the prefix `tokens`, which stays on the device until its end, its time, or new weights."""

    number: int
    tokens: tuple[int, ...]
    salt: str
    version: int


@dataclass
class Flight:
    """A step that was begun. begin: when, by the wall clock; None for one that was begun early."""

    chunks: list[Chunk]
    drawn: sampling.Drawn
    begin: float | None


_DEFAULT = Params()


class Engine:
    """A model, its memory and its requests.

    clock: seconds, for deadlines, waiting times and measured step times. drafter: guesses tokens where
    config.drafts > 0 (default: prompt lookup).
    Raises Error for a model or a configuration that cannot be served.
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.config, self.clock = model.eval(), config, clock
        weight = model.lm_head.weight
        self.layout = Layout.of(model.config, config, weight.dtype)
        geometry = self.layout.geometry()
        pages = [bytes_ // geometry.page_bytes for bytes_ in (config.arena_bytes, config.host_bytes)]
        if pages[0] < 1:
            raise Error(f"engine.arena_bytes is {config.arena_bytes}; one page needs {geometry.page_bytes}")
        self.pools = Pools(self.layout, pages[0], pages[1], weight.device)
        self.runner = runner_for(model, self.pools, config)
        self.cache = PrefixCache(
            geometry, config.arena_bytes, config.host_bytes, config.placement, config.eviction, self.pools.move
        )
        self.drafter = drafter or NgramDrafter()
        self.width = Width(config.drafts)
        self.scheduler = Scheduler(config, self.cache, self.runner, self._propose)
        self.counters = self.scheduler.counters
        self.paused = self.idle = False  # idle: the last step had nothing to compute
        self.asleep = 0
        self.incomplete: str | None = None  # why the weights cannot be used
        self._flight: Flight | None = None
        self._landed: list[Output] = []
        self._lock, self._late = threading.Lock(), list[int]()  # late: ids to abort when the running step is over
        self._ids = count()

    # --- requests

    def add(
        self,
        tokens: Sequence[int],
        params: Params = _DEFAULT,
        *,
        salt: str = "",
        turn: int = 0,
        marks: Sequence[int] = (),
        deadline: float | None = None,
        hold: float | None = None,
        stop: Callable[[int], bool] | None = None,
        mask: Callable[[Sequence[int]], Any] | None = None,
        remote: bool = False,
    ) -> int:
        """Put a request into the queue; its id. Fields as in `Request`; deadline and hold in seconds from now.

        Raises Error for tokens outside the vocabulary, too long a request, or one that no memory could hold.
        """
        vocabulary, now = self.model.config.vocab_size, self.clock()
        tokens = token_ids("tokens", tokens)
        for name, seconds in (("deadline", deadline), ("hold", hold)):
            if seconds is not None and (isnan(seconds) or (name == "hold" and seconds < 0)):
                raise Error(f"{name} is {seconds}; must be seconds from now, >= 0 for hold")
        if not tokens:
            raise Error("tokens is empty; needs at least one token (a beginning-of-sequence token, say)")
        named = (("tokens", tokens), ("stop_ids", params.stop_ids), ("logit_bias", list(params.logit_bias)))
        for name, ids in named:
            for token in (min(ids), max(ids)) if ids else ():
                if not 0 <= token < vocabulary:
                    raise Error(f"{name} holds id {token}; the vocabulary is 0..{vocabulary - 1}")
        longest = self.model.config.max_position_embeddings
        if len(tokens) + params.max_tokens > longest:
            raise Error(f"{len(tokens)} prompt tokens and max_tokens {params.max_tokens} exceed {longest} positions")
        id = next(self._ids)
        seed = params.seed if params.seed is not None else hash((self.config.seed, id))
        request = Request(
            id,
            tokens,
            params,
            now,
            salt,
            turn,
            tuple(marks),
            None if deadline is None else now + deadline,
            hold,
            stop,
            mask,
            seed,
        )
        with self._alone():
            self.scheduler.add(request, remote)
        return id

    def abort(self, id: int) -> None:
        """End a request; the next `step` gives its last output. Unknown or ended ids are ignored.

        While a step runs (from another thread, or where an iterator is collected) the next one does it.
        """
        if not self._lock.acquire(blocking=False):
            self._late.append(id)
            return
        try:
            self.scheduler.abort(id)
        finally:
            self._lock.release()

    @property
    def busy(self) -> bool:
        """Whether a step has something to do or to give back."""
        waits = self.scheduler.requests() or self._landed or self._flight or self._late
        return bool(waits) or self.scheduler.has_outputs

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Run one step; what it gave to each request that got something or ended. Does nothing while paused.

        Raises Error while the engine sleeps or its weights are incomplete. Whatever else a step raises ends all that
        run with an error, since their states may have advanced by half a step; the engine goes on with the others.
        """
        if self.asleep or self.incomplete:
            raise Error(self.incomplete or f"the engine sleeps at level {self.asleep}; allowed after wake()")
        if self.paused:
            return []
        with self._alone(), self._whole():
            while self._late:
                self.scheduler.abort(self._late.pop())
            flight = self._flight or self._begin(self.scheduler.schedule(self.clock()))
            self.idle = not flight.chunks
            for chunk in flight.chunks:
                chunk.request.ahead = False
            # The device goes on with the next step while the host looks at this one.
            self._flight = self._follow(flight)
            outputs = self._land(flight)
            outputs, self._landed = self._landed + outputs, []
            return outputs

    @torch.inference_mode()
    def land(self) -> None:
        """Wait for a step that was begun early; the next `step` gives its outputs. Before weights or memory change."""
        with self._alone(), self._whole():
            flight, self._flight = self._flight, None
            if flight is not None:
                for chunk in flight.chunks:
                    chunk.request.ahead = False
                self._landed += self._land(flight)

    # --- control; weights and memory are in `control`

    def pause(self) -> None:
        """Steps do nothing until `resume`; requests stay where they are."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def hold(self, tokens: Sequence[int], seconds: float, salt: str = "") -> Hold:
        """Keep the longest cached prefix of tokens from eviction for so long.

        A request added with `hold=` leaves a checkpoint at its very end and holds it: see `Output.hold`.
        """
        chain = Chain.of(list(tokens), self.config.match_unit, salt, self.scheduler.version)
        if not seconds >= 0:
            raise Error(f"seconds is {seconds}; must be >= 0")
        number = self.scheduler.holds.take(chain, self.clock(), seconds, len(tokens))
        return self.held(number, tokens, salt)

    def held(self, number: int, tokens: Sequence[int], salt: str = "") -> Hold:
        """The hold of a number, as `Output.hold` gives it; tokens: of the request, prompt and answer."""
        lease = self._lease(number)
        return Hold(number, tuple(tokens[: lease.depth]), salt, self.scheduler.version)

    def fork(self, hold: Hold, copies: int) -> list[Hold]:
        """So many more holds of the same prefix, each to be released by itself. Raises Error for one that has ended."""
        leases = self.cache.fork(self._lease(hold.number), copies)
        return [replace(hold, number=self.scheduler.holds.keep(lease)) for lease in leases]

    def renew(self, hold: Hold, seconds: float) -> None:
        """Move the end of a hold to so long from now. Raises Error for one that has ended."""
        if not seconds >= 0:
            raise Error(f"seconds is {seconds}; must be >= 0")
        self._lease(hold.number).deadline = self.clock() + seconds

    def release(self, hold: Hold) -> None:
        """Give up a hold. One that has ended is ignored."""
        self.scheduler.holds.give_back(hold.number)

    def export(self, hold: Hold) -> Segment:
        """The bytes of a held prefix: see `segment`. Raises Error for a hold that has ended, or of nothing."""
        lease = self._lease(hold.number)
        return segment.export(self.pools, self.cache, lease, hold.tokens, hold.salt, hold.version)

    def put(self, value: Segment) -> int:
        """Take another engine's segment into the cache; how many tokens it makes reusable. Raises as `segment.put`."""
        if self.asleep:
            raise Error(f"the engine sleeps at level {self.asleep}; wake it first")
        return segment.put(self.pools, self.cache, value, self.scheduler.version, self.clock(), self.config.exact)

    def delivered(self, id: int) -> None:
        """A request added with `remote=True` waits no longer, whether its segment came or not."""
        self.scheduler.delivered(id)

    def _lease(self, number: int) -> Lease:
        lease = self.scheduler.holds.get(number)
        if lease is None or (lease.deadline is not None and lease.deadline <= self.clock()):
            raise Error(f"hold {number} has ended; allowed: one that is neither released nor past its time")
        return lease

    def clear_cache(self) -> None:
        """Forget every prefix that no request uses."""
        live.clear(self.cache)

    def check_integrity(self) -> None:
        """Recount pages, slots, leases and states between two steps. Raises AssertionError: a bug, never a request."""
        check_integrity(self.cache)
        self.scheduler.check_integrity()

    # --- inside a step

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise Error where another thread, or a callback of a request, is inside a step."""
        if not self._lock.acquire(blocking=False):
            raise Error("a step of this engine is running; one thread uses an engine, and callbacks leave it alone")
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What raises inside a step may leave states that advanced without their tokens: nobody goes on from them."""
        try:
            yield
        except BaseException as error:
            self._flight = None
            self.scheduler.fail(f"a step failed: {error!r}")
            raise

    def _begin(self, chunks: list[Chunk]) -> Flight:
        begin = time.perf_counter()
        stats = Stats() if any(chunk.request.params.routing for chunk in chunks) else None
        if not chunks:
            return Flight(chunks, sampling.Drawn([], []), begin)
        x_RD = self.runner.forward(chunks, stats)
        return Flight(chunks, sampling.start(chunks, x_RD, self.runner.head, stats), begin)

    def _follow(self, flight: Flight) -> Flight | None:
        """Begin the step after one whose tokens are still on the device, if it can only be more of the same."""
        tokens_R = flight.drawn.tokens_R
        if not self.config.overlap or self.config.exact or self.config.drafts or tokens_R is None:
            return None
        if not all(sampling.alike(chunk) for chunk in flight.chunks):
            return None
        chunks = self.scheduler.ahead(flight.chunks, self.clock())
        if not chunks:
            return None
        places = {chunk.request.id: i for i, chunk in enumerate(flight.chunks)}
        rows = [places[chunk.request.id] for chunk in chunks]
        tokens_T = tokens_R if len(rows) == len(tokens_R) else tokens_R[rows]
        x_RD = self.runner.forward(chunks, None, tokens_T)
        drawn = sampling.start(chunks, x_RD, self.runner.head, ahead=1)
        return Flight(chunks, drawn, None)

    def _land(self, flight: Flight) -> list[Output]:
        results = flight.drawn.results()
        if flight.begin is not None and flight.chunks:
            self._observe(flight.chunks, time.perf_counter() - flight.begin)
        self._count(flight.chunks)
        return self.scheduler.postprocess(flight.chunks, results, self.clock())

    def _propose(self, requests: Sequence[Request]) -> None:
        if not self.config.drafts or not requests:
            return
        accept = sum(request.accept for request in requests) / len(requests)
        width = self.width.choose(len(requests), accept)
        drafts = self.drafter.propose(requests, width) if width else [[] for _ in requests]
        vocabulary = self.model.config.vocab_size
        for request, mine in zip(requests, drafts, strict=True):
            request.drafts = [token for token in mine[:width] if 0 <= token < vocabulary]

    def _count(self, chunks: Sequence[Chunk]) -> None:
        tokens = sum(len(chunk.tokens) for chunk in chunks if chunk.decodes)
        self.counters.steps += bool(chunks)
        self.counters.decode += tokens
        self.counters.prefill += sum(len(chunk.tokens) for chunk in chunks) - tokens

    def _observe(self, chunks: Sequence[Chunk], seconds: float) -> None:
        if all(chunk.decodes for chunk in chunks):
            self.width.observe(len(chunks), max(len(chunk.tokens) for chunk in chunks), seconds)


__all__ = ["Engine", "Hold"]
