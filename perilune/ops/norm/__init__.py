"""Normalisations over the last dimension."""

from perilune.ops.norm.reference import gated_rms_norm, l2_norm, rms_norm

__all__ = ["gated_rms_norm", "l2_norm", "rms_norm"]
