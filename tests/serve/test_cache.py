"""The rules of the prefix cache, and those that public bugs of other caches teach."""

from __future__ import annotations

import random

import pytest

from perilune.errors import Error
from perilune.serve.cache import (
    DEVICE,
    HOST,
    Arena,
    Chain,
    Copy,
    Eviction,
    Geometry,
    Lease,
    Mark,
    Match,
    Placement,
    PrefixCache,
    Stage,
    check_integrity,
    live,
)

UNIT = 4
SMALL = Geometry(token_bytes=1, state_bytes=10, page_tokens=4, match_unit=UNIT, grid=4)


def chain(tokens: list[int], unit: int = UNIT, salt: str = "", version: int = 0) -> Chain:
    return Chain.of(tokens, unit, salt, version)


def request(cache: PrefixCache, tokens: list[int], now: float = 0.0, answer: list[int] | None = None) -> int:
    """Serve one whole request and return its hit."""
    whole = chain(tokens + (answer or []), cache.geometry.match_unit)
    lease = cache.acquire(whole, now, limit=len(tokens) - 1)
    if not lease.ready:
        cache.arrived(lease)
    stage = cache.stage(lease, whole, cache.plan(lease, len(tokens), whole.length, exact=True), now)
    if stage is not None:
        cache.landed(lease, stage, now)
    cache.release(lease)
    check_integrity(cache)
    return lease.depth


def test_the_bytes_of_kimi_k3_and_kimi_linear() -> None:
    k3 = Geometry.of("kimi-k3")
    assert (k3.token_bytes, k3.state_bytes) == (
        27_648,
        449_372_160,
    )  # 24 x 576 x 2; 69 x 96 x (128^2 x 4 + 9 x 128 x 2)
    assert Geometry.of("kimi-k3", kv="fp8").token_bytes == 13_824
    linear = Geometry.of("kimi-linear")
    assert (linear.token_bytes, linear.state_bytes) == (7 * 576 * 2, 20 * 32 * (128**2 * 4 + 9 * 128 * 2))
    assert k3.state_pages * k3.page_bytes - k3.state_bytes < k3.page_bytes


def test_geometry_errors() -> None:
    with pytest.raises(Error, match="one must divide the other"):
        Geometry(1, 1, page_tokens=6, match_unit=4)
    with pytest.raises(Error, match="kv is 'int4'"):
        Geometry.of("kimi-k3", kv="int4")


def test_a_page_is_freed_by_its_last_holder_and_never_twice() -> None:
    arena = Arena(2)
    assert arena.allocate(3) is None
    pages = arena.allocate(2)
    assert pages is not None
    arena.share(pages[0])
    arena.free([pages[0]])
    assert arena.free_pages == 0
    arena.free([pages[0]])
    assert arena.free_pages == 1
    with pytest.raises(AssertionError, match="freed twice"):
        arena.free([pages[0]])


def test_keys_are_chained_over_content_tenant_and_weights() -> None:
    base = chain(list(range(12)))
    assert chain(list(range(8))).keys == base.keys[:2]
    assert chain([9, *range(1, 12)]).keys[2] != base.keys[2]
    names = [chain([1] * 4, salt=s, version=v).keys[0] for s, v in (("", 0), ("a", 0), ("", 1), ("a", 1), ("a:1", 0))]
    assert len(set(names)) == 5


def test_old_weights_are_never_served_after_an_update_nor_the_reverse() -> None:
    cache = PrefixCache(SMALL, 1000)
    tokens = list(range(20))
    lease = cache.acquire(chain(tokens), 0)
    stage = cache.stage(lease, chain(tokens), [Mark(16, "prompt")], 0)
    assert stage is not None
    # The update happens while the old request is still writing.
    assert cache.match(chain(tokens, version=1)).depth == 0
    cache.landed(lease, stage, 1)
    cache.release(lease)
    assert cache.match(chain(tokens, version=1)).kv_depth == 0
    assert cache.match(chain(tokens, version=0)).depth == 16


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_the_same_prompt_again_and_its_extension_hit_at_every_length(length: int) -> None:
    cache = PrefixCache(SMALL, 1000)
    tokens = list(range(length))
    assert request(cache, tokens) == 0
    assert request(cache, tokens, 1) == (length - 1) // 4 * 4
    assert request(cache, [*tokens, 7, 7, 7, 7], 2) == (length - 1) // 4 * 4


def test_a_turn_ends_at_any_token_and_the_next_turn_begins_there() -> None:
    cache = PrefixCache(SMALL, 1000, placement=Placement(min_turn=5))
    prompt, answer = list(range(10)), [50, 51, 52, 53, 54]
    request(cache, prompt, answer=answer)
    assert request(cache, [*prompt, *answer, 60, 61], 1) == 15  # 15 is on no grid
    assert request(cache, [*prompt, *answer[:-1], 99, 61, 62], 2) == 8  # another tail: its digest differs
    assert request(cache, [*prompt, *answer, 70], 3) == 15


def test_the_third_request_hits_at_the_exact_common_prefix() -> None:
    cache = PrefixCache(SMALL, 1000)
    shared = list(range(12))
    assert request(cache, [*shared, *[100 + i for i in range(9)]]) == 0
    assert request(cache, [*shared, *[200 + i for i in range(11)]], 1) == 0
    assert request(cache, [*shared, *[300 + i for i in range(10)]], 2) == 12


def test_prefixes_whose_shared_length_fluctuates_hit_after_each_was_seen() -> None:
    cache = PrefixCache(SMALL, 10_000)
    shared = list(range(40))
    hits = [
        request(cache, [*shared[:n], *[1000 * t + i for i in range(9)]], t) for t, n in enumerate([40, 40, 32, 28, 36])
    ]
    assert hits == [0, 0, 0, 0, 32]


def test_a_fork_comes_with_one_where_recent_requests_left_early() -> None:
    found = Match(depth=8, node=None, kv_depth=40)
    depths = [(mark.depth, mark.kind) for mark in Placement().plan(found, 60, 60, 4, splits=[40, 22, 36, 40])]
    assert depths == [(20, "fork"), (40, "fork"), (56, "prompt")]
    depths = [mark.depth for mark in Placement().plan(found, 60, 60, 4, splits=[80, 90, 100])]
    assert depths == [40, 56]
    depths = [mark.depth for mark in Placement(low_fork=False).plan(found, 60, 60, 4, splits=[40, 22, 36, 40])]
    assert depths == [40, 56]


def test_where_requests_leave_is_remembered_at_the_checkpoint_that_served_them() -> None:
    cache = PrefixCache(SMALL, 10_000)
    shared = list(range(40))
    for t, n in enumerate([40, 32, 36]):
        request(cache, [*shared[:n], *[1000 * (t + 1) + i for i in range(9)]], t)
    assert list(cache.tree.root.splits) == [32]
    assert list(cache.match(chain(shared[:33])).node.splits) == [36]  # type: ignore[union-attr]


@pytest.mark.parametrize("length", [1, 3, 4, 6])
def test_a_checkpoint_inside_a_unit_belongs_to_its_tenant_and_weights(length: int) -> None:
    """A prefix shorter than a unit has no key of its own to name them."""
    cache = PrefixCache(SMALL, 1000)
    tokens = list(range(length))
    mine = chain(tokens, salt="a", version=1)
    lease = cache.acquire(mine, 0)
    stage = cache.stage(lease, mine, [Mark(length, "turn")], 0)
    assert stage is not None
    cache.landed(lease, stage, 0)
    for salt, version, hit in (("a", 1, length), ("b", 1, 0), ("a", 2, 0)):
        assert cache.match(chain([*tokens, 9], salt=salt, version=version)).depth == hit


def test_nothing_is_matchable_before_it_has_landed() -> None:
    cache = PrefixCache(SMALL, 1000)
    first = chain(list(range(20)))
    lease = cache.acquire(first, 0)
    stage = cache.stage(lease, first, [Mark(16, "prompt")], 0)
    assert stage is not None
    assert cache.match(first).kv_depth == 0
    cache.abandon(lease, stage)
    cache.release(lease)
    check_integrity(cache)
    assert cache.arenas[DEVICE].free_pages == cache.arenas[DEVICE].capacity


def test_a_leased_hit_stays_whatever_is_allocated() -> None:
    cache = PrefixCache(SMALL, 80)
    request(cache, list(range(20)))
    lease = cache.acquire(chain(list(range(20))), 1)
    assert lease.depth == 16
    for i in range(20):
        request(cache, [1000 * (i + 1) + j for j in range(20)], 2 + i)
    assert cache.match(chain(list(range(20)))).depth == 16
    cache.release(lease)
    check_integrity(cache)


def test_caching_is_optional() -> None:
    cache = PrefixCache(SMALL, 8)  # two pages: not one state fits
    assert request(cache, list(range(20))) == 0
    assert request(cache, list(range(20)), 1) == 0


def test_a_lease_ends_once_and_its_handle_has_generations() -> None:
    cache = PrefixCache(SMALL, 1000)
    first = cache.acquire(chain([1] * 8), 0)
    cache.release(first)
    with pytest.raises(Error, match="has ended"):
        cache.release(first)
    second = cache.acquire(chain([1] * 8), 0, deadline=30)
    assert (second.handle, second.generation) == (first.handle, first.generation + 1)
    with pytest.raises(Error, match="has ended"):
        cache.stage(first, chain([1] * 8), [Mark(4, "prompt")], 0)
    assert cache.expire(29) == []
    assert cache.expire(30) == [second]
    assert cache.leases == 0


def test_two_checkpoints_stay_on_a_linear_path_and_forks_are_exempt() -> None:
    cache = PrefixCache(SMALL, 10_000)
    tokens: list[int] = []
    for turn in range(6):
        tokens = [*tokens, *[100 * turn + i for i in range(8)]]
        request(cache, [*tokens, -1 - turn + 100_000], turn)
    states = sorted(node.end for node in cache.tree.nodes() if node.state is not None)
    assert states == [40, 48]
    request(cache, [*tokens[:20], *[9000 + i for i in range(9)]], 10)
    request(cache, [*tokens[:20], *[9500 + i for i in range(9)]], 11)
    assert cache.match(chain([*tokens[:20], 1, 2, 3, 4, 5])).depth == 20


def test_eviction_of_a_leaf_takes_the_kv_that_served_it_alone() -> None:
    cache = PrefixCache(SMALL, 60)
    request(cache, list(range(20)))
    request(cache, [500 + i for i in range(40)], 1)
    assert cache.match(chain(list(range(20)))).kv_depth == 0


def test_state_and_kv_go_to_the_host_and_return_together() -> None:
    moves = []
    cache = PrefixCache(SMALL, 60, 1000, copy=moves.append)
    first = list(range(20))
    request(cache, first)
    request(cache, [500 + i for i in range(40)], 1)
    assert [(move.source, move.target, len(move.pages[0]), len(move.state[0])) for move in moves] == [
        (DEVICE, HOST, 4, 3)
    ]
    lease = cache.acquire(chain(first), 2)
    assert (lease.depth, lease.host_depth, lease.ready) == (16, 16, False)
    assert [(copy.source, copy.target, copy.count) for copy in lease.copies] == [(HOST, DEVICE, 7)]
    other = cache.acquire(chain(first), 2)  # before it has arrived, everybody else sees it on the host
    assert not other.ready
    cache.arrived(lease)
    cache.release(other)  # an aborted fetch
    cache.release(lease)
    check_integrity(cache)
    assert cache.match(chain(first)).node.tier == DEVICE  # type: ignore[union-attr]


def test_a_hit_on_its_way_from_the_host_is_not_replaced_by_the_same_tokens_computed_again() -> None:
    cache = PrefixCache(SMALL, 80, 1000)
    first, longer = chain(list(range(20))), chain(list(range(40)))
    request(cache, list(range(20)))
    request(cache, [500 + i for i in range(40)], 1)
    request(cache, [700 + i for i in range(20)], 1)
    cold = cache.acquire(longer, 2, limit=0)
    stage = cache.stage(cold, longer, [Mark(36, "prompt")], 2)
    assert stage is not None
    lease = cache.acquire(first, 3)
    assert not lease.ready
    cache.landed(cold, stage, 4)
    cache.arrived(lease)
    assert lease.node is not None
    assert lease.node.state is not None
    check_integrity(cache)


def test_what_is_quarantined_is_never_served_again() -> None:
    cache = PrefixCache(SMALL, 1000)
    request(cache, list(range(20)))
    request(cache, list(range(40)), 1)
    assert cache.quarantine(chain(list(range(40))), 16) >= 1
    check_integrity(cache)
    assert cache.match(chain(list(range(40)))).depth == 16
    lease = cache.acquire(chain(list(range(20))), 2)
    assert cache.quarantine(chain(list(range(20)))) >= 1
    assert cache.match(chain(list(range(20)))).kv_depth == 0  # at once, although it is leased
    check_integrity(cache)
    cache.release(lease)
    check_integrity(cache)
    assert cache.arenas[DEVICE].free_pages == cache.arenas[DEVICE].capacity


@pytest.mark.parametrize("extra", [0, 8])
def test_what_is_quarantined_does_not_come_back_below_another_checkpoint(extra: int) -> None:
    """While a bad prefix is leased, another request computes it anew; one that had hit it goes on."""
    cache = PrefixCache(SMALL, 1000)
    tokens = list(range(40))
    request(cache, tokens[:20])
    lease = cache.acquire(chain(tokens), 1)
    assert lease.node is not None
    bad = {*lease.node.pages, *(lease.node.state or ())}
    derived = cache.stage(lease, chain(tokens), [Mark(36, "prompt")], 1)
    assert derived is not None
    bad |= {*derived.pages, *derived.states[0]}
    cache.quarantine(chain(tokens))
    assert request(cache, tokens[: 21 + extra], 2) == 0
    cache.landed(lease, derived, 3)
    cache.release(lease)
    check_integrity(cache)
    fresh = cache.acquire(chain(tokens), 4)
    assert fresh.depth == 20 + extra
    assert fresh.node is not None
    assert not bad & {*live.table(cache, fresh), *(fresh.node.state or ())}


def test_a_write_back_that_fails_changes_nothing() -> None:
    def fail(_: Copy) -> None:
        raise OSError("no route to the host's memory")

    cache = PrefixCache(SMALL, 60, 1000, copy=fail)
    request(cache, list(range(20)))
    other = chain([500 + i for i in range(40)])
    lease = cache.acquire(other, 1)
    with pytest.raises(OSError, match="no route"):
        cache.stage(lease, other, [Mark(36, "prompt")], 1)
    cache.release(lease)
    check_integrity(cache)
    assert cache.match(chain(list(range(20)))).depth == 16


def test_a_hit_that_cannot_make_room_for_itself_leaves_no_lease() -> None:
    broken = False

    def copy(_: Copy) -> None:
        if broken:
            raise OSError("no route to the host's memory")

    cache = PrefixCache(SMALL, 60, 1000, copy=copy)
    request(cache, list(range(20)))
    request(cache, [500 + i for i in range(40)], 1)  # the first one is on the host now
    broken = True
    with pytest.raises(OSError, match="no route"):
        cache.acquire(chain(list(range(20))), 2)
    assert cache.leases == 0
    check_integrity(cache)


def test_figure_12_of_the_report() -> None:
    """A 6144-token block filled to 2800 tokens, 512-token hashes: the hit is 2560, 240 tokens are computed again."""
    geometry = Geometry.of("kimi-k3", page_tokens=6144, match_unit=512)
    assert geometry.state_pages == 3  # one block in each of three groups of KDA layers
    cache = PrefixCache(geometry, 20 * geometry.page_bytes)
    tokens = list(range(2800))
    lease = cache.acquire(chain(tokens, 512), 0)
    stage = cache.stage(lease, chain(tokens, 512), [Mark(2560, "prompt")], 0)
    assert stage is not None
    assert len(stage.pages) == 1
    cache.landed(lease, stage, 0)
    cache.release(lease)
    longer = chain([*tokens, *range(9000, 9400)], 512)
    second = cache.acquire(longer, 1)
    assert second.depth == 2560
    assert 2800 - second.depth == 240
    shared = second.node.pages[0]  # type: ignore[union-attr]
    extended = cache.stage(second, longer, [Mark(3072, "prompt")], 1)
    assert extended is not None
    assert extended.start % geometry.page_tokens == 2560
    assert extended.pages[0] != shared  # copied before it is extended: the first page is never written again
    cache.landed(second, extended, 1)
    cache.release(second)
    check_integrity(cache)
    assert cache.match(longer).depth == 3072


def test_errors() -> None:
    cache = PrefixCache(SMALL, 1000)
    with pytest.raises(Error, match=r"chain\.unit is 8"):
        cache.acquire(chain([1] * 8, 8), 0)
    lease = cache.acquire(chain([1] * 8), 0)
    with pytest.raises(Error, match=r"mark\.depth is 9; allowed: 1 \.\. 8"):
        cache.stage(lease, chain([1] * 8), [Mark(9, "prompt")], 0)
    with pytest.raises(Error, match="eviction is 'fifo'"):
        Eviction("fifo")


def test_the_shortest_prefix_that_can_hit_is_known() -> None:
    cache = PrefixCache(Geometry.of("kimi-k3", match_unit=512), 10**10)
    shortest = cache.min_hittable_tokens()
    tokens = list(range(shortest + 1))
    assert request(cache, tokens) == 0
    assert request(cache, tokens, 1) == shortest == 512


def lifetimes(count: int) -> None:
    """Random requests that fork, extend, abort and expire: afterwards nothing is leaked."""
    draw = random.Random(0)
    cache = PrefixCache(SMALL, 400, 400, Placement(min_turn=1))
    running: list[tuple[Lease, Stage | None]] = []
    for now in range(count):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 40))]
        lease = cache.acquire(chain(tokens), now, deadline=now + draw.randrange(1, 200))
        marks = cache.plan(lease, draw.randrange(1, len(tokens) + 1), len(tokens), exact=True)
        running.append((lease, cache.stage(lease, chain(tokens), marks, now)))
        late = cache.expire(now)
        running = [(lease, stage) for lease, stage in running if lease not in late]
        while running and draw.random() < 0.6:
            lease, stage = running.pop(draw.randrange(len(running)))
            if not lease.ready and draw.random() < 0.8:
                cache.arrived(lease)
            if stage is not None and lease.ready and draw.random() < 0.8:
                cache.landed(lease, stage, now)
            cache.release(lease)
        if now % 500 == 0:
            check_integrity(cache)
    for lease, _ in running:
        cache.release(lease)
    check_integrity(cache)
    live.clear(cache)
    assert [arena.free_pages for arena in cache.arenas] == [arena.capacity for arena in cache.arenas]
    assert cache.leases == 0


def test_random_lifetimes_leak_nothing() -> None:
    lifetimes(4000)


@pytest.mark.slow
def test_a_hundred_thousand_random_lifetimes_leak_nothing() -> None:
    lifetimes(100_000)
