"""Short causal depthwise convolution on packed sequences."""

from perilune.ops.conv.reference import WIDTH, short_conv

__all__ = ["WIDTH", "short_conv"]
