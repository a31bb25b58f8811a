"""The engine's own cache under a trace: the same tree, placement and eviction code, without an engine."""

from __future__ import annotations

from perilune.serve.cache import Chain, Eviction, Geometry, Placement, PrefixCache
from perilune.serve.simulate.replay import Served
from perilune.serve.simulate.traces import Request


class Perilune:
    """One replica's cache. Every copy and every write is done at once."""

    def __init__(
        self,
        geometry: Geometry,
        device_bytes: int,
        host_bytes: int = 0,
        placement: Placement | None = None,
        eviction: str | Eviction = "auto",
        name: str = "perilune",
    ) -> None:
        self.name = name
        self.cache = PrefixCache(geometry, device_bytes, host_bytes, placement, eviction)

    def serve(self, request: Request) -> Served:
        cache, unit = self.cache, self.cache.geometry.match_unit
        written, fetched = cache.moved
        chain = Chain(request.keys, max(request.prompt, len(request.keys) * unit), unit)
        lease = cache.acquire(chain, request.at, limit=request.prompt - 1)
        if not lease.ready:
            cache.arrived(lease)
        # An answer that is not sent again is not cached: nobody knows its keys.
        marks = cache.plan(lease, request.prompt, len(request.keys) * unit)
        if marks and (stage := cache.stage(lease, chain, marks, request.at, request.turn)) is not None:
            cache.landed(lease, stage, request.at)
        cache.release(lease)
        size = cache.geometry.page_bytes
        return Served(
            lease.depth - lease.host_depth,
            lease.host_depth,
            lease.kv_depth - lease.depth,
            (cache.moved[0] - written) * size,
            (cache.moved[1] - fetched) * size,
        )

    @property
    def cached_bytes(self) -> int:
        return sum(self.cache.cached_pages) * self.cache.geometry.page_bytes


__all__ = ["Perilune"]
