"""What the tiers hold: the tree with its pages, and the changes of edges that take their pages along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perilune.serve.cache.arena import Arena
from perilune.serve.cache.eviction import Eviction, Victims
from perilune.serve.cache.geometry import Geometry
from perilune.serve.cache.tree import Node, Tree


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


class Tiers:
    """State alone. nodes: those of each tier; orders: of eviction, a tier; acquired: requests so far; moved: pages
    written back to the host and fetched from it. copy is called for every write-back.
    """

    def __init__(
        self,
        geometry: Geometry,
        device_bytes: int,
        host_bytes: int,
        eviction: Eviction,
        copy: Callable[[Copy], None],
    ) -> None:
        self.geometry = geometry
        self.eviction = eviction
        self.copy = copy
        self.tree = Tree(geometry.match_unit, geometry.page_tokens)
        self.arenas = (Arena(device_bytes // geometry.page_bytes), Arena(host_bytes // geometry.page_bytes))
        self.nodes: tuple[dict[Node, None], dict[Node, None]] = ({}, {})
        self.orders: list[Victims | None] = [None, None]
        self.acquired = 0
        self.moved = [0, 0]


def split(tiers: Tiers, node: Node, units: int) -> Node:
    """Cut a node's edge after `units` units; the new upper node."""
    upper, shared = tiers.tree.split(node, units)
    if shared is not None:
        tiers.arenas[node.tier].share(shared)
    tiers.nodes[upper.tier][upper] = None
    return upper


def drop_state(tiers: Tiers, node: Node) -> None:
    assert node.state is not None
    assert not node.pins
    tiers.arenas[node.tier].free(node.state)
    node.state = None
    tidy(tiers, node)


def remove(tiers: Tiers, node: Node) -> None:
    """Take a node with nothing below it out of the tree, and leave what is above it as it is."""
    assert not node.pins
    tiers.arenas[node.tier].free(node.pages + (node.state or []))
    del tiers.nodes[node.tier][node]
    node.state = None
    tiers.tree.detach(node)


def tidy(tiers: Tiers, node: Node) -> None:
    """Remove a stateless node that leads nowhere, and so on above it; join one that leads to one place only."""
    if node.parent is None or node.state is not None or node.pins:
        return
    if not node.degree:
        above = node.parent
        remove(tiers, node)
        tidy(tiers, above)
    elif node.degree == 1 and node.children:
        (child,) = node.children.values()
        if child.tier == node.tier:
            del tiers.nodes[node.tier][node]
            spare = tiers.tree.merge(node)
            if spare is not None:
                tiers.arenas[child.tier].free([spare])


def set_tier(tiers: Tiers, node: Node, tier: int) -> None:
    del tiers.nodes[node.tier][node]
    node.tier = tier
    tiers.nodes[tier][node] = None


__all__ = ["Copy", "Tiers", "drop_state", "remove", "set_tier", "split", "tidy"]
