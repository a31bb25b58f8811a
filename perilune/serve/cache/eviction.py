"""Which segment leaves a full tier: two orders, and a duel between them that decides which one rules.

*lru*: the segment used longest ago. *gain*: the segment that is expected to save the fewest prefill tokens a second
and page: tokens saved x rate of reuse / pages. The rate is learned: for every class of segments (kind, turn, last or
inner checkpoint) and octave of age, how many segments reached that age and how many were reused at it.

When the two would evict different segments, the one evicted leaves a ghost (its key and its rival). If the ghost is
asked for first, the ruling order has lost the tokens that it would have saved; if the rival is used first, the other
order would have lost the rival's, both counted in tokens a page freed. Losses decay.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

from perilune.errors import Error
from perilune.serve.cache.tree import Node

ORDERS = ("gain", "lru")
PRIOR = 8.0  # segments of the prior of a class
PRIOR_REUSE = 0.3  # of them, those reused within an octave of age
MARGIN = 8.0  # gain rules until it has lost so much more: the duel sees single evictions, gain looks further ahead
DECAY = 0.998  # of losses, a duel
GHOSTS = 65536


@dataclass(eq=False)
class Ghost:
    """A segment evicted in another's place: tokens saved a page of both."""

    ruler: int
    tokens: float
    rival_tokens: float
    open: bool = True


class Eviction:
    """State of the choice. policy: "auto" lets the duel decide; "gain" or "lru" fixes the order."""

    def __init__(self, policy: str = "auto") -> None:
        if policy not in ("auto", *ORDERS):
            raise Error(f"eviction is {policy!r}; allowed: 'auto', {', '.join(map(repr, ORDERS))}")
        self.policy = policy
        self.loss = [0.0, 0.0]
        self._reached: dict[tuple[object, int], float] = defaultdict(float)
        self._reused: dict[tuple[object, int], float] = defaultdict(float)
        self._ghosts: OrderedDict[tuple[int, Hashable], Ghost] = OrderedDict()

    @property
    def ruler(self) -> int:
        """Index into ORDERS of the order that decides now."""
        return ORDERS.index(self.policy) if self.policy != "auto" else int(self.loss[0] > MARGIN * self.loss[1])

    def used(self, node: Node, now: float) -> None:
        """A request was served from this node's checkpoint; everything above it was passed through."""
        self._grow(node, now)
        self._reused[_class(node), _octave(now - node.seen)] += 1
        node.used = now
        for ghost in node.ghosts:
            if ghost.open:
                self._lost(1 - ghost.ruler, ghost.rival_tokens)
                ghost.open = False
        node.ghosts.clear()
        self.passed(node, now)

    def passed(self, node: Node, now: float) -> None:
        """A request went by here and further down: an age begins anew for the node and all above it."""
        above: Node | None = node
        while above is not None:
            if above.state is not None:
                self._grow(above, now)
            above.seen, above.bucket = now, -1
            above = above.parent

    def asked(self, keys: Iterable[tuple[int, Hashable]]) -> None:
        """(depth, key) of the prefixes of a request that were not served."""
        if self._ghosts:
            for key in keys:
                ghost = self._ghosts.pop(key, None)
                if ghost is not None and ghost.open:
                    self._lost(ghost.ruler, ghost.tokens)
                    ghost.open = False

    def age(self, nodes: Iterable[Node], now: float) -> None:
        """Count the ages that resident segments have reached; called now and then."""
        for node in nodes:
            if node.state is not None:
                self._grow(node, now)

    def order(
        self, nodes: Iterable[Node], now: float, pages: Callable[[Node], int], valid: Callable[[Node], bool]
    ) -> Victims:
        """Candidates for eviction, worst first. pages: what the eviction of a node frees; valid: may it go still."""
        return Victims(self, nodes, now, pages, valid)

    def scores(self, node: Node, now: float, pages: Callable[[Node], int]) -> tuple[float, float]:
        rate = 0.0
        if node.state is not None:
            kind, octave = _class(node), _octave(now - node.seen)
            reused = self._reused.get((kind, octave), 0.0) + PRIOR * PRIOR_REUSE
            rate = reused / (self._reached.get((kind, octave), 0.0) + PRIOR) / 2**octave
        return tokens_saved(node) * rate / max(1, pages(node)), node.used

    def evicted(self, node: Node, rivals: tuple[Node, Node], pages: Callable[[Node], int]) -> None:
        """Keep a ghost of a segment about to be evicted if the two orders disagree; rivals: the choice of each."""
        rival = rivals[1 - self.ruler]
        if self.policy != "auto" or rival is node or not node.keys or rival.state is None or node.state is None:
            return
        ghost = Ghost(self.ruler, tokens_saved(node) / max(1, pages(node)), tokens_saved(rival) / max(1, pages(rival)))
        self._ghosts[node.end, node.keys[-1]] = ghost
        rival.ghosts.append(ghost)
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)

    def _lost(self, order: int, tokens: float) -> None:
        self.loss = [loss * DECAY for loss in self.loss]
        self.loss[order] += tokens

    def _grow(self, node: Node, now: float) -> None:
        octave = _octave(now - node.seen)
        if node.bucket < octave:
            kind = _class(node)
            for reached in range(node.bucket + 1, octave + 1):
                self._reached[kind, reached] += 1
            node.bucket = octave


class Victims(Iterator[tuple[Node, tuple[Node, Node]]]):
    """The worst segment by the ruling order, with the choice of both orders; scores are renewed when they are due."""

    def __init__(
        self,
        eviction: Eviction,
        nodes: Iterable[Node],
        now: float,
        pages: Callable[[Node], int],
        valid: Callable[[Node], bool],
    ) -> None:
        self._valid = valid
        self.made, self.fresh = 0, True
        self.now = now
        self._eviction, self._pages = eviction, pages
        self._ruler = eviction.ruler
        scored = [(self._score(node), node.number, node) for node in nodes]
        self._heaps = [[(score[order], number, node) for score, number, node in scored] for order in (0, 1)]
        for heap in self._heaps:
            heapq.heapify(heap)

    def _score(self, node: Node) -> tuple[float, float]:
        return self._eviction.scores(node, self.now, self._pages)

    def add(self, node: Node) -> None:
        """A node whose eviction frees more than before."""
        score = self._score(node)
        for order, heap in enumerate(self._heaps):
            heapq.heappush(heap, (score[order], node.number, node))

    def __next__(self) -> tuple[Node, tuple[Node, Node]]:
        tops = []
        for order, heap in enumerate(self._heaps):
            while heap:
                score, number, node = heap[0]
                if not self._valid(node):
                    heapq.heappop(heap)
                    continue
                current = self._score(node)[order]
                if current <= score + 1e-4 * abs(score):
                    tops.append(node)
                    break
                heapq.heapreplace(heap, (current, number, node))
        if len(tops) < 2:
            raise StopIteration
        return tops[self._ruler], (tops[0], tops[1])


def _class(node: Node) -> tuple[bool, str, int]:
    return node.degree == 0, node.kind, min(node.turn, 3)


def _octave(age: float) -> int:
    """0 below one second, 1 below three, 2 below seven, ..."""
    return int(1 + max(0.0, age)).bit_length() - 1


def tokens_saved(node: Node) -> int:
    """Prefill tokens that this checkpoint saves over the one before it."""
    return node.end - node.base().end


__all__ = ["ORDERS", "Eviction", "Victims", "tokens_saved"]
