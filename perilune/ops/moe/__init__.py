"""Mixture of experts: routing, row order, experts, combination, and the balance statistics."""

from perilune.ops.moe.balance import expert_load, histogram_bias, quantile_bias, threshold_histogram
from perilune.ops.moe.grouped import (
    Dense,
    Halfway,
    Packed,
    Save,
    begin_backward,
    experts,
    experts_backward,
    gate_up_product,
    implementation,
    row_gradients,
    weight_gradients,
)
from perilune.ops.moe.project import project
from perilune.ops.moe.reference import Routing
from perilune.ops.moe.routing import combine, dispatch, permute, route

__all__ = [
    "Dense",
    "Halfway",
    "Packed",
    "Routing",
    "Save",
    "begin_backward",
    "combine",
    "dispatch",
    "expert_load",
    "experts",
    "experts_backward",
    "gate_up_product",
    "histogram_bias",
    "implementation",
    "permute",
    "project",
    "quantile_bias",
    "route",
    "row_gradients",
    "threshold_histogram",
    "weight_gradients",
]
