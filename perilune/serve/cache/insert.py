"""What a request wrote enters the tree: its path where it is missing, its checkpoints, and the older ones go."""

from __future__ import annotations

from collections.abc import Sequence

from perilune.serve.cache.lease import Lease, Stage
from perilune.serve.cache.tiers import Tiers, drop_state, split
from perilune.serve.cache.tree import DEVICE, HOST, QUARANTINED, Node


def publish(tiers: Tiers, lease: Lease, stage: Stage, taken: set[int], keep: int, now: float) -> None:
    """Put the stage's marks into the tree. taken: its pages that somebody else holds too; grows by what went in.

    keep: checkpoints that stay on a path without forks, 0 for all.
    """
    last: Node | None = None
    bad = lease.node is not None and lease.node.kind == QUARANTINED
    for mark, state in zip(stage.marks, stage.states, strict=True):
        node = None if bad else _insert(tiers, stage, mark.depth, taken, now)
        if node is None:
            tiers.arenas[DEVICE].free(state)
            continue
        last = node
        if node.state is None:
            node.state = state
            node.kind, node.origin, node.turn, node.used, node.seen = mark.kind, mark.origin, stage.turn, now, now
            node.bucket = -1
        else:
            tiers.arenas[DEVICE].free(state)
    if last is not None and keep:
        _supersede(tiers, last, keep)


def _insert(tiers: Tiers, stage: Stage, depth: int, taken: set[int], now: float) -> Node | None:
    """The node that ends at `depth` on the stage's path, made from the stage's pages where it is missing.

    None where a host copy of the path is just being fetched: that one stays.
    """
    unit, keys = tiers.geometry.match_unit, stage.chain.keys
    node, i, end = tiers.tree.root, 0, depth // unit
    while i < end:
        child = node.children.get(keys[i])
        if child is None:
            child = tiers.tree.add(node, list(keys[i:end]))
            _fill(tiers, child, stage, taken, now)
        else:
            if child.tier == HOST and child.pins:
                return None
            same = _common(child.keys, keys, i, end)
            if same < len(child.keys):
                child = split(tiers, child, same)
            if child.tier == HOST:
                _replace(tiers, child, stage, taken, now)
        node, i = child, i + len(child.keys)
    length = depth - end * unit
    if length:
        tail = (length, stage.chain.tail(depth))
        if tail not in node.tails:
            _fill(tiers, tiers.tree.add_tail(node, *tail), stage, taken, now)
        elif node.tails[tail].tier == HOST:
            if node.tails[tail].pins:
                return None
            _replace(tiers, node.tails[tail], stage, taken, now)
        node = node.tails[tail]
    return node


def _fill(tiers: Tiers, node: Node, stage: Stage, taken: set[int], now: float) -> None:
    """Give a node the stage's pages of its edge."""
    size = tiers.geometry.page_tokens
    first = node.start // size - stage.start // size
    assert first >= 0
    assert node.start >= stage.start
    node.pages = stage.pages[first : first + tiers.geometry.kv_pages(node.start, node.end)]
    for page in node.pages:
        if page in taken:  # across a cut, or a page that its request goes on writing
            tiers.arenas[DEVICE].share(page)
    taken.update(node.pages)
    node.used = node.seen = now
    node.tier = DEVICE
    tiers.nodes[DEVICE][node] = None


def _replace(tiers: Tiers, node: Node, stage: Stage, taken: set[int], now: float) -> None:
    """A host node was computed again: its KV is the stage's from now on; a host state would have no KV there."""
    tiers.arenas[HOST].free(node.pages + (node.state or []))
    del tiers.nodes[HOST][node]
    node.state = None
    _fill(tiers, node, stage, taken, now)


def _supersede(tiers: Tiers, node: Node, keep: int) -> None:
    """Keep the last few checkpoints of a path without forks."""
    kept, above = 1, node.parent
    while above is not None and above.parent is not None and above.degree == 1:
        following = above.parent
        if above.state is not None and above.kind != "mark":
            kept += 1
            if kept > keep and not above.pins:
                drop_state(tiers, above)
        above = following


def _common(edge: Sequence[object], keys: Sequence[object], i: int, end: int) -> int:
    """How many units of an edge follow keys[i:end]; at least the first one does."""
    size = min(len(edge), end - i)
    if list(edge[:size]) == list(keys[i : i + size]):
        return size
    same = 1
    while edge[same] == keys[i + same]:
        same += 1
    return same


__all__ = ["publish"]
