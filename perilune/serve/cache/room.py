"""Pages of a tier, made free if need be: segments leave in the order of eviction, from the device to the host.

Allocation, eviction and write-back call one another, because what leaves the device needs pages on the host.
"""

from __future__ import annotations

from perilune.serve.cache.eviction import Victims
from perilune.serve.cache.tiers import Copy, Tiers, drop_state, remove, set_tier, tidy
from perilune.serve.cache.tree import DEVICE, HOST, Node, subtree

REORDER = 16  # acquisitions between two orders of eviction


def allocate(tiers: Tiers, tier: int, count: int, now: float) -> list[int] | None:
    """`count` pages, at the expense of what nobody leases; None where even that is too little."""
    arena = tiers.arenas[tier]
    if arena.free_pages < count:
        if count > arena.capacity:
            return None
        while arena.free_pages < count:
            victims = _victims(tiers, tier, now)
            found = next(victims, None)
            if found is None and victims.fresh:
                return None
            if found is None:
                tiers.orders[tier] = None
                continue
            victims.fresh = False
            tiers.eviction.evicted(*found, _frees)
            _evict(tiers, found[0], tier, now, victims)
    return arena.allocate(count)


def _victims(tiers: Tiers, tier: int, now: float) -> Victims:
    """The order of eviction of a tier, made anew every few requests."""
    victims = tiers.orders[tier]
    if victims is None or victims.made + REORDER <= tiers.acquired:
        candidates = [node for node in tiers.nodes[tier] if _candidate(node, tier)]
        victims = tiers.eviction.order(candidates, now, _frees, lambda node: _candidate(node, tier))
        victims.made = tiers.acquired
        tiers.orders[tier] = victims
    victims.now = now
    return victims


def _candidate(node: Node, tier: int) -> bool:
    held = node.tier != tier or node.pins or node.parent is None
    return not held and (node.state is not None or _last(node))


def _last(node: Node) -> bool:
    """Whether nothing below the node is on its tier or a faster one."""
    return all(below.tier > node.tier for below in node.below())


def _frees(node: Node) -> int:
    """Pages that the eviction of a node frees: its state, and for a last node the KV that only it needs."""
    pages = len(node.state or ())
    if _last(node):
        pages += len(node.pages)
        above = node.parent
        while above is not None and above.parent is not None and above.state is None and above.degree == 1:
            pages += len(above.pages)
            above = above.parent
    return pages


def _evict(tiers: Tiers, node: Node, tier: int, now: float, victims: Victims) -> None:
    """Let a segment go: an inner checkpoint alone, a last one with the KV above it that served it alone."""
    if not _last(node):
        drop_state(tiers, node)
        return
    while True:
        parent = node.parent
        assert parent is not None
        worth = tier == DEVICE and tiers.arenas[HOST].capacity > 0 and (node.state is not None or node.degree > 0)
        if not (worth and _write_back(tiers, node, now)):
            for below in [*subtree(node)][::-1]:
                remove(tiers, below)
        if parent.parent is None:
            return
        if parent.state is not None or parent.pins or not _last(parent):
            break
        node = parent  # KV without a state behind it serves nobody
    if parent.state is not None:
        if _candidate(parent, tier):
            victims.add(parent)
    else:
        tidy(tiers, parent)


def _write_back(tiers: Tiers, node: Node, now: float) -> bool:
    """Move a device node to the host, KV and state together. False if the host has no room."""
    # Making room must not take what hangs below the node, nor join the node with its parent.
    held = [*subtree(node)] + ([node.parent] if node.parent is not None else [])
    for near in held:
        near.pins += 1
    pages = allocate(tiers, HOST, len(node.pages) + len(node.state or ()), now)
    for near in held:
        near.pins -= 1
    if pages is None:
        return False
    kv, state = pages[: len(node.pages)], pages[len(node.pages) :]
    try:
        tiers.copy(Copy(DEVICE, HOST, (node.pages, kv), (node.state or [], state)))
    except BaseException:
        tiers.arenas[HOST].free(pages)
        raise
    tiers.moved[0] += len(pages)
    tiers.arenas[DEVICE].free(node.pages + (node.state or []))
    node.pages, node.state = kv, state if node.state is not None else None
    set_tier(tiers, node, HOST)
    return True


__all__ = ["REORDER", "allocate"]
