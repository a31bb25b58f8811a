"""The prefix cache: what may be reused, who holds it, what leaves when a tier is full. No bytes are touched here.

A request's way: `acquire` pins its hit (and reserves device pages for what lies on the host), `arrived` says that
those have been copied, `stage` reserves pages for what the request will leave, `landed` publishes them once they are
written, `release` ends it. Reserving may fail; a request is served all the same, it only leaves less behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from perilune.errors import Error
from perilune.serve.cache.arena import Arena
from perilune.serve.cache.chain import Chain
from perilune.serve.cache.eviction import Eviction, Victims
from perilune.serve.cache.geometry import Geometry
from perilune.serve.cache.placement import Mark, Placement
from perilune.serve.cache.tree import DEVICE, HOST, QUARANTINED, Match, Node, Tree

SWEEP = 64  # acquisitions between two counts of ages
REORDER = 16  # acquisitions between two orders of eviction


@dataclass(frozen=True)
class Copy:
    """A segment's pages from one tier to another, KV and state together. Page ids are of the source and the target."""

    source: int
    target: int
    pages: tuple[list[int], list[int]]
    state: tuple[list[int], list[int]]

    @property
    def count(self) -> int:
        return len(self.pages[0]) + len(self.state[0])


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


class PrefixCache:
    """Device tier of `device_bytes` and host tier of `host_bytes` (0: none), for chains of geometry.match_unit.

    copy is called for every write-back to the host, and must order the copy before any later use of the source pages.
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
        self.geometry = geometry
        self.placement = placement or Placement()
        self.eviction = Eviction(eviction) if isinstance(eviction, str) else eviction
        self.tree = Tree(geometry.match_unit, geometry.page_tokens)
        self.arenas = (Arena(device_bytes // geometry.page_bytes), Arena(host_bytes // geometry.page_bytes))
        self._copy = copy
        self._nodes: tuple[dict[Node, None], dict[Node, None]] = ({}, {})
        self._leases: dict[int, Lease] = {}
        self._generations: list[int] = []
        self._idle_handles: list[int] = []
        self._acquired = 0
        self._orders: list[Victims | None] = [None, None]
        self.moved = [0, 0]  # pages written back to the host, fetched from it

    # --- a request's verbs

    def match(self, chain: Chain, limit: int | None = None) -> Match:
        """The longest reusable prefix, on any tier, of at most `limit` tokens (default: all but the last token)."""
        self._check(chain)
        return self.tree.match(chain, self._limit(chain, limit))

    def acquire(self, chain: Chain, now: float, limit: int | None = None, deadline: float | None = None) -> Lease:
        """Pin the longest reusable prefix. What lies on the host is to be copied (`lease.copies`), then `arrived`.

        If the device has no room for it, the hit is the deepest one on the device. Raises Error for a chain of
        another match unit.
        """
        self._check(chain)
        limit = self._limit(chain, limit)
        found = self.tree.match(chain, limit)
        lease = self._lease(found, deadline)
        self._pin(lease, +1)
        fetch = self._path(found.node, HOST)
        if fetch and not self._fetch(lease, fetch, now):
            self._pin(lease, -1)
            found = Match(*_pair(self.tree.match(chain, limit, DEVICE)), found.kv_depth)
            lease.depth, lease.nodes = found.depth, [] if found.node is None else [found.node]
            self._pin(lease, +1)
        if found.node is not None:
            self.eviction.used(found.node, now)
        if found.kv_depth > lease.depth:
            (found.node or self.tree.root).splits.append(found.kv_depth)
        unit = self.geometry.match_unit
        self.eviction.asked(((i + 1) * unit, chain.keys[i]) for i in range(found.depth // unit, len(chain.keys)))
        self._acquired += 1
        if self._acquired % SWEEP == 0:
            self.eviction.age(self._nodes[DEVICE], now)
            self.eviction.age(self._nodes[HOST], now)
        return lease

    def arrived(self, lease: Lease) -> None:
        """The copies of a lease are done: its hit is on the device, for everybody."""
        self._live(lease)
        moving, lease.moving, lease.copies, lease.ready = lease.moving, [], [], True
        for node, pages, state in moving:
            if node.tier == DEVICE:  # another request was faster
                self.arenas[DEVICE].free(pages + state)
                continue
            self.arenas[HOST].free(node.pages + (node.state or []))
            node.pages, node.state = pages, state if node.state is not None else None
            self._set_tier(node, DEVICE)

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
        self._live(lease)
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
            pages = self._allocate(DEVICE, rows + len(marks) * self.geometry.state_pages, now)
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
        self._live(lease)
        lease.stages.remove(stage)
        taken: set[int] = set()
        self._publish(stage, taken, now)
        self.arenas[DEVICE].free([page for page in stage.pages if page not in taken])

    def abandon(self, lease: Lease, stage: Stage) -> None:
        """The request was aborted: nothing of the stage is published."""
        self._live(lease)
        lease.stages.remove(stage)
        self.arenas[DEVICE].free(stage.pages + [page for state in stage.states for page in state])

    def fork(self, lease: Lease, count: int) -> list[Lease]:
        """`count` more leases of the same hit."""
        self._live(lease)
        if not lease.ready:
            raise Error("lease is not ready; allowed: a lease whose copies have arrived")
        forks = []
        for _ in range(count):
            forks.append(self._lease(lease.match, lease.deadline))
            self._pin(forks[-1], +1)
        return forks

    def release(self, lease: Lease) -> None:
        """End a lease; what it staged or was still copying is dropped. Raises Error if it has ended before."""
        self._live(lease)
        for stage in list(lease.stages):
            self.abandon(lease, stage)
        for _, pages, state in lease.moving:
            self.arenas[DEVICE].free(pages + state)
        lease.moving = []
        self._pin(lease, -1)
        del self._leases[lease.handle]
        self._generations[lease.handle] += 1
        self._idle_handles.append(lease.handle)
        for node in lease.nodes:
            if node.kind == QUARANTINED:
                self._bury(node)
            self._tidy(node)

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
        node, i, tops = self.tree.root, 0, list[Node]()
        while not tops:
            tops = [tail for tail in node.tails.values() if tail.end > depth]
            child = node.children.get(chain.keys[i]) if i < len(chain.keys) else None
            if child is None:
                break
            node, i = child, i + len(child.keys)
            if node.end > depth:
                tops.append(node)
        found = [below for top in tops for below in self._subtree(top)]
        for below in found[::-1]:
            if below.parent is not None:  # not gone already with what hung below it
                below.kind = QUARANTINED
                self._bury(below)
        return len(found)

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

    # --- edges

    def _publish(self, stage: Stage, taken: set[int], now: float) -> None:
        """Put the stage's marks into the tree. taken: its pages that somebody else holds too; grows by what went in."""
        last: Node | None = None
        for mark, state in zip(stage.marks, stage.states, strict=True):
            node = self._insert(stage, mark.depth, taken, now)
            if node is None or node.kind == QUARANTINED:
                self.arenas[DEVICE].free(state)
                continue
            last = node
            if node.state is None:
                node.state = state
                node.kind, node.origin, node.turn, node.used, node.seen = mark.kind, mark.origin, stage.turn, now, now
                node.bucket = -1
            else:
                self.arenas[DEVICE].free(state)
        if last is not None:
            self._supersede(last)

    def _insert(self, stage: Stage, depth: int, taken: set[int], now: float) -> Node | None:
        """The node that ends at `depth` on the stage's path, made from the stage's pages where it is missing.

        None where a host copy of the path is just being fetched: that one stays.
        """
        unit, keys = self.geometry.match_unit, stage.chain.keys
        node, i, end = self.tree.root, 0, depth // unit
        while i < end:
            child = node.children.get(keys[i])
            if child is None:
                child = self.tree.add(node, list(keys[i:end]))
                self._fill(child, stage, taken, now)
            else:
                if child.tier == HOST and child.pins:
                    return None
                same = _common(child.keys, keys, i, end)
                if same < len(child.keys):
                    child = self._split(child, same)
                if child.tier == HOST:
                    self._replace(child, stage, taken, now)
            node, i = child, i + len(child.keys)
        length = depth - end * unit
        if length:
            tail = (length, stage.chain.tail(depth))
            if tail not in node.tails:
                self._fill(self.tree.add_tail(node, *tail), stage, taken, now)
            elif node.tails[tail].tier == HOST:
                if node.tails[tail].pins:
                    return None
                self._replace(node.tails[tail], stage, taken, now)
            node = node.tails[tail]
        return node

    def _fill(self, node: Node, stage: Stage, taken: set[int], now: float) -> None:
        size = self.geometry.page_tokens
        first = node.start // size - stage.start // size
        assert first >= 0
        assert node.start >= stage.start
        node.pages = stage.pages[first : first + self.geometry.kv_pages(node.start, node.end)]
        for page in node.pages:
            if page in taken:  # across a cut, or a page that its request goes on writing
                self.arenas[DEVICE].share(page)
        taken.update(node.pages)
        node.used = node.seen = now
        node.tier = DEVICE
        self._nodes[DEVICE][node] = None

    def _replace(self, node: Node, stage: Stage, taken: set[int], now: float) -> None:
        """A host node was computed again: its KV is the stage's from now on; a host state would have no KV there."""
        self.arenas[HOST].free(node.pages + (node.state or []))
        del self._nodes[HOST][node]
        node.state = None
        self._fill(node, stage, taken, now)

    def _split(self, node: Node, units: int) -> Node:
        upper, shared = self.tree.split(node, units)
        if shared is not None:
            self.arenas[node.tier].share(shared)
        self._nodes[upper.tier][upper] = None
        return upper

    def _supersede(self, node: Node) -> None:
        """Keep the last few checkpoints of a path without forks."""
        kept, above = 1, node.parent
        while self.placement.keep and above is not None and above.parent is not None and above.degree == 1:
            following = above.parent
            if above.state is not None and above.kind != "mark":
                kept += 1
                if kept > self.placement.keep and not above.pins:
                    self._drop_state(above)
            above = following

    # --- eviction

    def _allocate(self, tier: int, count: int, now: float) -> list[int] | None:
        arena = self.arenas[tier]
        if arena.free_pages < count:
            if count > arena.capacity:
                return None
            while arena.free_pages < count:
                victims = self._victims(tier, now)
                found = next(victims, None)
                if found is None and victims.fresh:
                    return None
                if found is None:
                    self._orders[tier] = None
                    continue
                victims.fresh = False
                self.eviction.evicted(*found, self._frees)
                self._evict(found[0], tier, now, victims)
        return arena.allocate(count)

    def _victims(self, tier: int, now: float) -> Victims:
        """The order of eviction of a tier, made anew every few requests."""
        victims = self._orders[tier]
        if victims is None or victims.made + REORDER <= self._acquired:
            candidates = [node for node in self._nodes[tier] if self._candidate(node, tier)]
            victims = self.eviction.order(candidates, now, self._frees, lambda node: self._candidate(node, tier))
            victims.made = self._acquired
            self._orders[tier] = victims
        victims.now = now
        return victims

    def _candidate(self, node: Node, tier: int) -> bool:
        held = node.tier != tier or node.pins or node.parent is None
        return not held and (node.state is not None or self._last(node))

    def _last(self, node: Node) -> bool:
        """Whether nothing below the node is on its tier or a faster one."""
        return all(below.tier > node.tier for below in node.below())

    def _frees(self, node: Node) -> int:
        """Pages that the eviction of a node frees: its state, and for a last node the KV that only it needs."""
        pages = len(node.state or ())
        if self._last(node):
            pages += len(node.pages)
            above = node.parent
            while above is not None and above.parent is not None and above.state is None and above.degree == 1:
                pages += len(above.pages)
                above = above.parent
        return pages

    def _evict(self, node: Node, tier: int, now: float, victims: Victims) -> None:
        if not self._last(node):
            self._drop_state(node)
            return
        while True:
            parent = node.parent
            assert parent is not None
            worth = tier == DEVICE and self.arenas[HOST].capacity > 0 and (node.state is not None or node.degree > 0)
            if not (worth and self._write_back(node, now)):
                for below in [*self._subtree(node)][::-1]:
                    self._remove(below, tidy=False)
            if parent.parent is None:
                return
            if parent.state is not None or parent.pins or not self._last(parent):
                break
            node = parent  # KV without a state behind it serves nobody
        if parent.state is not None:
            if self._candidate(parent, tier):
                victims.add(parent)
        else:
            self._tidy(parent)

    def _write_back(self, node: Node, now: float) -> bool:
        """Move a device node to the host, KV and state together. False if the host has no room."""
        # Making room must not take what hangs below the node, nor join the node with its parent.
        held = [*self._subtree(node)] + ([node.parent] if node.parent is not None else [])
        for near in held:
            near.pins += 1
        pages = self._allocate(HOST, len(node.pages) + len(node.state or ()), now)
        for near in held:
            near.pins -= 1
        if pages is None:
            return False
        kv, state = pages[: len(node.pages)], pages[len(node.pages) :]
        self._copy(Copy(DEVICE, HOST, (node.pages, kv), (node.state or [], state)))
        self.moved[0] += len(pages)
        self.arenas[DEVICE].free(node.pages + (node.state or []))
        node.pages, node.state = kv, state if node.state is not None else None
        self._set_tier(node, HOST)
        return True

    def _fetch(self, lease: Lease, nodes: list[Node], now: float) -> bool:
        size = sum(len(node.pages) + len(node.state or ()) for node in nodes)
        above = nodes[0].parent
        assert above is not None
        # The whole path stays as it is until the lease ends: its end on the device, and every node that moves.
        more = nodes[:-1] if above.parent is None else [above, *nodes[:-1]]
        for node in more:
            node.pins += 1
        lease.nodes = [*more, *lease.nodes]
        pages = self._allocate(DEVICE, size, now)
        if pages is None:
            return False
        i = 0
        for node in nodes:
            kv, state = len(node.pages), len(node.state or ())
            target = pages[i : i + kv], pages[i + kv : i + kv + state]
            lease.copies.append(Copy(HOST, DEVICE, (node.pages, target[0]), (node.state or [], target[1])))
            lease.moving.append((node, *target))
            i += kv + state
        lease.host_depth = nodes[-1].end - nodes[0].start
        lease.ready = False
        self.moved[1] += size
        return True

    def _drop_state(self, node: Node) -> None:
        assert node.state is not None
        assert not node.pins
        self.arenas[node.tier].free(node.state)
        node.state = None
        self._tidy(node)

    def _bury(self, node: Node) -> None:
        """Drop what a quarantined node holds as soon as nobody leases it."""
        if not node.pins and node.state is not None:
            self._drop_state(node)
        elif not node.pins and not node.degree and node.parent is not None:
            self._remove(node)

    def _remove(self, node: Node, tidy: bool = True) -> None:
        assert not node.pins
        parent = node.parent
        self.arenas[node.tier].free(node.pages + (node.state or []))
        del self._nodes[node.tier][node]
        node.state = None
        self.tree.detach(node)
        if tidy and parent is not None:
            self._tidy(parent)

    def _tidy(self, node: Node) -> None:
        """Remove a stateless node that leads nowhere; join one that leads to one place only."""
        if node.parent is None or node.state is not None or node.pins:
            return
        if not node.degree:
            self._remove(node)
        elif node.degree == 1 and node.children:
            (child,) = node.children.values()
            if child.tier == node.tier:
                del self._nodes[node.tier][node]
                spare = self.tree.merge(node)
                if spare is not None:
                    self.arenas[child.tier].free([spare])

    def _set_tier(self, node: Node, tier: int) -> None:
        del self._nodes[node.tier][node]
        node.tier = tier
        self._nodes[tier][node] = None

    # --- leases

    def _lease(self, match: Match, deadline: float | None) -> Lease:
        if self._idle_handles:
            handle = self._idle_handles.pop()
        else:
            handle = len(self._generations)
            self._generations.append(0)
        nodes = [match.node] if match.node is not None else []
        lease = Lease(handle, self._generations[handle], match.depth, 0, match.kv_depth, nodes, deadline)
        self._leases[handle] = lease
        return lease

    def _live(self, lease: Lease) -> None:
        if self._leases.get(lease.handle) is not lease:
            raise Error(f"lease {lease.handle} generation {lease.generation} has ended; allowed: a lease in force")

    @staticmethod
    def _pin(lease: Lease, change: int) -> None:
        for node in lease.nodes:
            node.pins += change

    @staticmethod
    def _path(node: Node | None, tier: int) -> list[Node]:
        """The nodes of a tier from the top down to `node`."""
        path = []
        while node is not None and node.parent is not None and node.tier == tier:
            path.append(node)
            node = node.parent
        return path[::-1]

    @staticmethod
    def _subtree(node: Node) -> Iterable[Node]:
        waiting = [node]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.below())

    def _check(self, chain: Chain) -> None:
        if chain.unit != self.geometry.match_unit:
            raise Error(f"chain.unit is {chain.unit}; this cache has match_unit {self.geometry.match_unit}")

    @staticmethod
    def _limit(chain: Chain, limit: int | None) -> int:
        return chain.length - 1 if limit is None else min(limit, chain.length)


def _pair(match: Match) -> tuple[int, Node | None]:
    return match.depth, match.node


def _common(edge: Sequence[object], keys: Sequence[object], i: int, end: int) -> int:
    """How many units of an edge follow keys[i:end]; at least the first one does."""
    size = min(len(edge), end - i)
    if list(edge[:size]) == list(keys[i : i + size]):
        return size
    same = 1
    while edge[same] == keys[i + same]:
        same += 1
    return same


__all__ = ["Copy", "Lease", "PrefixCache", "Stage"]
