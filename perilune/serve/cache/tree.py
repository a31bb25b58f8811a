"""The prefix tree: edges are runs of match units, ends of edges may carry a checkpoint.

A node's edge holds the KV of tokens [start, end); a checkpoint at `end` is the KDA state after exactly `end` tokens.
A *segment* - a checkpoint with the KV that no other checkpoint needs - is a node with a state together with the
stateless nodes above it that lead nowhere else. A checkpoint inside a match unit hangs below the unit's node as a
leaf of its own, named by its length and the digest of those last tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from perilune.serve.cache.chain import Chain

DEVICE, HOST = 0, 1
SPLITS = 16  # remembered depths at which requests left the paths below a checkpoint
QUARANTINED = "quarantined"  # kind of a node that is out of every chain's reach, with all below it


class Node:
    """One edge of the tree and the checkpoint at its end. `state` are the checkpoint's pages, None without one.

    splits: how deep recent requests that were served from here could have been, had there been states.
    """

    __slots__ = (
        "bucket",
        "children",
        "end",
        "ghosts",
        "keys",
        "kind",
        "number",
        "origin",
        "pages",
        "parent",
        "pins",
        "seen",
        "splits",
        "start",
        "state",
        "tail",
        "tails",
        "tier",
        "turn",
        "used",
    )

    def __init__(self, number: int, parent: Node | None, keys: list[Hashable], start: int, end: int) -> None:
        self.number = number
        self.parent = parent
        self.keys = keys
        self.start, self.end = start, end
        self.children: dict[Hashable, Node] = {}
        self.tails: dict[tuple[int, bytes], Node] = {}
        self.tail: tuple[int, bytes] | None = None
        self.pages: list[int] = []
        self.state: list[int] | None = None
        self.tier = DEVICE
        self.pins = 0
        self.kind = ""
        self.origin = "prefill"
        self.used = self.seen = 0.0
        self.turn = 0
        self.bucket = -1
        self.ghosts: list[Any] = []
        self.splits: deque[int] = deque(maxlen=SPLITS)

    def below(self) -> Iterator[Node]:
        yield from self.children.values()
        yield from self.tails.values()

    @property
    def degree(self) -> int:
        return len(self.children) + len(self.tails)

    def base(self) -> Node:
        """The nearest node above with a checkpoint; the root if there is none."""
        node = self.parent
        assert node is not None
        while node.state is None and node.parent is not None:
            node = node.parent
        return node


@dataclass(frozen=True)
class Match:
    """depth: tokens whose state and KV are there; node: where. kv_depth: tokens whose KV is there, >= depth."""

    depth: int
    node: Node | None
    kv_depth: int


class Tree:
    """Nodes and the two operations that change edges, split and merge. Pages are not touched except by those."""

    def __init__(self, unit: int, page_tokens: int) -> None:
        self.unit = unit
        self.page_tokens = page_tokens
        self._numbers = count()
        self.root = Node(next(self._numbers), None, [], 0, 0)

    def nodes(self) -> Iterator[Node]:
        """All nodes without the root, parents first."""
        return islice(subtree(self.root), 1, None)

    def match(self, chain: Chain, limit: int, tier: int = HOST) -> Match:
        """The deepest checkpoint of at most `limit` tokens on the chain's path, in tiers up to `tier`."""
        node, best, best_depth = self.root, None, 0
        keys, i = chain.keys, 0
        while True:
            if node.tails and node.tier <= tier:
                for (length, digest), leaf in node.tails.items():
                    end = node.end + length
                    known = best_depth < end <= min(limit, chain.length) and leaf.tier <= tier
                    if known and chain.tokens is not None and chain.tail(end) == digest:
                        best, best_depth = leaf, end
            child = node.children.get(keys[i]) if i < len(keys) else None
            if child is None or child.tier > tier:
                break
            same = len(child.keys)
            if keys[i : i + same] != child.keys:
                same = common(keys[i : i + same], child.keys)
                i += same
                break
            node, i = child, i + same
            if node.state is not None and best_depth < node.end <= limit:
                best, best_depth = node, node.end
        return Match(best_depth, best, max(best_depth, min(i * self.unit, limit)))

    def split(self, node: Node, units: int) -> tuple[Node, int | None]:
        """Cut a node's edge after `units` units. The node keeps its end, state and pins; a new node gets the rest.

        Returns the upper node and the page that both hold now, if the cut is inside a page.
        """
        assert 0 < units < len(node.keys)
        assert node.parent is not None
        upper = self.add(node.parent, node.keys[:units])
        upper.tier, upper.used, upper.seen, upper.turn = node.tier, node.used, node.seen, node.turn
        node.keys, node.parent, node.start = node.keys[units:], upper, upper.end
        upper.children[node.keys[0]] = node
        whole = upper.end // self.page_tokens - upper.start // self.page_tokens
        inside = upper.end % self.page_tokens != 0
        upper.pages, node.pages = node.pages[: whole + inside], node.pages[whole:]
        return upper, (node.pages[0] if inside else None)

    def merge(self, node: Node) -> int | None:
        """Join a stateless node with its only child, which survives. Returns a page that has one holder too many."""
        (child,) = node.children.values()
        # Both have the page of a cut inside a page; the child's holds the rows of both, whether shared or its own copy.
        spare = node.pages.pop() if node.end % self.page_tokens else None
        child.pages = node.pages + child.pages
        child.keys, child.start = node.keys + child.keys, node.start
        assert node.parent is not None
        child.parent = node.parent
        node.parent.children[child.keys[0]] = child
        node.parent, node.pages = None, []
        return spare

    def add(self, parent: Node, keys: list[Hashable]) -> Node:
        node = Node(next(self._numbers), parent, keys, parent.end, parent.end + len(keys) * self.unit)
        parent.children[keys[0]] = node
        return node

    def add_tail(self, parent: Node, length: int, digest: bytes) -> Node:
        node = Node(next(self._numbers), parent, [], parent.end, parent.end + length)
        node.tail = (length, digest)
        parent.tails[node.tail] = node
        return node

    def rename(self, node: Node) -> None:
        """Give a node a name that no chain has; it keeps its place."""
        parent = node.parent
        assert parent is not None
        if node.tail is not None:
            del parent.tails[node.tail]
            node.tail = node.tail[0], f"{QUARANTINED} {node.number}".encode()
            parent.tails[node.tail] = node
        else:
            del parent.children[node.keys[0]]
            node.keys[0] = QUARANTINED, node.number
            parent.children[node.keys[0]] = node

    def detach(self, node: Node) -> None:
        """Take a node without anything below it out of the tree."""
        assert node.parent is not None
        assert not node.degree
        if node.tail is not None:
            del node.parent.tails[node.tail]
        else:
            del node.parent.children[node.keys[0]]
        node.parent = None


def path(node: Node | None) -> list[Node]:
    """The nodes from below the root down to `node`."""
    nodes = []
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def subtree(node: Node) -> Iterator[Node]:
    """A node and all below it, parents first."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.below())


def common(left: object, right: object) -> int:
    """Length of the common prefix of two sequences."""
    same = 0
    for a, b in zip(left, right, strict=False):  # type: ignore[call-overload]
        if a != b:
            break
        same += 1
    return same


__all__ = ["DEVICE", "HOST", "QUARANTINED", "Match", "Node", "Tree", "path", "subtree"]
