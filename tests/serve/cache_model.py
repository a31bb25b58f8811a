"""The prefix cache against memory that says what was written where.

Every row of a page carries the tokens before it, every page of a state the prefix it is of; what is freed is erased.
The cache never sees this: if it hands out a page that was freed, shared and then extended, moved by halves or
quarantined, the rows of a hit do not spell its prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from perilune.serve.cache import (
    DEVICE,
    Chain,
    Copy,
    Geometry,
    Lease,
    Mark,
    Node,
    Placement,
    PrefixCache,
    Stage,
    check_integrity,
    live,
)

Key = tuple[int, tuple[int, ...]]  # weight version, tokens


@dataclass(frozen=True)
class Content:
    """What a row or a page of a state is of. clean: not computed from anything quarantined."""

    key: Key
    clean: bool = True


@dataclass(eq=False)
class Run:
    """A request. depth: of its hit; computed: rows it has; stage: of `live` or for all of it at once."""

    chain: Chain
    tokens: tuple[int, ...]
    lease: Lease
    depth: int
    stage: Stage | None = None
    computed: int = 0
    clean: bool = True

    def key(self, end: int) -> Key:
        return self.chain.version, self.tokens[:end]


class CopyError(Exception):
    """What `copy` raises where it is told to fail."""


class Model:
    """A cache, its memory, the requests in flight, and every prefix whose state has landed and not been quarantined."""

    def __init__(self, geometry: Geometry, device: int, host: int, placement: Placement, eviction: str) -> None:
        self.geometry = geometry
        self.cache = PrefixCache(geometry, device, host, placement, eviction, self.write_back)
        self.rows: tuple[list[list[Content | None]], ...] = tuple(
            [[None] * geometry.page_tokens for _ in range(arena.capacity)] for arena in self.cache.arenas
        )
        for tier, arena in enumerate(self.cache.arenas):
            arena.freed = lambda page, tier=tier: self.erase(tier, page)  # type: ignore[misc]
        self.running: list[Run] = []
        self.written: set[Key] = set()
        self.names: dict[object, Key] = {}  # of chained keys
        self.tails: dict[bytes, Key] = {}
        self.version = 0
        self.failing = False
        self.complete = False  # whether all that was written is still there

    # --- memory

    def erase(self, tier: int, page: int) -> None:
        self.rows[tier][page] = [None] * self.geometry.page_tokens

    def write_back(self, copy: Copy) -> None:
        if self.failing:
            raise CopyError
        self.move(copy)

    def move(self, copy: Copy) -> None:
        for here, there in (copy.pages, copy.state):
            for source, target in zip(here, there, strict=True):
                self.rows[copy.target][target] = list(self.rows[copy.source][source])

    def save(self, pages: list[int], run: Run, depth: int) -> None:
        for page in pages:
            self.rows[DEVICE][page][0] = Content(run.key(depth), run.clean)

    def compute(self, run: Run, end: int) -> None:
        """Write rows up to `end`; the shared page of a hit is copied before it is extended."""
        assert run.stage is not None
        size = self.geometry.page_tokens
        if run.computed == run.depth:
            for source, target in zip(*live.copies(self.cache, run.lease, run.stage), strict=True):
                self.rows[DEVICE][target] = list(self.rows[DEVICE][source])
        first = run.stage.start // size
        for token in range(run.computed, end):
            row = Content(run.key(token + 1), run.clean)
            self.rows[DEVICE][run.stage.pages[token // size - first]][token % size] = row
        run.computed = max(run.computed, end)

    # --- requests

    def chain(self, tokens: tuple[int, ...]) -> Chain:
        unit = self.geometry.match_unit
        chain = Chain.of(tokens, unit, version=self.version)
        for i, key in enumerate(chain.keys):
            self.names[key] = self.version, tokens[: (i + 1) * unit]
        for end in range(1, len(tokens) + 1):
            self.tails[chain.tail(end)] = self.version, tokens[end - end % unit : end]
        return chain

    def open(self, tokens: tuple[int, ...], limit: int, now: float, deadline: float | None = None) -> Run:
        chain = self.chain(tokens)
        lease = self.cache.acquire(chain, now, limit, deadline)
        run = Run(chain, tokens, lease, lease.depth, computed=lease.depth)
        assert lease.depth <= max(0, limit)
        assert not lease.depth or run.key(lease.depth) in self.written
        if self.complete:
            assert lease.depth == max(
                end for end in range(max(0, limit) + 1) if not end or run.key(end) in self.written
            )
        self.running.append(run)
        return run

    def arrive(self, run: Run) -> None:
        if not run.lease.ready:
            for copy in run.lease.copies:
                self.move(copy)
            self.cache.arrived(run.lease)

    def stage(self, run: Run, marks: list[Mark], now: float) -> None:
        """All at once: the pages are reserved and written, and nobody knows of them yet."""
        run.stage = self.cache.stage(run.lease, run.chain, marks, now)
        if run.stage is not None:
            self.compute(run, run.stage.marks[-1].depth)
            for mark, pages in zip(run.stage.marks, run.stage.states, strict=True):
                self.save(pages, run, mark.depth)

    def land(self, run: Run, now: float) -> None:
        if run.stage is not None:
            self.publish(run)
            self.cache.landed(run.lease, run.stage, now)
        self.end(run)

    def publish(self, run: Run) -> None:
        if run.stage is not None and run.clean:
            self.written.update(run.key(mark.depth) for mark in run.stage.marks)

    def reserve(self, run: Run, end: int, now: float) -> None:
        run.stage = live.reserve(self.cache, run.lease, run.chain, end, now)
        if run.stage is not None:
            self.compute(run, end)

    def grow(self, run: Run, end: int, now: float) -> None:
        if run.stage is not None and live.grow(self.cache, run.lease, run.stage, end, now):
            self.compute(run, end)

    def leave(self, run: Run, depth: int, now: float) -> None:
        """A checkpoint of what the run has computed, published while it goes on."""
        if run.stage is None:
            return
        pages = live.mark(self.cache, run.lease, run.stage, Mark(depth, "turn"), now)
        if pages is not None:
            self.save(pages, run, depth)
            self.publish(run)
            live.publish(self.cache, run.lease, run.stage, run.chain, now)

    def abandon(self, run: Run) -> None:
        """What it wrote is dropped; its hit stays."""
        assert run.stage is not None
        self.cache.abandon(run.lease, run.stage)
        run.stage, run.computed = None, run.depth

    def fork(self, run: Run, count: int) -> None:
        for lease in self.cache.fork(run.lease, count):
            self.running.append(Run(run.chain, run.tokens, lease, run.depth, computed=run.depth, clean=run.clean))

    def end(self, run: Run) -> None:
        self.cache.release(run.lease)
        self.running.remove(run)

    def expire(self, now: float) -> None:
        late = self.cache.expire(now)
        self.running = [run for run in self.running if run.lease not in late]

    def quarantine(self, tokens: tuple[int, ...], depth: int) -> None:
        """What the tree holds of this path behind `depth` is bad, and what is computed from it will be."""
        unit = self.geometry.match_unit

        def bad(key: Key) -> bool:
            return key[0] == self.version and _shared(key[1], tokens) // unit * unit > depth

        def lost(key: Key) -> bool:
            """Checkpoints inside a unit are told apart by nothing but their state."""
            whole = _shared(key[1], tokens) // unit * unit
            return bad(key) or (key[0] == self.version and depth < len(key[1]) < whole + unit)

        own = [run.stage for run in self.running if run.stage is not None and run.clean]
        mine = {page for stage in own for part in (stage.pages, *stage.states) for page in part}
        for node, _ in self.reachable():
            for page in {*node.pages, *(node.state or ())} - (mine if node.tier == DEVICE else set()):
                rows, wrong = self.rows[node.tier][page], lost if page in (node.state or ()) else bad
                rows[:] = [row and replace(row, clean=row.clean and not wrong(row.key)) for row in rows]
        for run in self.running:
            if lost(run.key(run.depth)):
                run.clean = False
        self.written = {key for key in self.written if not lost(key)}
        self.cache.quarantine(self.chain(tokens), depth)

    # --- what must hold

    def check(self) -> None:
        check_integrity(self.cache)
        for node, key in self.reachable():
            assert self.spells(node, key), f"node {node.number} at {node.end} does not hold what it is named for"
        for run in self.running:
            if run.lease.ready and run.clean:
                assert self.holds(run), f"lease {run.lease.handle} lost its hit of {run.depth} tokens"

    def reachable(self) -> Iterator[tuple[Node, Key]]:
        """Nodes that a chain leads to, and the prefix each is named for."""
        waiting: list[tuple[Node, Key]] = [(self.cache.tree.root, (-1, ()))]
        while waiting:
            node, key = waiting.pop()
            if node.parent is not None:
                yield node, key
            for below in node.children.values():
                if below.keys[-1] in self.names and below.kind != "quarantined":
                    waiting.append((below, self.names[below.keys[-1]]))
            for (_, digest), below in node.tails.items():
                if digest in self.tails and below.kind != "quarantined":
                    version, last = self.tails[digest]
                    waiting.append((below, (version, key[1] + last)))

    def spells(self, node: Node, key: Key) -> bool:
        rows, size = self.rows[node.tier], self.geometry.page_tokens
        for token in range(node.start, node.end):
            if rows[node.pages[token // size - node.start // size]][token % size] != Content(_cut(key, token + 1)):
                return False
        return all(rows[page][0] == Content(key) for page in node.state or ())

    def holds(self, run: Run) -> bool:
        """Whether the hit of a run is there, by the table that the engine reads."""
        pages, size = live.table(self.cache, run.lease), self.geometry.page_tokens
        rows = self.rows[DEVICE]
        if any(rows[pages[t // size]][t % size] != Content(run.key(t + 1)) for t in range(run.depth)):
            return False
        node = run.lease.node
        return not run.depth or (
            node is not None
            and node.state is not None
            and all(rows[page][0] == Content(run.key(run.depth)) for page in node.state)
        )

    def finish(self) -> None:
        """All requests end: nothing is held but by the tree, and nothing at all once that is cleared."""
        for run in list(self.running):
            self.end(run)
        self.check()
        live.clear(self.cache)
        assert [arena.free_pages for arena in self.cache.arenas] == [arena.capacity for arena in self.cache.arenas]
        assert self.cache.leases == 0


def _cut(key: Key, end: int) -> Key:
    return key[0], key[1][:end]


def _shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    same = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        same += 1
    return same


__all__ = ["CopyError", "Model", "Run"]
