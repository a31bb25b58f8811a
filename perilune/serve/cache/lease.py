"""Who holds a part of the cache: a lease pins a hit, a stage reserves the pages that its request writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from perilune.errors import Error
from perilune.serve.cache.chain import Chain
from perilune.serve.cache.placement import Mark
from perilune.serve.cache.tiers import Copy
from perilune.serve.cache.tree import Match, Node


@dataclass(eq=False)
class Lease:
    """A pinned hit: the state after `depth` tokens and the KV of [0, depth), on the device once `ready`.

    host_depth: how much of depth came from the host tier. kv_depth: tokens whose KV was found, with or without state.
    handle is reused after release; generation tells one use from the next. deadline is in the caller's clock.
    """

    handle: int
    generation: int
    depth: int
    host_depth: int
    kv_depth: int
    nodes: list[Node]
    deadline: float | None = None
    ready: bool = True
    copies: list[Copy] = field(default_factory=list)
    moving: list[tuple[Node, list[int], list[int]]] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)

    @property
    def node(self) -> Node | None:
        return self.nodes[-1] if self.nodes else None

    @property
    def match(self) -> Match:
        return Match(self.depth, self.node, self.kv_depth)


@dataclass(eq=False)
class Stage:
    """Pages that a request writes and the cache does not know yet.

    pages hold the rows from the page of `start` on. If `start` lies inside a page, the first one is a private copy
    of the shared page: copy it before extending it. states: one list of pages a mark.
    """

    chain: Chain
    start: int
    marks: list[Mark]
    pages: list[int]
    states: list[list[int]]
    turn: int


class Leases(dict[int, Lease]):
    """The leases in force, by handle."""

    def __init__(self) -> None:
        super().__init__()
        self._generations: list[int] = []
        self._idle: list[int] = []

    def open(self, match: Match, deadline: float | None) -> Lease:
        if self._idle:
            handle = self._idle.pop()
        else:
            handle = len(self._generations)
            self._generations.append(0)
        nodes = [match.node] if match.node is not None else []
        lease = Lease(handle, self._generations[handle], match.depth, 0, match.kv_depth, nodes, deadline)
        self[handle] = lease
        return lease

    def check(self, lease: Lease) -> None:
        """Raises Error for a lease that is no longer in force."""
        if self.get(lease.handle) is not lease:
            raise Error(f"lease {lease.handle} generation {lease.generation} has ended; allowed: a lease in force")

    def close(self, lease: Lease) -> None:
        del self[lease.handle]
        self._generations[lease.handle] += 1
        self._idle.append(lease.handle)


def pin(lease: Lease, change: int) -> None:
    for node in lease.nodes:
        node.pins += change


__all__ = ["Lease", "Leases", "Stage", "pin"]
