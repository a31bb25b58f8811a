"""Which requests run, and what becomes of them: `schedule` before a step, `postprocess` after it, nothing else.

A step is a list of chunks: some tokens of a request, to be computed from its state on. A prefill chunk ends at the
prompt's end or on the 64-token grid; a decode chunk is the last committed token and perhaps drafts. Only tokens that
were committed count as computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from perilune.serve import cuts, starts
from perilune.serve.admission import Admission
from perilune.serve.cache import live
from perilune.serve.cache.cache import PrefixCache
from perilune.serve.checkpoints import Checkpoints
from perilune.serve.commit import commit
from perilune.serve.config import EngineConfig
from perilune.serve.holds import Holds
from perilune.serve.request import Counters, Output, Request, State
from perilune.serve.work import Chunk, Device, Result

BROKEN = "logits are not finite numbers"


class Scheduler:
    """Requests, slots and the cache's leases. propose(requests) sets `drafts` of decoding requests before a step.

    reach: `cuts.reach_of` the model.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: PrefixCache,
        device: Device,
        propose: Callable[[Sequence[Request]], None] = lambda _: None,
        reach: float = 1e9,
    ) -> None:
        self.config, self.cache, self.device, self.propose, self.reach = config, cache, device, propose, reach
        self.admission = Admission(config, cache)
        self.waiting: list[Request] = []  # WAITING and PARKED
        self.remote: list[Request] = []
        self.fetching: list[tuple[Request, Callable[[], bool]]] = []
        self.running: list[Request] = []  # PREFILL and DECODE, in order of admission
        self.holds = Holds(cache, device)
        self.checkpoints = Checkpoints(cache, device)
        self.slots = list(range(config.slots - 1, -1, -1))
        self.version = 0
        self.counters = Counters()
        self.began: Callable[[Request], None] | None = None  # called with every request that starts, its hit leased
        self.settled = False  # nobody who waits can start before something changes
        self._outputs: list[Output] = []

    # --- verbs of the engine

    def add(self, request: Request, remote: bool = False) -> None:
        """A new request; `remote`: its hit is being computed elsewhere, wait for `delivered`.

        Raises Error if it could never run.
        """
        self.admission.check(request)
        self.settled = False
        if remote:
            request.state = State.REMOTE
            self.remote.append(request)
        else:
            self.waiting.append(request)

    def delivered(self, id: int) -> None:
        """What a remote request waited for is in the cache, or will never be; either way it goes on."""
        for request in [r for r in self.remote if r.id == id]:
            self.remote.remove(request)
            request.move(State.WAITING)
            self.waiting.append(request)
            self.settled = False

    def abort(self, id: int, reason: str = "abort", error: str | None = None) -> None:
        """End a request wherever it stands; its output of the next `postprocess` says why."""
        for request in self.requests():
            if request.id == id:
                self.end(request, reason, error)

    def fail(self, error: str) -> None:
        """End all that run: a step broke off, and their states may have advanced without their tokens."""
        for request in [*self.running]:
            self.end(request, "error", error)

    def requests(self) -> Iterable[Request]:
        """All that are not done."""
        return [*self.running, *(r for r, _ in self.fetching), *self.waiting, *self.remote]

    def stands_still(self) -> bool:
        """Whether somebody waits and nobody else does anything but hold memory for ever."""
        endless = [lease.deadline is None or lease.deadline == math.inf for lease in self.holds.values()]
        moves = self.running or self.fetching or self.remote or not self.settled
        return bool(self.waiting and endless and all(endless)) and not moves

    def ahead(self, chunks: Sequence[Chunk], now: float) -> list[Chunk]:
        """The step after one that is being computed, begun before its tokens are known; empty if that cannot be.

        Every request decodes one token more, but those that end by length. One that turns out to have ended is left out
        of `postprocess`; then its last token is part of its state. Nobody who waits could start, and nobody has to be
        preempted.
        """
        late = any(request.deadline is not None and request.deadline <= now for request in self.requests())
        if late or self.fetching or (self.waiting and self.slots and not self.settled):
            return []
        if any(request.state is not State.DECODE for request in self.running):
            return []
        if self.holds.expire(now):
            return []
        following = []
        for chunk in chunks:
            request = chunk.request
            if request.state is not State.DECODE or request.length + 1 >= request.longest:
                continue
            if not cuts.grow(self.cache, request, chunk.start + 2, now):
                return []
            following.append(Chunk(request, [-1], chunk.start + 1, sampled=1, decodes=True))
        for chunk in following:
            chunk.request.ahead = True
        return following

    def schedule(self, now: float) -> list[Chunk]:
        """The chunks of the next step; empty if nothing can run."""
        for request in self.requests():
            if request.deadline is not None and request.deadline <= now:
                self.end(request, "deadline")
        self.settled &= not self.holds.expire(now)
        for request, arrived in [*self.fetching]:
            if arrived():
                self.fetching = [entry for entry in self.fetching if entry[0] is not request]
                assert request.lease is not None
                self.cache.arrived(request.lease)
                starts.begin(self, request)
        budget = self.config.token_budget
        chunks = cuts.decode_chunks(self, now, budget)
        budget -= sum(len(chunk.tokens) for chunk in chunks)
        starts.admit(self, now)
        return chunks + cuts.prompt_chunks(self, budget, now)

    def postprocess(self, chunks: Sequence[Chunk], results: Sequence[Result], now: float) -> list[Output]:
        """Commit what the step computed and sampled. Outputs of requests that got something, or ended."""
        kept = []
        ends: list[tuple[Request, str, str | None]] = []
        for chunk, result in zip(chunks, results, strict=True):
            request = chunk.request
            if chunk.decodes and request.state is not State.DECODE:
                continue  # it ended, or was preempted, after this step had begun
            output = Output(request.id, cached=request.cached, computed_from=chunk.start, routing=result.routing)
            output.prompt_logprobs = result.prompt_logprobs
            self._outputs.append(output)
            if result.broken or result.stuck:
                why = BROKEN if result.broken else "logit_bias and mask leave no token that may follow"
                ends.append((request, "error", why))
                continue
            if result.error is None:
                taken, reason = commit(chunk, result, output, self.version)
            if result.error is not None:
                ends.append((request, "error", result.error))
                continue
            if request.state is State.DECODE:
                request.computed += taken
                kept.append((chunk.slot, len(chunk.tokens), taken))
                if chunk.drafts:
                    self.counters.drafted += chunk.drafts
                    self.counters.accepted += taken - 1
                    request.accept = 0.9 * request.accept + 0.1 * (taken - 1) / chunk.drafts
            else:
                request.computed += len(chunk.tokens)
                request.scored = request.computed if chunk.scored else request.scored
                if taken:
                    request.move(State.DECODE)
            if reason is not None:
                ends.append((request, reason, None))
        self.device.accept(kept)
        for chunk in chunks:
            request = chunk.request
            if request.slot is None or any(request is other and error is not None for other, _, error in ends):
                continue
            if chunk.exports:
                self.checkpoints.publish(request, now)
            if (mark := request.marks.pop(request.computed, None)) is not None:
                self.checkpoints.leave(request, mark, now)
        for request, reason, error in ends:
            if error == BROKEN and request.chain is not None:
                self.cache.quarantine(request.chain.extended(list(request.tokens)))
            self._finish(request, reason, error, now)
        outputs, self._outputs = self._outputs, []
        return [output for output in outputs if output.says_something]

    def preempt(self, request: Request, now: float, park: bool) -> None:
        """Take a running request off its slot. park: leave its state in the cache; else all its tokens come again."""
        if park and request.state in (State.PREFILL, State.DECODE):
            self.checkpoints.leave_end(request, now)
        self.counters.preempted += 1
        self._release(request)
        request.move(State.PARKED)
        self.waiting.append(request)

    def new_version(self, version: int, running: str, now: float) -> None:
        """Requests that start from now on use other weights; `running` as in control.update_weights."""
        for request in [*self.running]:
            if running == "keep":
                request.publish, request.marks = False, {}
            elif running == "abort":
                self.end(request, "abort")
        self.drop_all(now, keep=running == "keep")
        self.version = version

    def drop_all(self, now: float, keep: bool = False) -> None:
        """Preempt all that runs (unless `keep`), end all holds, and forget all that is cached."""
        for request, _ in [*self.fetching]:
            self._release(request)
            request.move(State.WAITING)
            self.waiting.append(request)
        for request in [] if keep else [*self.running]:
            self.preempt(request, now, park=False)
        self.holds.end()
        live.clear(self.cache)

    @property
    def has_outputs(self) -> bool:
        """Whether requests ended between steps."""
        return bool(self._outputs)

    def check_integrity(self) -> None:
        """What must hold between steps. Raises AssertionError."""
        used = [request.slot for request in self.requests() if request.slot is not None]
        assert sorted([*used, *self.slots]) == list(range(self.config.slots)), "a slot is lost or used twice"
        for request in self.requests():
            runs = request.state in (State.PREFILL, State.DECODE, State.PREFETCHING)
            assert runs == (request.slot is not None) == (request.lease is not None) == (request.stage is not None)
            if request.state is State.DECODE:
                assert request.computed == request.length - 1, "a decoding request has one token to compute"
            if request.state is State.PREFILL:
                assert request.computed < request.length
        leased = sum(request.lease is not None for request in self.requests())
        assert self.cache.leases == leased + len(self.holds), "a lease is lost"

    # --- ends

    def _finish(self, request: Request, reason: str, error: str | None, now: float) -> None:
        hold = None
        if error is None and request.state in (State.PREFILL, State.DECODE):
            long = request.length - request.prompt >= self.cache.placement.min_turn
            if long or request.hold is not None:
                self.checkpoints.leave_end(request, now)
            if request.hold is not None and request.publish and request.chain is not None:
                chain = request.chain.extended(list(request.tokens))
                hold = self.holds.take(chain, now, request.hold, request.computed + request.ahead)
        self.end(request, reason, error, hold)

    def end(self, request: Request, reason: str, error: str | None = None, hold: int | None = None) -> None:
        """It is over; its last output says why."""
        self._release(request)
        request.move(State.DONE)
        last = next((output for output in self._outputs if output.id == request.id), None)
        if last is None:
            last = Output(request.id, cached=request.cached)
            self._outputs.append(last)
        last.finished, last.error, last.hold = reason, error, hold

    def _release(self, request: Request) -> None:
        """Give back everything that a request holds."""
        self.settled = False
        if request.state is State.PREFETCHING:
            self.device.settle()
        if request.lease is not None:
            self.cache.release(request.lease)
        if request.slot is not None:
            self.device.free(request.slot)
            self.slots.append(request.slot)
        request.lease = request.stage = request.slot = None
        request.computed, request.table, request.marks, request.drafts, request.ahead = 0, [], {}, [], False
        self.running = [r for r in self.running if r is not request]
        self.waiting = [r for r in self.waiting if r is not request]
        self.remote = [r for r in self.remote if r is not request]
        self.fetching = [entry for entry in self.fetching if entry[0] is not request]


__all__ = ["Scheduler"]
