"""Mixture of experts: routing, row order, experts, combination, and the balance statistics."""

from perilune.ops.moe.balance import expert_load, histogram_bias, quantile_bias, threshold_histogram
from perilune.ops.moe.grouped import Dense, Packed, Save, experts, experts_backward, implementation
from perilune.ops.moe.project import project
from perilune.ops.moe.reference import Routing
from perilune.ops.moe.routing import combine, dispatch, permute, route

__all__ = [
    "Dense",
    "Packed",
    "Routing",
    "Save",
    "combine",
    "dispatch",
    "expert_load",
    "experts",
    "experts_backward",
    "histogram_bias",
    "implementation",
    "permute",
    "project",
    "quantile_bias",
    "route",
    "threshold_histogram",
]
