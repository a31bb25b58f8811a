"""A hit on the host comes to the device: pages are reserved, the caller copies, and the nodes change their tier."""

from __future__ import annotations

from perilune.serve.cache.lease import Lease
from perilune.serve.cache.room import allocate
from perilune.serve.cache.tiers import Copy, Tiers, set_tier
from perilune.serve.cache.tree import DEVICE, HOST, Node


def fetch(tiers: Tiers, lease: Lease, nodes: list[Node], now: float) -> bool:
    """Reserve device pages for the host nodes of a lease's path, from the top down. False if there is no room."""
    size = sum(len(node.pages) + len(node.state or ()) for node in nodes)
    above = nodes[0].parent
    assert above is not None
    # The whole path stays as it is until the lease ends: its end on the device, and every node that moves.
    more = nodes[:-1] if above.parent is None else [above, *nodes[:-1]]
    for node in more:
        node.pins += 1
    lease.nodes = [*more, *lease.nodes]
    pages = allocate(tiers, DEVICE, size, now)
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
    tiers.moved[1] += size
    return True


def arrive(tiers: Tiers, lease: Lease) -> None:
    """The copies of a lease are done: its nodes are on the device."""
    moving, lease.moving, lease.copies, lease.ready = lease.moving, [], [], True
    for node, pages, state in moving:
        if node.tier == DEVICE:  # another request was faster
            tiers.arenas[DEVICE].free(pages + state)
            continue
        tiers.arenas[HOST].free(node.pages + (node.state or []))
        node.pages, node.state = pages, state if node.state is not None else None
        set_tier(tiers, node, DEVICE)


__all__ = ["arrive", "fetch"]
