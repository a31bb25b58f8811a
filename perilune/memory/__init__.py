"""The activation manager: what is kept, recomputed, compressed or moved between the passes, said tensor by tensor."""

from perilune.memory.manager import Memory, Row
from perilune.memory.plan import PRESETS, Placement, Plan, Rule, load_plan
from perilune.memory.stores import FileStore, MemoryStore, Store

__all__ = ["PRESETS", "FileStore", "Memory", "MemoryStore", "Placement", "Plan", "Row", "Rule", "Store", "load_plan"]
