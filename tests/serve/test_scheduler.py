"""The scheduler with real pages, leases and slots but a model made of hashes: many lifetimes, nothing leaks.

The fake device checks what the real one relies on: pages it is told to write belong to nobody else's live rows, states
are loaded from what was saved for exactly that prefix, and a table covers what is computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from perilune import ModelConfig
from perilune.errors import Error
from perilune.serve import EngineConfig, Params
from perilune.serve.cache import DEVICE, Copy, Geometry, PrefixCache, check_integrity
from perilune.serve.cache.placement import Placement
from perilune.serve.cuts import reach_of
from perilune.serve.request import Output, Request, State
from perilune.serve.scheduler import Scheduler
from perilune.serve.work import Chunk, Result

UNIT = 4
GEOMETRY = Geometry(token_bytes=1, state_bytes=10, page_tokens=4, match_unit=UNIT, grid=4)
WIDE = Geometry(token_bytes=1, state_bytes=10, page_tokens=16, match_unit=UNIT, grid=4)


def following(tokens: Sequence[int]) -> int:
    """The fake model: the next token is a function of all tokens before it."""
    return hash(tuple(tokens)) % 3


class Memory:
    """A fake device. Rows hold the token written there with all tokens before it; states hold their whole prefix."""

    def __init__(self, geometry: Geometry, on_grid: bool) -> None:
        self.geometry, self.on_grid = geometry, on_grid
        self.rows: tuple[dict[tuple[int, int], tuple[int, ...]], ...] = ({}, {})  # per tier: (page, place) -> prefix
        self.states: tuple[dict[int, tuple[int, ...]], ...] = ({}, {})  # per tier: first page -> prefix
        self.slots: dict[int, list[int]] = {}
        self.fetched: list[list[int]] = []
        self.drops = 0

    def run(self, chunks: Sequence[Chunk]) -> list[Result]:
        results = []
        size = self.geometry.page_tokens
        for chunk in chunks:
            table, slot = chunk.request.table, self.slots[chunk.slot]
            assert len(slot) == chunk.start, "the state is not where the chunk begins"
            assert slot == chunk.request.tokens[: chunk.start], "a state of another prefix"
            for position in range(chunk.start):
                assert self.rows[0][table[position // size], position % size] == tuple(slot[: position + 1])
            for position, token in enumerate(chunk.tokens, chunk.start):
                slot.append(token)
                self.rows[0][table[position // size], position % size] = tuple(slot)
            for depth, pages in chunk.exports:
                assert not self.on_grid
                assert chunk.start < depth < len(slot)
                self.states[0][pages[0]] = tuple(slot[:depth])
            ends = range(len(slot) - chunk.sampled + 1, len(slot) + 1)
            results.append(Result([following(slot[:end]) for end in ends]))
        return results

    def load(self, slot: int, state: Sequence[int], depth: int) -> None:
        self.slots[slot] = list(self.states[0][state[0]]) if state else []
        assert len(self.slots[slot]) == depth

    def save(self, slot: int, depth: int, state: Sequence[int]) -> None:
        assert depth == len(self.slots[slot]) or self.on_grid
        assert depth <= len(self.slots[slot])
        self.states[0][state[0]] = tuple(self.slots[slot][:depth])

    def accept(self, kept: Sequence[tuple[int, int, int]]) -> None:
        for slot, fed, stay in kept:
            assert 0 <= stay <= fed
            del self.slots[slot][len(self.slots[slot]) - fed + stay :]

    def free(self, slot: int) -> None:
        self.slots.pop(slot, None)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self._copy(0, source, 0, target)

    def move(self, copy: Copy) -> None:
        for source, target in zip(*copy.pages, strict=True):
            self._copy(copy.source, source, copy.target, target)
        if copy.state[0]:
            self.states[copy.target][copy.state[1][0]] = self.states[copy.source][copy.state[0][0]]

    def fetch(self, copies: Sequence[Copy]) -> Callable[[], bool]:
        """Arrives at the third time it is asked."""
        for copy in copies:
            self.move(copy)
        left = [3]

        def arrived() -> bool:
            left[0] -= 1
            return left[0] <= 0

        return arrived

    def settle(self) -> None:
        """Copies take no time here."""

    def _copy(self, tier: int, source: int, other: int, target: int) -> None:
        for place in range(self.geometry.page_tokens):
            self.rows[other].pop((target, place), None)
            if (source, place) in self.rows[tier]:
                self.rows[other][target, place] = self.rows[tier][source, place]

    def forget(self, page: int) -> None:
        """A freed page loses its rows and its state: using it later fails."""
        for place in range(self.geometry.page_tokens):
            self.rows[0].pop((page, place), None)
        self.states[0].pop(page, None)


def build(geometry: Geometry = GEOMETRY, pages: int = 500, host: int = 0, on_grid: bool = False, **options: object):  # type: ignore[no-untyped-def]
    memory, reach = Memory(geometry, on_grid), float(options.pop("reach", 1e9))  # type: ignore[arg-type]
    base = {"slots": 4, "token_budget": 72, "page_tokens": geometry.page_tokens, "match_unit": UNIT, "watermark": 0.0}
    size = geometry.page_bytes
    config = EngineConfig(pages * size, host * size, **(base | options))  # type: ignore[arg-type]
    placement = options.get("placement", Placement(min_turn=1))
    cache = PrefixCache(geometry, config.arena_bytes, config.host_bytes, placement, copy=memory.move)  # type: ignore[arg-type]
    cache.arenas[DEVICE].freed = memory.forget
    draw = random.Random(7)

    def propose(requests: Sequence[Request]) -> None:
        for request in requests:
            request.drafts = []
            tokens = list(request.tokens)
            for _ in range(draw.randrange(config.drafts + 1)):
                tokens.append(following(tokens) if draw.random() < 0.7 else 0)
                request.drafts.append(tokens[-1])

    return Scheduler(config, cache, memory, propose, reach), memory


def step(scheduler: Scheduler, memory: Memory, now: float) -> list[Output]:
    chunks = scheduler.schedule(now)
    assert sum(len(chunk.tokens) for chunk in chunks) <= scheduler.config.token_budget
    outputs = scheduler.postprocess(chunks, memory.run(chunks), now)
    return outputs


def expected(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


def lifetimes(count: int, **options: object) -> None:
    """Random requests that share prefixes, speculate, are aborted, expire, are preempted, held and forked."""
    scheduler, memory = build(**options)  # type: ignore[arg-type]
    draw, now = random.Random(0), 0.0
    answers: dict[int, list[int]] = {}
    wanted: dict[int, tuple[list[int], int, str]] = {}
    old = list[list[int]]()
    made, finished = 0, 0
    reasons: dict[str, int] = {}
    while made < count or scheduler.requests():
        while made < count and len(list(scheduler.requests())) < 12:
            base = draw.choice(old) if old and draw.random() < 0.7 else []
            base = base[: 70 if draw.random() < 0.6 else draw.randrange(len(base[:70]) + 1)]
            tokens = base + [draw.randrange(3) for _ in range(draw.randrange(1, 20))]
            length = draw.randrange(1, 24)
            hold = draw.random() < 0.1
            deadline = now + draw.randrange(1, 200) if draw.random() < 0.1 else None
            request = Request(
                made,
                list(tokens),
                Params(max_tokens=length, temperature=0),
                now,
                deadline=deadline,
                hold=draw.randrange(1, 50) if hold else None,
                salt=draw.choice(["", "", "", "other"]),
                priority=draw.choice([0, 0, 0, 1, -1]),
            )
            remote = draw.random() < 0.05
            scheduler.add(request, remote)
            if remote and draw.random() < 0.9:
                scheduler.delivered(made)
            wanted[made], answers[made] = (tokens, length, request.salt), []
            made += 1
        for request in list(scheduler.requests()):
            if draw.random() < 0.003:
                scheduler.abort(request.id)
            elif draw.random() < 0.003 and request.state in (State.PREFILL, State.DECODE):
                scheduler.preempt(request, now, park=draw.random() < 0.5)
            elif request.state is State.REMOTE and draw.random() < 0.2:
                scheduler.delivered(request.id)
        for number in [number for number in scheduler.holds if draw.random() < 0.02]:
            scheduler.cache.release(scheduler.holds.pop(number))
        if draw.random() < 0.002:
            scheduler.new_version(scheduler.version + 1, draw.choice(["recompute", "keep", "abort"]), now)
        for output in step(scheduler, memory, now):
            answers[output.id] += output.tokens
            if output.finished is not None:
                reasons[output.finished] = reasons.get(output.finished, 0) + 1
                tokens, length, _ = wanted.pop(output.id)
                answer = answers.pop(output.id)
                assert answer == expected(tokens, len(answer))
                assert output.finished != "length" or len(answer) == length
                old.append(tokens + answer)
                old = old[-30:]
                finished += 1
        if finished % 50 == 0:
            scheduler.check_integrity()
            check_integrity(scheduler.cache)
        now += 1
    for number in [*scheduler.holds]:
        scheduler.cache.release(scheduler.holds.pop(number))
    scheduler.check_integrity()
    check_integrity(scheduler.cache)
    assert finished == count
    assert not wanted
    assert reasons["length"] > 0.7 * count
    assert len(reasons) >= 3 or count < 500
    scheduler.drop_all(now)
    assert [arena.free_pages for arena in scheduler.cache.arenas] == [a.capacity for a in scheduler.cache.arenas]
    assert not memory.slots
    assert scheduler.cache.leases == 0


def add(scheduler: Scheduler, id: int, tokens: list[int], now: float, count: int = 4, **options: object) -> Request:
    request = Request(id, tokens, Params(max_tokens=count, temperature=0), now, **options)  # type: ignore[arg-type]
    scheduler.add(request)
    return request


def finish(scheduler: Scheduler, memory: Memory, now: float) -> None:
    while scheduler.requests():
        step(scheduler, memory, now)


def words(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3) for _ in range(length)]


def test_the_longest_hit_goes_first_until_another_has_waited_for_long() -> None:
    scheduler, memory = build(slots=1, ageing=10.0, max_wait=100.0)
    add(scheduler, 0, words(40, 0), 0)
    finish(scheduler, memory, 0)
    cold = add(scheduler, 1, words(40, 1), 0)
    warm = add(scheduler, 2, [*words(40, 0), 1, 2], 0)
    step(scheduler, memory, 1)
    assert (warm.slot is None, cold.slot is None) == (False, True)
    finish(scheduler, memory, 1)
    early = add(scheduler, 3, words(40, 2), 0)
    late = add(scheduler, 4, [*words(40, 0), 2, 2], 9)
    step(scheduler, memory, 10)  # ten seconds are worth 100 tokens, the hit and one second 46
    assert (early.slot is None, late.slot is None) == (False, True)


def test_a_higher_priority_starts_first_and_is_preempted_last() -> None:
    scheduler, memory = build(slots=2, pages=30, reserve=0.0, max_wait=10.0)
    # Whatever the others have waited for, and whatever they find in the cache.
    old, low, high = (add(scheduler, i, words(20, i), i, 60, priority=p) for i, p in enumerate((0, -1, 1)))
    step(scheduler, memory, 100)
    assert [request.slot is None for request in (old, low, high)] == [False, True, False]
    for now in range(101, 400):
        step(scheduler, memory, now)
        scheduler.check_integrity()
        if old.state is State.PARKED:
            break
    assert (old.state, high.state) == (State.PARKED, State.DECODE)
    finish(scheduler, memory, 400)
    for request in (old, low, high):
        assert request.tokens[20:] == expected(request.tokens[:20], 60)


def test_nobody_overtakes_a_request_that_is_overdue() -> None:
    scheduler, memory = build(pages=40, max_wait=30.0)
    running = add(scheduler, 0, words(100, 0), 0)
    step(scheduler, memory, 0)
    large = add(scheduler, 1, words(100, 1), 0)
    small = add(scheduler, 2, words(8, 2), 1)
    step(scheduler, memory, 2)
    assert (large.slot is None, small.slot is None) == (True, False)  # there is room for the small one only
    scheduler.abort(2)
    other = add(scheduler, 3, words(8, 3), 29)
    step(scheduler, memory, 31)
    assert (large.state, other.state) == (State.WAITING, State.WAITING)
    scheduler.abort(running.id)
    step(scheduler, memory, 32)
    assert large.state is State.PREFILL


def test_long_requests_leave_slots_pages_and_tokens_to_short_ones() -> None:
    scheduler, _ = build(long_tokens=60, long_share=0.5, pages=200)
    longs = [add(scheduler, i, words(100, i), 0, priority=1) for i in range(4)]  # their turn comes first
    short = add(scheduler, 9, words(60 - 8, 9), 0.5)
    chunks = scheduler.schedule(1)
    assert sum(request.slot is not None for request in longs) == 2
    tokens = {chunk.request.id: len(chunk.tokens) for chunk in chunks}
    assert sum(count for id, count in tokens.items() if id != 9) == 36  # half of the step
    assert tokens[9] == 36
    assert short.state is State.PREFILL
    with pytest.raises(Error, match="needs 103 pages; allowed: 100"):
        add(scheduler, 10, words(400, 0), 0, 9)


def test_a_step_with_a_long_prefix_is_shorter_where_somebody_waits_for_its_end() -> None:
    """Attention makes a token after `reach` others cost twice; alone, a long prompt takes whole steps."""
    scheduler, memory = build(slots=2, long_tokens=500, reach=100.0)
    large = add(scheduler, 0, words(900, 0), 0)

    def taken() -> int:
        (chunk,) = (chunk for chunk in scheduler.schedule(1) if chunk.request is large)
        return len(chunk.tokens)

    step(scheduler, memory, 0)
    while large.computed < 300:
        step(scheduler, memory, 0)
    assert (large.computed, taken()) == (360, 72)
    small = add(scheduler, 1, words(4, 1), 1, 30)
    while small.state is not State.DECODE:
        step(scheduler, memory, 1)
    before = large.computed
    assert taken() == (71 * 100 // (100 + before)) // 4 * 4 < 24
    finish(scheduler, memory, 1)
    for request, made in ((large, 4), (small, 30)):
        assert request.tokens[request.prompt :] == expected(request.tokens[: request.prompt], made)


@pytest.mark.parametrize(("name", "tokens"), [("kimi-k3", 140_000), ("kimi-linear-48b-a3b", 40_000)])
def test_the_reach_of_known_models(name: str, tokens: int) -> None:
    assert reach_of(ModelConfig.from_pretrained(name)) == pytest.approx(tokens, rel=0.1)


def test_a_short_prompt_overtakes_a_longer_one_that_has_begun_until_it_is_overdue() -> None:
    scheduler, memory = build(slots=4, token_budget=72, max_wait=10.0)
    large = add(scheduler, 0, words(600, 0), 0)
    step(scheduler, memory, 0)
    assert large.computed == 72
    small = add(scheduler, 1, words(40, 1), 1)
    step(scheduler, memory, 1)
    assert (small.state, large.computed) == (State.DECODE, 72 + 32)
    late = add(scheduler, 2, words(60, 2), 9)
    step(scheduler, memory, 10)  # now the large one has waited for long enough
    assert (late.computed, large.computed > 150) == (0, True)
    finish(scheduler, memory, 10)
    for request in (large, small, late):
        assert request.tokens[request.prompt :] == expected(request.tokens[: request.prompt], 4)


def test_requests_with_a_prefix_that_is_being_computed_wait_for_it() -> None:
    """Sixteen samples of one prompt compute it once."""
    scheduler, memory = build(slots=8)
    requests = [add(scheduler, i, words(50, 0), 0) for i in range(8)]
    step(scheduler, memory, 0)
    assert [request.state for request in requests].count(State.WAITING) == 7
    step(scheduler, memory, 0)
    assert [request.cached for request in requests[1:]] == [48] * 7
    finish(scheduler, memory, 0)
    scheduler.check_integrity()


@pytest.mark.parametrize("on_grid", [True, False])
def test_the_step_is_cut_on_the_grid_by_the_budget_and_where_it_must_at_checkpoints(on_grid: bool) -> None:
    scheduler, memory = build(on_grid=on_grid)
    add(scheduler, 0, words(150, 0), 0, client_marks=(101,))
    ends, exports = [], []
    while not ends or ends[-1] < 150:
        chunks = scheduler.schedule(0)
        ends.append(chunks[0].start + len(chunks[0].tokens))
        exports += [depth for depth, _ in chunks[0].exports]
        scheduler.postprocess(chunks, memory.run(chunks), 0)
    assert ends == ([72, 100, 148, 150] if on_grid else [72, 144, 150])
    assert exports == ([] if on_grid else [100, 148])


def test_a_failed_admission_gives_everything_back() -> None:
    """Pages that a hit pins are not freed by its own admission, and nothing stays behind when it fails."""
    scheduler, memory = build(pages=30)
    add(scheduler, 0, words(40, 0), 0)
    finish(scheduler, memory, 0)
    held = scheduler.cache.acquire(scheduler.admission.chain(Request(9, words(40, 0), Params(), 0), 0), 0)
    request = add(scheduler, 1, [*words(40, 0), *words(70, 5)], 0)
    for now in range(3):
        step(scheduler, memory, now)
        assert (request.state, scheduler.cache.leases) == (State.WAITING, 1)
    scheduler.cache.release(held)
    finish(scheduler, memory, 9)
    check_integrity(scheduler.cache)
    assert scheduler.cache.leases == 0


@pytest.mark.parametrize("on_grid", [True, False])
@pytest.mark.parametrize("park", [True, False])
def test_a_parked_request_goes_on_from_its_state(park: bool, on_grid: bool) -> None:
    scheduler, memory = build(on_grid=on_grid)
    request = add(scheduler, 0, words(30, 0), 0, count=20)
    while request.length < 45:
        step(scheduler, memory, 0)
    tokens = list(request.tokens)
    scheduler.preempt(request, 0, park)
    assert (request.state, request.slot, request.table) == (State.PARKED, None, [])
    check_integrity(scheduler.cache)
    chunks = scheduler.schedule(1)
    # 44 tokens were computed; without parking the prompt's checkpoint at 28 is what is left.
    assert chunks[0].start == (44 if park else 28)
    scheduler.postprocess(chunks, memory.run(chunks), 1)
    finish(scheduler, memory, 2)
    assert request.tokens[:45] == tokens
    assert request.tokens[30:] == expected(words(30, 0), 20)
    assert scheduler.counters.preempted == 1


def test_admission_leaves_the_watermark_free() -> None:
    scheduler, memory = build(pages=100, watermark=0.25)
    with pytest.raises(Error, match="needs 76 pages; allowed: 75"):
        add(scheduler, 0, words(300, 0), 0)
    for i in range(4):
        add(scheduler, i, words(100, i), 0)
    for now in range(5):
        step(scheduler, memory, now)
        running = sum(len(request.table) for request in scheduler.running)
        assert running <= 75
        assert len(scheduler.running) <= 2


def test_states_follow_the_machine_only() -> None:
    scheduler, memory = build()
    request = add(scheduler, 0, words(10, 0), 0)
    scheduler.add(other := Request(1, words(9, 1), Params(), 0), remote=True)
    assert (request.state, other.state) == (State.WAITING, State.REMOTE)
    step(scheduler, memory, 0)
    step(scheduler, memory, 0)
    assert (request.state, other.state) == (State.DECODE, State.REMOTE)
    scheduler.preempt(request, 0, park=True)
    assert request.state is State.PARKED
    with pytest.raises(AssertionError, match="cannot go from"):
        request.move(State.DECODE)
    scheduler.delivered(1)
    finish(scheduler, memory, 0)
    assert (request.state, other.state) == (State.DONE, State.DONE)


CASES = {
    "plain": {},
    "drafts": {"drafts": 4},
    "grid": {"on_grid": True, "drafts": 4},
    "wide pages": {"geometry": WIDE, "pages": 60, "drafts": 2},
    "host tier": {"pages": 60, "host": 200},
    "tight": {"pages": 36, "reserve": 0.0, "drafts": 3},
    "tight, recompute": {"pages": 36, "reserve": 0.0, "park": False},
    "wide and host": {"geometry": WIDE, "pages": 20, "host": 30, "reserve": 0.2, "on_grid": True},
}


@pytest.mark.parametrize("case", CASES)
def test_random_lifetimes_leak_nothing(case: str) -> None:
    lifetimes(400, **CASES[case])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_hundred_thousand_lifetimes_leak_nothing() -> None:
    for case in CASES.values():
        lifetimes(100_000 // len(CASES), **case)  # type: ignore[arg-type]
