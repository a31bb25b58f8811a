"""Attention residuals: a layer's input as a softmax mixture of earlier outputs."""

from perilune.ops.attnres.reference import mix

__all__ = ["mix"]
