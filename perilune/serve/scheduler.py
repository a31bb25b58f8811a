"""Which requests run, and what becomes of them: `schedule` before a step, `postprocess` after it, nothing else.

A step is a list of chunks: some tokens of a request, to be computed from its state on. A prefill chunk ends at the
prompt's end or on the 64-token grid; a decode chunk is the last committed token and perhaps drafts. Only tokens that
were committed count as computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from perilune.serve.admission import Admission
from perilune.serve.cache import live
from perilune.serve.cache.cache import PrefixCache
from perilune.serve.cache.placement import Mark
from perilune.serve.config import EngineConfig
from perilune.serve.holds import Holds
from perilune.serve.request import NEXT, Counters, Output, Request, State
from perilune.serve.work import Chunk, Device, Result

BROKEN = "logits are not finite numbers"
MISSES = 8  # requests that do not fit before a step looks no further


class Scheduler:
    """Requests, slots and the cache's leases. propose(requests) sets `drafts` of decoding requests before a step."""

    def __init__(
        self,
        config: EngineConfig,
        cache: PrefixCache,
        device: Device,
        propose: Callable[[Sequence[Request]], None] = lambda _: None,
    ) -> None:
        self.config, self.cache, self.device, self.propose = config, cache, device, propose
        self.admission = Admission(config, cache)
        self.waiting: list[Request] = []  # WAITING and PARKED
        self.remote: list[Request] = []
        self.fetching: list[tuple[Request, Callable[[], bool]]] = []
        self.running: list[Request] = []  # PREFILL and DECODE, in order of admission
        self.holds = Holds(cache, device)
        self.slots = list(range(config.slots - 1, -1, -1))
        self.version = 0
        self.counters = Counters()
        self._settled = False  # nobody who waits can start before something changes
        self._outputs: list[Output] = []

    # --- verbs of the engine

    def add(self, request: Request, remote: bool = False) -> None:
        """A new request; `remote`: its hit is being computed elsewhere, wait for `delivered`.

        Raises Error if it could never run.
        """
        self.admission.check(request)
        self._settled = False
        if remote:
            request.state = State.REMOTE
            self.remote.append(request)
        else:
            self.waiting.append(request)

    def delivered(self, id: int) -> None:
        """What a remote request waited for is in the cache, or will never be; either way it goes on."""
        for request in [r for r in self.remote if r.id == id]:
            self.remote.remove(request)
            self._move(request, State.WAITING)
            self.waiting.append(request)
            self._settled = False

    def abort(self, id: int, reason: str = "abort", error: str | None = None) -> None:
        """End a request wherever it stands; its output of the next `postprocess` says why."""
        for request in self.requests():
            if request.id == id:
                self._end(request, reason, error)

    def fail(self, error: str) -> None:
        """End all that run: a step broke off, and their states may have advanced without their tokens."""
        for request in [*self.running]:
            self._end(request, "error", error)

    def requests(self) -> Iterable[Request]:
        """All that are not done."""
        return [*self.running, *(r for r, _ in self.fetching), *self.waiting, *self.remote]

    def stands_still(self) -> bool:
        """Whether somebody waits and nobody else does anything but hold memory for ever."""
        endless = [lease.deadline is None or lease.deadline == math.inf for lease in self.holds.values()]
        moves = self.running or self.fetching or self.remote or not self._settled
        return bool(self.waiting and endless and all(endless)) and not moves

    def ahead(self, chunks: Sequence[Chunk], now: float) -> list[Chunk]:
        """The step after one that is being computed, begun before its tokens are known; empty if that cannot be.

        Every request decodes one token more, but those that end by length. One that turns out to have ended is left out
        of `postprocess`; then its last token is part of its state. Nobody who waits could start, and nobody has to be
        preempted.
        """
        late = any(request.deadline is not None and request.deadline <= now for request in self.requests())
        if late or self.fetching or (self.waiting and self.slots and not self._settled):
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
            if not self._grow(request, chunk.start + 2, now):
                return []
            following.append(Chunk(request, [-1], chunk.start + 1, sampled=1, decodes=True))
        for chunk in following:
            chunk.request.ahead = True
        return following

    def schedule(self, now: float) -> list[Chunk]:
        """The chunks of the next step; empty if nothing can run."""
        for request in self.requests():
            if request.deadline is not None and request.deadline <= now:
                self._end(request, "deadline")
        self._settled &= not self.holds.expire(now)
        for request, arrived in [*self.fetching]:
            if arrived():
                self.fetching = [entry for entry in self.fetching if entry[0] is not request]
                assert request.lease is not None
                self.cache.arrived(request.lease)
                self._begin(request)
        budget = self.config.token_budget
        chunks = self._decode(now, budget)
        budget -= sum(len(chunk.tokens) for chunk in chunks)
        self._admit(now)
        return chunks + self._prefill(budget, now)

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
                taken, reason = self._commit(chunk, result, output)
            if result.error is not None:
                ends.append((request, "error", result.error))
                continue
            if request.state is State.DECODE:
                request.computed += taken
                kept.append((self._slot(request), len(chunk.tokens), taken))
                if chunk.drafts:
                    self.counters.drafted += chunk.drafts
                    self.counters.accepted += taken - 1
                    request.accept = 0.9 * request.accept + 0.1 * (taken - 1) / chunk.drafts
            else:
                request.computed += len(chunk.tokens)
                request.scored = request.computed if chunk.scored else request.scored
                if taken:
                    self._move(request, State.DECODE)
            if reason is not None:
                ends.append((request, reason, None))
        self.device.accept(kept)
        for chunk in chunks:
            request = chunk.request
            if request.slot is None or any(request is other and error is not None for other, _, error in ends):
                continue
            if chunk.exports:
                self._publish(request, now)
            if (mark := request.marks.pop(request.computed, None)) is not None:
                self._checkpoint(request, mark, now)
        for request, reason, error in ends:
            if error == BROKEN and request.chain is not None:
                self.cache.quarantine(request.chain.extended(list(request.tokens)))
            self._finish(request, reason, error, now)
        outputs, self._outputs = self._outputs, []
        return [output for output in outputs if output.says_something]

    def preempt(self, request: Request, now: float, park: bool) -> None:
        """Take a running request off its slot. park: leave its state in the cache; else all its tokens come again."""
        if park and request.state in (State.PREFILL, State.DECODE):
            self._checkpoint(request, Mark(self._depth(request), "turn", "decode"), now)
        self.counters.preempted += 1
        self._release(request)
        self._move(request, State.PARKED)
        self.waiting.append(request)

    def new_version(self, version: int, running: str, now: float) -> None:
        """Requests that start from now on use other weights; `running` as in control.update_weights."""
        for request in [*self.running]:
            if running == "keep":
                request.publish, request.marks = False, {}
            elif running == "abort":
                self._end(request, "abort")
        self.drop_all(now, keep=running == "keep")
        self.version = version

    def drop_all(self, now: float, keep: bool = False) -> None:
        """Preempt all that runs (unless `keep`), end all holds, and forget all that is cached."""
        for request, _ in [*self.fetching]:
            self._release(request)
            self._move(request, State.WAITING)
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

    # --- one step

    def _decode(self, now: float, budget: int) -> list[Chunk]:
        decoding = [request for request in self.running if request.state is State.DECODE]
        self.propose(decoding)
        chunks = []
        # Drafts take what is left when every sequence has its token and prompts can go on.
        spare = budget - len(decoding) - self.cache.geometry.grid
        for request in decoding:
            if request.state is not State.DECODE:  # preempted for an earlier one
                continue
            left = request.longest - request.length
            drafts = request.drafts[: max(0, min(left - 1, spare))]
            if not self._room(request, request.length + len(drafts), now):
                continue
            spare -= len(drafts)
            tokens = [request.tokens[-1], *drafts]
            chunks.append(Chunk(request, tokens, request.computed, len(drafts), len(tokens), decodes=True))
        return [chunk for chunk in chunks if chunk.request.state is State.DECODE]

    def _room(self, request: Request, end: int, now: float) -> bool:
        """Pages up to token `end`, at the expense of the youngest requests if need be."""
        while True:
            if self._grow(request, end, now):
                return True
            victim = self.running[-1]
            if victim is request and len(self.running) == 1:
                self._end(request, "error", "no memory is left for its next token")
                return False
            self.preempt(victim, now, self.config.park)
            if victim is request:
                return False

    def _grow(self, request: Request, end: int, now: float) -> bool:
        lease, stage = request.lease, request.stage
        assert lease is not None
        assert stage is not None
        known = len(stage.pages)
        grown = live.grow(self.cache, lease, stage, end, now)
        request.table += stage.pages[known:]
        return grown

    def _prefill(self, budget: int, now: float) -> list[Chunk]:
        filling = [request for request in self.running if request.state is State.PREFILL]
        share, grid = budget, self.cache.geometry.grid
        if any(not self.admission.is_long(request) for request in [*filling, *self.waiting]):
            # Never less than a chunk: short requests may be waiting for the memory of a long one.
            share = max(grid, int(budget * self.config.long_share))
        chunks = []
        for request in filling:
            long = self.admission.is_long(request)
            room = min(budget, share) if long else budget
            ends = [depth for depth in request.marks if depth > request.computed] if self.device.on_grid else []
            end = min([request.computed + room, request.length, *ends])
            point, inside = end // grid * grid, end != request.length and end not in request.marks
            if inside or (self.device.on_grid and point > request.computed):
                end = point
            if end <= request.computed:
                continue
            tokens = request.tokens[request.computed : end]
            budget -= len(tokens)
            share -= len(tokens) if long else 0
            scored = request.params.prompt_logprobs is not None and request.scored <= request.computed < request.prompt
            exports = self._exports(request, end, now)
            last = int(end == request.length)
            chunks.append(Chunk(request, tokens, request.computed, 0, last, scored, exports=exports))
        return chunks

    def _exports(self, request: Request, end: int, now: float) -> tuple[tuple[int, list[int]], ...]:
        """Pages for the states of marks before `end`, written by the step itself. Without room a mark is left out."""
        exports = []
        for depth in sorted(depth for depth in request.marks if depth < end):
            mark = request.marks.pop(depth)
            pages = self._state_pages(request, mark, now)
            if pages is not None:
                exports.append((depth, pages))
        return tuple(exports)

    def _admit(self, now: float) -> None:
        self._settled = True
        if not self.waiting or not self.slots:
            return
        active = [*self.running, *(request for request, _ in self.fetching)]
        misses = 0
        for request in self.admission.order(self.waiting, self.version, now):
            if not self.slots:
                return
            overdue = self.admission.overdue(request, now)
            if not overdue and self.admission.coming(request, active, self.version):
                continue
            fits = self.admission.fits(request, active)
            if not fits and not active:
                # A hit keeps pages of its own; a request that fits only without it runs without it.
                request.cold = True
                fits = request.cold = self.admission.fits(request, active)
            if fits and self._start(request, now):
                active.append(request)
            elif overdue or (misses := misses + 1) == MISSES:
                return  # nobody overtakes a request that has waited for too long

    def _start(self, request: Request, now: float) -> bool:
        chain, cache = self.admission.chain(request, self.version), self.cache
        lease = cache.acquire(chain, now, self.admission.limit(request))
        stage = live.reserve(cache, lease, chain, request.length, now, request.turn)
        if stage is None:
            cache.release(lease)
            return False
        self.waiting.remove(request)
        request.lease, request.stage, request.slot = lease, stage, self.slots.pop()
        request.version, request.publish, request.cold = self.version, True, False
        if lease.ready:
            self._begin(request)
        else:
            self._move(request, State.PREFETCHING)
            self.fetching.append((request, self.device.fetch(lease.copies)))
        return True

    def _begin(self, request: Request) -> None:
        lease, stage = request.lease, request.stage
        assert lease is not None
        assert stage is not None
        self._move(request, State.PREFILL)
        self.running.append(request)
        self.device.copy_pages(*live.copies(self.cache, lease, stage))
        state = lease.node.state if lease.node is not None else None
        self.device.load(self._slot(request), state or (), lease.depth)
        request.table = live.table(self.cache, lease, stage)
        request.computed = lease.depth
        if request.first_cached:
            request.cached, request.first_cached = lease.depth, False
            self.counters.cached += lease.depth
            self.counters.stateless += max(0, lease.kv_depth - lease.depth)
        marks = self.cache.plan(lease, request.length, request.length, marks=request.client_marks)
        request.marks = {mark.depth: mark for mark in marks}

    def _commit(self, chunk: Chunk, result: Result, output: Output) -> tuple[int, str | None]:
        """Append sampled tokens, as far as the drafts were right and nothing ends the answer. How many, and why."""
        request, params = chunk.request, chunk.request.params
        drafts = chunk.tokens[len(chunk.tokens) - chunk.drafts :]
        taken, reason = 0, None
        for i, token in enumerate(result.tokens):
            if i and drafts[i - 1] != result.tokens[i - 1]:
                break
            request.tokens.append(token)
            taken += 1
            made = request.length - request.prompt
            try:
                stop = request.stop is not None and request.stop(token)
            except Exception as error:  # the client's code: its request alone ends
                result.error = f"stop failed: {error!r}"
                break
            if stop or (token in params.stop_ids and made >= params.min_tokens):
                reason = "stop"
            elif made >= params.max_tokens:
                reason = "length"
            if reason is not None:
                break
        output.tokens = result.tokens[:taken]
        output.versions = [self.version] * taken
        if result.logprobs is not None:
            output.logprobs = result.logprobs[:taken]
        return taken, reason

    # --- ends

    def _depth(self, request: Request) -> int:
        """The deepest state of a running request that can be saved."""
        grid, computed = self.cache.geometry.grid, request.computed + request.ahead
        return computed // grid * grid if self.device.on_grid else computed

    def _state_pages(self, request: Request, mark: Mark, now: float) -> list[int] | None:
        """Pages for a state of a request's; None if it is not wanted or there is no room."""
        lease, stage, chain = request.lease, request.stage, request.chain
        assert lease is not None
        assert stage is not None
        assert chain is not None
        if not request.publish or mark.depth <= lease.depth:
            return None
        if chain.length < mark.depth:
            request.chain = chain = chain.extended(request.tokens[: mark.depth])
        if self.cache.tree.match(chain, mark.depth).depth == mark.depth:
            return None  # it is there already
        if self.device.on_grid:
            mark = replace(mark, origin="exact")
        return live.mark(self.cache, lease, stage, mark, now)

    def _publish(self, request: Request, now: float) -> None:
        assert request.lease is not None
        assert request.stage is not None
        assert request.chain is not None
        live.publish(self.cache, request.lease, request.stage, request.chain, now)

    def _checkpoint(self, request: Request, mark: Mark, now: float) -> None:
        """Leave a request's state in the cache. Failing is no harm: less can be reused."""
        pages = self._state_pages(request, mark, now)
        if pages is not None:
            self.device.save(self._slot(request), mark.depth, pages)
            self._publish(request, now)

    def _finish(self, request: Request, reason: str, error: str | None, now: float) -> None:
        hold = None
        if error is None and request.state in (State.PREFILL, State.DECODE):
            long = request.length - request.prompt >= self.cache.placement.min_turn
            if long or request.hold is not None:
                self._checkpoint(request, Mark(self._depth(request), "turn", "decode"), now)
            if request.hold is not None and request.publish and request.chain is not None:
                chain = request.chain.extended(list(request.tokens))
                hold = self.holds.take(chain, now, request.hold, request.computed + request.ahead)
        self._end(request, reason, error, hold)

    def _end(self, request: Request, reason: str, error: str | None = None, hold: int | None = None) -> None:
        self._release(request)
        self._move(request, State.DONE)
        last = next((output for output in self._outputs if output.id == request.id), None)
        if last is None:
            last = Output(request.id, cached=request.cached)
            self._outputs.append(last)
        last.finished, last.error, last.hold = reason, error, hold

    def _release(self, request: Request) -> None:
        """Give back everything that a request holds."""
        self._settled = False
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

    @staticmethod
    def _slot(request: Request) -> int:
        assert request.slot is not None
        return request.slot

    @staticmethod
    def _move(request: Request, state: State) -> None:
        assert state in NEXT[request.state], f"request {request.id} cannot go from {request.state} to {state}"
        request.state = state


__all__ = ["Scheduler"]
