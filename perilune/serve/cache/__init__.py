"""The hybrid prefix cache: one byte budget for KV pages and KDA states, checkpoints at any token, eviction by segment.

Pure Python: the engine and the simulator drive the same code, and neither torch nor a device is needed.
"""

from perilune.serve.cache.arena import Arena
from perilune.serve.cache.cache import Copy, Lease, PrefixCache, Stage
from perilune.serve.cache.chain import Chain
from perilune.serve.cache.eviction import Eviction
from perilune.serve.cache.geometry import Geometry
from perilune.serve.cache.integrity import check_integrity
from perilune.serve.cache.placement import Mark, Placement
from perilune.serve.cache.tree import DEVICE, HOST, Match, Node, Tree

__all__ = [
    "DEVICE",
    "HOST",
    "Arena",
    "Chain",
    "Copy",
    "Eviction",
    "Geometry",
    "Lease",
    "Mark",
    "Match",
    "Node",
    "Placement",
    "PrefixCache",
    "Stage",
    "Tree",
    "check_integrity",
]
