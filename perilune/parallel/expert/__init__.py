"""Balanced expert parallelism: every rank computes the same number of rows, over any fabric."""

from typing import TYPE_CHECKING, Any

from perilune.parallel.expert.layer import BalancedExperts, balanced_experts
from perilune.parallel.expert.plan import Plan, destinations, plan
from perilune.parallel.expert.planner import RULES, Allocation, plan_reference
from perilune.parallel.expert.planner_torch import plan_torch
from perilune.parallel.expert.policy import Policy, budget, exact, off, one_donor, tolerant
from perilune.parallel.expert.routes import Route
from perilune.parallel.expert.slots import Copies, SlotPool
from perilune.parallel.expert.stats import Stats
from perilune.parallel.expert.steps import ExpertParallel, Planned
from perilune.parallel.expert.symmetric import Symmetric, Virtual
from perilune.parallel.expert.transport import Collective, Local, Transport
from perilune.parallel.expert.workspace import Workspace

if TYPE_CHECKING:
    from perilune.parallel.expert.direct import DirectParallel, DirectPlanned
    from perilune.parallel.expert.planner_triton import plan_triton

# These need triton, which machines without a GPU may not have.
_LATE = {
    "DirectParallel": "direct",
    "DirectPlanned": "direct",
    "plan_triton": "planner_triton",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)


__all__ = [
    "RULES",
    "Allocation",
    "BalancedExperts",
    "Collective",
    "Copies",
    "DirectParallel",
    "DirectPlanned",
    "ExpertParallel",
    "Local",
    "Plan",
    "Planned",
    "Policy",
    "Route",
    "SlotPool",
    "Stats",
    "Symmetric",
    "Transport",
    "Virtual",
    "Workspace",
    "balanced_experts",
    "budget",
    "destinations",
    "exact",
    "off",
    "one_donor",
    "plan",
    "plan_reference",
    "plan_torch",
    "plan_triton",
    "tolerant",
]
