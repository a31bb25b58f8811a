"""What must not be served any more, as after NaN: unmatchable at once, gone when the last lease ends.

What a request computes from a quarantined hit is not published either (`insert.publish`).
"""

from __future__ import annotations

from perilune.serve.cache.chain import Chain
from perilune.serve.cache.tiers import Tiers, drop_state, remove, tidy
from perilune.serve.cache.tree import QUARANTINED, Node, common, subtree


def quarantine(tiers: Tiers, chain: Chain, depth: int) -> int:
    """Take everything on the chain's path deeper than `depth` out of reach. Returns how many nodes that were."""
    tops = _tops(tiers.tree.root, chain, depth)
    found = [below for top in tops for below in subtree(top)]
    for top in tops:
        # Under a name that no chain has: whoever computes these tokens again gets a path of its own.
        tiers.tree.rename(top)
    for below in found[::-1]:
        if below.parent is not None:  # not gone already with what hung below it
            below.kind = QUARANTINED
            bury(tiers, below)
    return len(found)


def _tops(node: Node, chain: Chain, depth: int) -> list[Node]:
    """The first nodes on the chain's path from `node` on that end deeper than `depth`.

    Checkpoints inside a unit count wherever their node is on the path: they may share the unit's first tokens.
    """
    i = 0
    while True:
        tops = [tail for tail in node.tails.values() if tail.end > depth]
        child = node.children.get(chain.keys[i]) if i < len(chain.keys) else None
        if child is None:
            return tops
        same = common(chain.keys[i : i + len(child.keys)], child.keys)
        if child.start + same * chain.unit > depth:
            return [*tops, child]
        if same < len(child.keys):
            return tops
        node, i = child, i + same


def bury(tiers: Tiers, node: Node) -> None:
    """Drop what a quarantined node holds as soon as nobody leases it."""
    if not node.pins and node.state is not None:
        drop_state(tiers, node)
    elif not node.pins and not node.degree and node.parent is not None:
        above = node.parent
        remove(tiers, node)
        tidy(tiers, above)


__all__ = ["bury", "quarantine"]
