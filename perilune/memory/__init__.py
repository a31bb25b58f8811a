"""The activation manager: what is kept, recomputed, compressed or moved between the passes, said tensor by tensor."""

from perilune.memory.files import FileStore
from perilune.memory.gradients import HostGradients
from perilune.memory.lending import Lending, Loan
from perilune.memory.manager import Memory
from perilune.memory.optimizer import States
from perilune.memory.peer import PeerStore
from perilune.memory.plan import PRESETS, Placement, Plan, Rule, load_plan
from perilune.memory.reference import borrow
from perilune.memory.rows import Row
from perilune.memory.stores import MemoryStore, Store

__all__ = [
    "PRESETS",
    "FileStore",
    "HostGradients",
    "Lending",
    "Loan",
    "Memory",
    "MemoryStore",
    "PeerStore",
    "Placement",
    "Plan",
    "Row",
    "Rule",
    "States",
    "Store",
    "borrow",
    "load_plan",
]
