"""States that running requests leave in the cache: where there is room, and matchable once they are written."""

from __future__ import annotations

from dataclasses import replace

from perilune.serve.cache import live
from perilune.serve.cache.cache import PrefixCache
from perilune.serve.cache.placement import Mark
from perilune.serve.request import Request
from perilune.serve.work import Device


class Checkpoints:
    """Failing to leave a state is no harm: less can be reused."""

    def __init__(self, cache: PrefixCache, device: Device) -> None:
        self.cache, self.device = cache, device

    def exports(self, request: Request, end: int, now: float) -> tuple[tuple[int, list[int]], ...]:
        """Pages for the states of marks before `end`, written by the step itself. Without room a mark is left out."""
        exports = []
        for depth in sorted(depth for depth in request.marks if depth < end):
            mark = request.marks.pop(depth)
            pages = self._pages(request, mark, now)
            if pages is not None:
                exports.append((depth, pages))
        return tuple(exports)

    def leave(self, request: Request, mark: Mark, now: float) -> None:
        """Save the state of a request's slot."""
        pages = self._pages(request, mark, now)
        if pages is not None:
            assert request.slot is not None
            self.device.save(request.slot, mark.depth, pages)
            self.publish(request, now)

    def leave_end(self, request: Request, now: float) -> None:
        """Save the deepest state of a request that can be saved."""
        self.leave(request, Mark(self._depth(request), "turn", "decode"), now)

    def publish(self, request: Request, now: float) -> None:
        """What was written can be matched from now on."""
        assert request.lease is not None
        assert request.stage is not None
        assert request.chain is not None
        live.publish(self.cache, request.lease, request.stage, request.chain, now)

    def _depth(self, request: Request) -> int:
        grid, computed = self.cache.geometry.grid, request.computed + request.ahead
        return computed // grid * grid if self.device.on_grid else computed

    def _pages(self, request: Request, mark: Mark, now: float) -> list[int] | None:
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


__all__ = ["Checkpoints"]
