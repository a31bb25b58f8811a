"""Mixture of experts: routing, row order, experts, combination, and the balance statistics."""

from perilune.ops.moe.balance import expert_load, histogram_bias, quantile_bias, threshold_histogram
from perilune.ops.moe.grouped import Dense, Packed, experts
from perilune.ops.moe.reference import Routing, combine, dispatch, permute, route

__all__ = [
    "Dense",
    "Packed",
    "Routing",
    "combine",
    "dispatch",
    "expert_load",
    "experts",
    "histogram_bias",
    "permute",
    "quantile_bias",
    "route",
    "threshold_histogram",
]
