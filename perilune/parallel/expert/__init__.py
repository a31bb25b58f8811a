"""Balanced expert parallelism: every rank computes the same number of rows, over any fabric."""

from perilune.parallel.expert.layer import BalancedExperts, balanced_experts
from perilune.parallel.expert.plan import Plan, destinations, plan
from perilune.parallel.expert.planner import RULES, Allocation, plan_reference
from perilune.parallel.expert.planner_torch import plan_torch
from perilune.parallel.expert.policy import Policy, budget, exact, off, one_donor, tolerant
from perilune.parallel.expert.slots import Copies, SlotPool
from perilune.parallel.expert.stats import Stats
from perilune.parallel.expert.steps import ExpertParallel, Planned, Route
from perilune.parallel.expert.transport import Collective, Local, Transport

__all__ = [
    "RULES",
    "Allocation",
    "BalancedExperts",
    "Collective",
    "Copies",
    "ExpertParallel",
    "Local",
    "Plan",
    "Planned",
    "Policy",
    "Route",
    "SlotPool",
    "Stats",
    "Transport",
    "balanced_experts",
    "budget",
    "destinations",
    "exact",
    "off",
    "one_donor",
    "plan",
    "plan_reference",
    "plan_torch",
    "tolerant",
]
