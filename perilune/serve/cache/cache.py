"""The prefix cache: what may be reused, who holds it, what leaves when a tier is full. No bytes are touched here.

A request's way: `acquire` pins its hit (and reserves device pages for what lies on the host), `arrived` says that
those have been copied, `stage` reserves pages for what the request will leave, `landed` publishes them once they are
written, `release` ends it. Reserving may fail; a request is served all the same, it only leaves less behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perilune.errors import Error
from perilune.serve.cache.chain import Chain
from perilune.serve.cache.eviction import Eviction
from perilune.serve.cache.fetch import arrive, fetch
from perilune.serve.cache.geometry import Geometry
from perilune.serve.cache.insert import publish
from perilune.serve.cache.lease import Lease, Leases, Stage, pin
from perilune.serve.cache.placement import Mark, Placement
from perilune.serve.cache.quarantine import bury, quarantine
from perilune.serve.cache.room import allocate
from perilune.serve.cache.tiers import Copy, Tiers, tidy
from perilune.serve.cache.tree import DEVICE, HOST, QUARANTINED, Match, path

SWEEP = 64  # acquisitions between two counts of ages


class PrefixCache(Tiers):
    """Device tier of `device_bytes` and host tier of `host_bytes` (0: none), for chains of geometry.match_unit.

    copy is called for every write-back to the host, and must order the copy before any later use of the source pages.
    What it raises comes out of the verb that needed room; the segment then stays where it is.
    """

    def __init__(
        self,
        geometry: Geometry,
        device_bytes: int,
        host_bytes: int = 0,
        placement: Placement | None = None,
        eviction: str | Eviction = "auto",
        copy: Callable[[Copy], None] = lambda _: None,
    ) -> None:
        order = Eviction(eviction) if isinstance(eviction, str) else eviction
        super().__init__(geometry, device_bytes, host_bytes, order, copy)
        self.placement = placement or Placement()
        self._leases = Leases()

    # --- a request's verbs

    def match(self, chain: Chain, limit: int | None = None) -> Match:
        """The longest reusable prefix, on any tier, of at most `limit` tokens (default: all but the last token)."""
        self._check(chain)
        return self.tree.match(chain, _limit(chain, limit))

    def acquire(self, chain: Chain, now: float, limit: int | None = None, deadline: float | None = None) -> Lease:
        """Pin the longest reusable prefix. What lies on the host is to be copied (`lease.copies`), then `arrived`.

        If the device has no room for it, the hit is the deepest one on the device. Raises Error for a chain of
        another match unit.
        """
        self._check(chain)
        limit = _limit(chain, limit)
        found = self.tree.match(chain, limit)
        lease = self._leases.open(found, deadline)
        pin(lease, +1)
        away = [node for node in path(found.node) if node.tier == HOST]
        try:
            fetched = not away or fetch(self, lease, away, now)
        except BaseException:
            self.release(lease)
            raise
        if not fetched:
            pin(lease, -1)
            near = self.tree.match(chain, limit, DEVICE)
            found = Match(near.depth, near.node, found.kv_depth)
            lease.depth, lease.nodes = found.depth, [] if found.node is None else [found.node]
            pin(lease, +1)
        if found.node is not None:
            self.eviction.used(found.node, now)
        if found.kv_depth > lease.depth:
            (found.node or self.tree.root).splits.append(found.kv_depth)
        unit = self.geometry.match_unit
        self.eviction.asked(((i + 1) * unit, chain.keys[i]) for i in range(found.depth // unit, len(chain.keys)))
        self.acquired += 1
        if self.acquired % SWEEP == 0:
            self.eviction.age(self.nodes[DEVICE], now)
            self.eviction.age(self.nodes[HOST], now)
        return lease

    def arrived(self, lease: Lease) -> None:
        """The copies of a lease are done: its hit is on the device, for everybody."""
        self._leases.check(lease)
        arrive(self, lease)

    def plan(self, lease: Lease, prompt: int, total: int, exact: bool = False, marks: Sequence[int] = ()) -> list[Mark]:
        """Checkpoints that the placement policy wants from this request; see Placement.plan."""
        grid = self.geometry.grid if exact else max(self.geometry.grid, self.geometry.match_unit)
        splits = (lease.node or self.tree.root).splits
        return self.placement.plan(lease.match, prompt, total, grid, exact, marks, splits)

    def stage(self, lease: Lease, chain: Chain, marks: Sequence[Mark], now: float, turn: int = 0) -> Stage | None:
        """Reserve pages for the KV behind the hit up to the last mark, and for the states of the marks.

        With too little room the last marks are left out; None if not one fits. Raises Error for a mark that is not
        behind the hit and inside the chain.
        """
        self._leases.check(lease)
        self._check(chain)
        marks = sorted(marks, key=lambda mark: mark.depth)
        for mark in marks:
            if not lease.depth < mark.depth <= chain.length:
                raise Error(f"mark.depth is {mark.depth}; allowed: {lease.depth + 1} .. {chain.length}")
            if mark.depth % self.geometry.match_unit and chain.tokens is None:
                raise Error(f"mark.depth is {mark.depth}; a chain without tokens is known to whole units only")
        start = lease.depth - lease.depth % self.geometry.match_unit
        while marks:
            rows = self.geometry.kv_pages(start, marks[-1].depth)
            pages = allocate(self, DEVICE, rows + len(marks) * self.geometry.state_pages, now)
            if pages is not None:
                states = [pages[rows + i * self.geometry.state_pages :] for i in range(len(marks))]
                states = [state[: self.geometry.state_pages] for state in states]
                stage = Stage(chain, start, marks, pages[:rows], states, turn)
                lease.stages.append(stage)
                return stage
            marks = marks[:-1]
        return None

    def landed(self, lease: Lease, stage: Stage, now: float) -> None:
        """Everything of the stage has been written: its prefixes can be matched from now on."""
        self._leases.check(lease)
        lease.stages.remove(stage)
        taken: set[int] = set()
        publish(self, lease, stage, taken, self.placement.keep, now)
        self.arenas[DEVICE].free([page for page in stage.pages if page not in taken])

    def abandon(self, lease: Lease, stage: Stage) -> None:
        """The request was aborted: nothing of the stage is published."""
        self._leases.check(lease)
        lease.stages.remove(stage)
        self.arenas[DEVICE].free(stage.pages + [page for state in stage.states for page in state])

    def fork(self, lease: Lease, count: int) -> list[Lease]:
        """`count` more leases of the same hit."""
        self._leases.check(lease)
        if not lease.ready:
            raise Error("lease is not ready; allowed: a lease whose copies have arrived")
        forks = []
        for _ in range(count):
            forks.append(self._leases.open(lease.match, lease.deadline))
            pin(forks[-1], +1)
        return forks

    def release(self, lease: Lease) -> None:
        """End a lease; what it staged or was still copying is dropped. Raises Error if it has ended before."""
        self._leases.check(lease)
        for stage in list(lease.stages):
            self.abandon(lease, stage)
        for _, pages, state in lease.moving:
            self.arenas[DEVICE].free(pages + state)
        lease.moving = []
        pin(lease, -1)
        self._leases.close(lease)
        for node in lease.nodes:
            if node.kind == QUARANTINED:
                bury(self, node)
            tidy(self, node)

    def expire(self, now: float) -> list[Lease]:
        """Release and return the leases whose deadline has passed."""
        late = [lease for lease in self._leases.values() if lease.deadline is not None and lease.deadline <= now]
        for lease in late:
            self.release(lease)
        return late

    def quarantine(self, chain: Chain, depth: int = 0) -> int:
        """Make everything on the chain's path deeper than `depth` unmatchable, as after NaN. Returns dropped nodes.

        Leased checkpoints lose their place at once, and their pages when they are released.
        """
        return quarantine(self, chain, depth)

    # --- reading

    @property
    def cached_pages(self) -> list[int]:
        """Held pages of the tiers, device first."""
        return [arena.capacity - arena.free_pages for arena in self.arenas]

    @property
    def leases(self) -> int:
        return len(self._leases)

    def min_hittable_tokens(self) -> int:
        """The shortest prefix that can hit: a shared prefix below it is recomputed, always."""
        return max(self.geometry.grid, self.geometry.match_unit)

    def _check(self, chain: Chain) -> None:
        if chain.unit != self.geometry.match_unit:
            raise Error(f"chain.unit is {chain.unit}; this cache has match_unit {self.geometry.match_unit}")


def _limit(chain: Chain, limit: int | None) -> int:
    return chain.length - 1 if limit is None else min(limit, chain.length)


__all__ = ["Copy", "Lease", "PrefixCache", "Stage"]
