"""Who may start: order among the waiting, and whether a request's worst case fits beside those that run."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from math import ceil

from perilune.errors import Error
from perilune.serve.cache import live
from perilune.serve.cache.cache import PrefixCache
from perilune.serve.cache.chain import Chain
from perilune.serve.cache.tree import HOST
from perilune.serve.config import EngineConfig
from perilune.serve.request import Request, State

WINDOW = 64  # waiting requests that are looked at, oldest first


class Admission:
    """Reads the cache, changes nothing."""

    def __init__(self, config: EngineConfig, cache: PrefixCache) -> None:
        self.config, self.cache = config, cache
        self.capacity = cache.arenas[0].capacity
        self.usable = self.capacity - ceil(self.capacity * config.watermark)

    def check(self, request: Request) -> None:
        """Raise Error for a request that could never start, whatever else leaves."""
        pages = self.cache.geometry.kv_pages(0, request.longest)
        if pages > self._limit(request):
            raise Error(
                f"a request of {request.prompt} prompt tokens and max_tokens {request.params.max_tokens} needs {pages} "
                f"pages; allowed: {self._limit(request)} (engine.arena_bytes, watermark, long_share)"
            )

    def is_long(self, request: Request) -> bool:
        return request.longest >= self.config.long_tokens

    def overdue(self, request: Request, now: float) -> bool:
        return now - request.arrival >= self.config.max_wait

    def chain(self, request: Request, version: int) -> Chain:
        """The request's tokens as the cache knows them, in this version of the weights."""
        chain = request.chain
        if chain is None or chain.version != version:
            chain = Chain.of(list(request.tokens), self.cache.geometry.match_unit, request.salt, version)
        elif chain.length < request.length:
            chain = chain.extended(list(request.tokens))
        request.chain = chain
        return chain

    def limit(self, request: Request) -> int:
        """How much of a request may come from the cache: its last token never, and nothing it wants to see computed."""
        if request.cold:
            return 0
        if request.params.prompt_logprobs is not None and request.scored < request.prompt:
            return min(request.scored, request.length - 1)
        return request.length - 1

    def order(self, waiting: Sequence[Request], version: int, now: float) -> list[Request]:
        """The highest priority first. Among equals overdue ones by arrival, then parked ones, then the longest hit; a
        second of waiting is worth some tokens."""
        first = nsmallest(WINDOW, waiting, key=lambda request: (-request.priority, request.arrival))
        keys = {}
        for request in first:
            hit = self.cache.match(self.chain(request, version), self.limit(request)).depth
            if self.overdue(request, now):
                keys[request.id] = (-request.priority, 0, request.arrival, request.id)
            else:
                parked = request.state is State.PARKED
                worth = hit + self.config.ageing * (now - request.arrival)
                keys[request.id] = (-request.priority, 1 if parked else 2, -worth, request.id)
        return sorted(first, key=lambda request: keys[request.id])

    def fits(self, request: Request, active: Sequence[Request]) -> bool:
        """Whether its worst case fits into what cannot be evicted plus the worst growth of all that run."""
        geometry, long = self.cache.geometry, self.is_long(request)
        if long and 1 + sum(map(self.is_long, active)) > max(1, self.config.slots * self.config.long_share):
            return False
        assert request.chain is not None
        match = self.cache.match(request.chain, self.limit(request))
        need = geometry.kv_pages(match.depth - match.depth % geometry.match_unit, self._worst(request))
        # What lies on the host comes to the device first.
        need += sum(len(node.pages) + len(node.state or ()) for node in live.path(match.node) if node.tier == HOST)
        growth = sum(self._growth(other) for other in active)
        if live.held_pages(self.cache, [match.node]) + growth + need > self.usable:
            return False
        mine = need if long else 0
        longs = mine + sum(self._growth(r) + len(r.table) for r in active if self.is_long(r))
        return not long or longs <= self._limit(request)

    def _limit(self, request: Request) -> int:
        return int(self.usable * (self.config.long_share if self.is_long(request) else 1.0))

    def _worst(self, request: Request) -> int:
        """The token up to which pages are set aside."""
        return request.length + max(1, ceil(self.config.reserve * (request.longest - request.length)))

    def _growth(self, request: Request) -> int:
        assert request.stage is not None
        return max(
            0, self.cache.geometry.kv_pages(request.stage.start, self._worst(request)) - len(request.stage.pages)
        )

    def coming(self, request: Request, active: Sequence[Request], version: int) -> bool:
        """Whether a longer prefix of it is being computed by another request right now: then it waits for that."""
        chain, unit = request.chain, self.cache.geometry.match_unit
        assert chain is not None
        hit = self.cache.match(chain, self.limit(request)).depth
        for other in active:
            if other.chain is None or other.chain.version != version or not other.publish:
                continue
            for depth in other.marks:
                end = depth // unit
                if (
                    hit < depth <= self.limit(request)
                    and depth > other.computed
                    and depth % unit == 0
                    and end <= len(chain.keys)
                    and chain.keys[end - 1] == other.chain.keys[end - 1]
                ):
                    return True
        return False


__all__ = ["Admission"]
