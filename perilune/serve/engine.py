"""The engine: requests in, a step at a time, outputs of every step out. One thread; a server calls it from its own.

A step is `schedule`, the model, sampling, `postprocess`. Between steps, and only there, requests come and go and the
weights may change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from perilune.errors import Error
from perilune.model import Stats, Transformer
from perilune.serve import sampling, segment
from perilune.serve.cache import Chain, PrefixCache, check_integrity, live
from perilune.serve.config import EngineConfig
from perilune.serve.cuts import reach_of
from perilune.serve.errors import EngineError
from perilune.serve.holds import Hold, checked
from perilune.serve.incoming import new_request
from perilune.serve.pools import Layout, Pools
from perilune.serve.request import Output, Params
from perilune.serve.runner import runner_for
from perilune.serve.scheduler import Scheduler
from perilune.serve.segment import Segment
from perilune.serve.speculate import Drafter, NgramDrafter, Speculation
from perilune.serve.work import Chunk

if TYPE_CHECKING:
    from perilune.serve.ranks.lead import Ranks


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
    config.drafts > 0 (default: prompt lookup). ranks: the processes that share the model, which is this one's part.
    Raises Error for a model or a configuration that cannot be served.
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.monotonic,
        ranks: Ranks | None = None,
    ) -> None:
        self.model, self.config, self.clock = model.eval(), config, clock
        weight = model.lm_head.weight
        self.layout = Layout.of(model.config, config, weight.dtype)
        geometry = self.layout.geometry()
        pages = [bytes_ // geometry.page_bytes for bytes_ in (config.arena_bytes, config.host_bytes)]
        if pages[0] < 1:
            raise Error(f"engine.arena_bytes is {config.arena_bytes}; one page needs {geometry.page_bytes}")
        self.pools = Pools(self.layout, pages[0], pages[1], weight.device)
        self.runner, self.ranks = runner_for(model, self.pools, config, ranks), ranks
        self._memory: segment.Memory = self.pools if ranks is None else ranks.together_as_one(self.pools)
        self.cache = PrefixCache(
            geometry, config.arena_bytes, config.host_bytes, config.placement, config.eviction, self.runner.move
        )
        self.speculation = Speculation(drafter or NgramDrafter(), config.drafts, model.config.vocab_size)
        self.scheduler = Scheduler(config, self.cache, self.runner, self.speculation.propose, reach_of(model.config))
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
        priority: int = 0,
        remote: bool = False,
    ) -> int:
        """Put a request into the queue; its id. Fields as in `Request`; deadline and hold in seconds from now.

        Raises Error for tokens outside the vocabulary, too long a request, or one that no memory could hold.
        """
        request = new_request(
            next(self._ids),
            tokens,
            params,
            self.model.config,
            self.clock(),
            self.config.seed,
            salt=salt,
            turn=turn,
            marks=marks,
            deadline=deadline,
            hold=hold,
            stop=stop,
            mask=mask,
            priority=priority,
        )
        with self.alone():
            self.scheduler.add(request, remote)
        return request.id

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

        Raises EngineError while the engine sleeps or its weights are incomplete. Whatever else a step raises ends all
        that run with an error, since their states may have advanced by half a step; the engine goes on with the others.
        """
        if self.asleep or self.incomplete:
            why = self.incomplete or f"the engine sleeps at level {self.asleep}; allowed after wake()"
            raise EngineError(why, "unavailable")
        if self.paused:
            return []
        with self.alone(), self._whole():
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
        with self.alone(), self._whole():
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
        with self.alone():
            number = self.scheduler.holds.take(chain, self.clock(), checked(seconds), len(tokens))
        return self.held(number, tokens, salt)

    def held(self, number: int, tokens: Sequence[int], salt: str = "") -> Hold:
        """The hold of a number, as `Output.hold` gives it; tokens: of the request, prompt and answer."""
        return self.scheduler.holds.of(number, tokens, salt, self.scheduler.version, self.clock())

    def fork(self, hold: Hold, copies: int) -> list[Hold]:
        """So many more holds of the same prefix, each to be released by itself. Raises Error for one that has ended."""
        with self.alone():
            return self.scheduler.holds.fork(hold, copies, self.clock())

    def renew(self, hold: Hold, seconds: float) -> None:
        """Move the end of a hold to so long from now. Raises Error for one that has ended."""
        self.scheduler.holds.renew(hold, seconds, self.clock())

    def release(self, hold: Hold) -> None:
        """Give up a hold. One that has ended is ignored. Raises Error for another engine's."""
        with self.alone():
            self.scheduler.holds.give_back(self.scheduler.holds.mine(hold))

    def export(self, hold: Hold) -> Segment:
        """The bytes of a held prefix: see `segment`. Raises Error for a hold that has ended, or of nothing."""
        holds = self.scheduler.holds
        lease = holds.lease(holds.mine(hold), self.clock())
        with self.alone():
            return segment.export(self._memory, self.cache, lease, hold.tokens, hold.salt, hold.version)

    def put(self, value: Segment) -> int:
        """Take another engine's segment into the cache; how many tokens it makes reusable. Raises as `segment.put`."""
        if self.asleep:
            raise EngineError(f"the engine sleeps at level {self.asleep}; wake it first", "unavailable")
        with self.alone():
            return segment.put(self._memory, self.cache, value, self.scheduler.version, self.clock(), self.config.exact)

    def delivered(self, id: int) -> None:
        """A request added with `remote=True` waits no longer, whether its segment came or not."""
        with self.alone():
            self.scheduler.delivered(id)

    def clear_cache(self) -> None:
        """Forget every prefix that no request uses."""
        with self.alone():
            live.clear(self.cache)

    def check_integrity(self) -> None:
        """Recount pages, slots, leases and states between two steps. Raises AssertionError: a bug, never a request."""
        check_integrity(self.cache)
        self.scheduler.check_integrity()

    # --- inside a step

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For who changes requests or the cache. Raises Error where another thread, or a request's callback, does."""
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
        tokens_T = sampling.take(tokens_R, rows)
        x_RD = self.runner.forward(chunks, None, tokens_T)
        drawn = sampling.start(chunks, x_RD, self.runner.head, ahead=1)
        return Flight(chunks, drawn, None)

    def _land(self, flight: Flight) -> list[Output]:
        results = flight.drawn.results()
        if flight.begin is not None and flight.chunks:
            self.speculation.observe(flight.chunks, time.perf_counter() - flight.begin)
        self._count(flight.chunks)
        return self.scheduler.postprocess(flight.chunks, results, self.clock())

    def _count(self, chunks: Sequence[Chunk]) -> None:
        tokens = sum(len(chunk.tokens) for chunk in chunks if chunk.decodes)
        self.counters.steps += bool(chunks)
        self.counters.decode += tokens
        self.counters.prefill += sum(len(chunk.tokens) for chunk in chunks) - tokens


__all__ = ["Engine", "Hold"]
