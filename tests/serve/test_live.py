"""A running request's pages: growing, publishing a part, sharing pages that it goes on writing."""

from __future__ import annotations

from perilune.serve.cache import DEVICE, HOST, Chain, Geometry, Mark, PrefixCache, check_integrity, live

UNIT = 4
SMALL = Geometry(token_bytes=1, state_bytes=10, page_tokens=4, match_unit=UNIT, grid=4)
WIDE = Geometry(token_bytes=1, state_bytes=10, page_tokens=16, match_unit=UNIT, grid=4)


def chain(count: int, salt: str = "") -> Chain:
    return Chain.of(list(range(count)), UNIT, salt)


def test_a_chain_grows_to_the_same_names() -> None:
    short, whole = Chain.of(list(range(10)), UNIT, "a", 3), Chain.of(list(range(30)), UNIT, "a", 3)
    grown = short.extended(list(range(17))).extended(list(range(30)))
    assert (grown.keys, grown.length, grown.version) == (whole.keys, 30, 3)
    assert grown.tail(30) == whole.tail(30)
    assert Chain.of([0], UNIT, "a", 3).extended(list(range(30))).keys == whole.keys
    assert Chain.of([0], UNIT, "b", 3).extended(list(range(30))).keys != whole.keys


def test_a_request_publishes_a_part_and_goes_on() -> None:
    cache = PrefixCache(SMALL, 200)
    lease = cache.acquire(chain(10), 0)
    stage = live.reserve(cache, lease, chain(10), 10, 0)
    assert stage is not None
    assert live.mark(cache, lease, stage, Mark(8, "prompt"), 0) is not None
    assert cache.match(chain(10)).kv_depth == 0
    live.publish(cache, lease, stage, chain(10), 0)
    check_integrity(cache)
    other = cache.acquire(chain(12), 1)
    assert other.depth == 8
    assert live.table(cache, other) == stage.pages[:2]  # shared, not copied
    assert live.grow(cache, lease, stage, 23, 1)
    assert len(stage.pages) == 6
    assert live.mark(cache, lease, stage, Mark(23, "turn", "decode"), 1) is not None
    live.publish(cache, lease, stage, chain(23), 1)
    check_integrity(cache)
    cache.release(lease)
    cache.release(other)
    check_integrity(cache)
    assert cache.match(chain(30)).depth == 23
    assert live.held_pages(cache) == 0


def test_rows_of_a_hit_inside_a_page_are_copied_before_they_are_extended() -> None:
    cache = PrefixCache(WIDE, 2000)
    lease = cache.acquire(chain(30), 0)
    stage = live.reserve(cache, lease, chain(30), 30, 0)
    assert stage is not None
    live.mark(cache, lease, stage, Mark(27, "turn", "decode"), 0)
    live.publish(cache, lease, stage, chain(30), 0)
    second = cache.acquire(chain(40), 1)
    assert second.depth == 27
    own = live.reserve(cache, second, chain(40), 40, 1)
    assert own is not None
    shared, copies = live.copies(cache, second, own)
    assert (shared, copies) == ([stage.pages[1]], [own.pages[0]])  # rows 16..26 of the page of 16..31
    assert live.table(cache, second, own) == [stage.pages[0], *own.pages]
    cache.release(second)
    cache.release(lease)
    check_integrity(cache)


def test_without_room_nothing_changes() -> None:
    cache = PrefixCache(SMALL, 5 * 4)
    lease = cache.acquire(chain(20), 0)
    assert live.reserve(cache, lease, chain(40), 40, 0) is None
    stage = live.reserve(cache, lease, chain(16), 16, 0)
    assert stage is not None
    assert live.mark(cache, lease, stage, Mark(16, "prompt"), 0) is None
    assert live.grow(cache, lease, stage, 20, 0)
    assert not live.grow(cache, lease, stage, 24, 0)
    assert (len(stage.pages), stage.marks) == (5, [])
    cache.release(lease)
    check_integrity(cache)
    assert cache.arenas[DEVICE].free_pages == 5


def test_clear_forgets_all_but_what_is_leased() -> None:
    cache = PrefixCache(SMALL, 60, 400)
    for salt in ("a", "b", "c"):
        lease = cache.acquire(chain(20, salt), 0)
        stage = live.reserve(cache, lease, chain(20, salt), 20, 0)
        assert stage is not None
        assert live.mark(cache, lease, stage, Mark(16, "prompt"), 0) is not None
        live.publish(cache, lease, stage, chain(20, salt), 0)
        cache.release(lease)
    assert cache.cached_pages[HOST] > 0
    kept = cache.acquire(chain(20, "c"), 1)
    live.clear(cache)
    check_integrity(cache)
    assert [cache.match(chain(20, salt)).depth for salt in ("a", "b", "c")] == [0, 0, 16]
    cache.release(kept)
    live.clear(cache)
    assert [arena.free_pages for arena in cache.arenas] == [arena.capacity for arena in cache.arenas]


def test_held_pages_counts_a_shared_path_once() -> None:
    cache = PrefixCache(SMALL, 400)
    lease = cache.acquire(chain(20), 0)
    stage = live.reserve(cache, lease, chain(20), 20, 0)
    assert stage is not None
    live.mark(cache, lease, stage, Mark(16, "prompt"), 0)
    assert live.held_pages(cache) == 5 + SMALL.state_pages
    live.publish(cache, lease, stage, chain(20), 0)
    cache.release(lease)
    leases = [cache.acquire(chain(20), 1) for _ in range(4)]
    assert live.held_pages(cache) == 4 + SMALL.state_pages
    for each in leases:
        cache.release(each)
