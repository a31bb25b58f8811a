"""What must hold in a prefix cache at every idle point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from perilune.serve.cache.cache import PrefixCache
from perilune.serve.cache.tree import DEVICE, HOST, Node


def check_integrity(cache: PrefixCache) -> None:
    """Recount every page, pin and edge. Raises AssertionError; a failure is a bug of the cache, never a bad request."""
    held: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    pins: Counter[Node] = Counter()
    for lease in cache._leases.values():
        pins.update(lease.nodes)
        for _, pages, state in lease.moving:
            held[DEVICE].update(pages + state)
        for stage in lease.stages:
            held[DEVICE].update(stage.pages)
            held[DEVICE].update(page for state in stage.states for page in state)
    nodes = list(cache.tree.nodes())
    for node in nodes:
        _check_node(cache, node)
        assert node.pins == pins[node], f"node {node.number} has {node.pins} pins, leases hold {pins[node]}"
        held[node.tier].update(node.pages + (node.state or []))
    for tier in (DEVICE, HOST):
        arena = cache.arenas[tier]
        assert set(cache.nodes[tier]) == {node for node in nodes if node.tier == tier}, f"tier {tier} lost a node"
        _check_pages((arena.holders(page) for page in range(arena.capacity)), held[tier], arena.free_pages, tier)


def _check_node(cache: PrefixCache, node: Node) -> None:
    geometry, parent = cache.geometry, node.parent
    assert parent is not None
    assert node.start == parent.end < node.end
    assert len(node.pages) == geometry.kv_pages(node.start, node.end), f"node {node.number} has a wrong number of pages"
    assert node.state is None or len(node.state) == geometry.state_pages
    assert parent.tier <= node.tier or parent.parent is None, f"node {node.number} is above its parent's tier"
    if node.tail is None:
        assert node.end - node.start == len(node.keys) * geometry.match_unit
        assert parent.children[node.keys[0]] is node
    else:
        assert parent.tails[node.tail] is node
        assert not node.degree
        assert 0 < node.tail[0] < geometry.match_unit
    assert node.degree or node.state is not None or node.pins, f"node {node.number} holds KV that serves nobody"


def _check_pages(holders: Iterable[int], held: Counter[int], free: int, tier: int) -> None:
    empty = 0
    for page, count in enumerate(holders):
        assert count == held[page], f"page {page} of tier {tier} has {count} holders, {held[page]} are known"
        empty += count == 0
    assert empty == free, f"tier {tier} lists {free} free pages, {empty} have no holder"


__all__ = ["check_integrity"]
