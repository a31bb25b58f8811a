"""Causal attention over packed sequences, as MLA needs it (wide keys, narrow values)."""

from perilune.ops.mla.exact import attention_exact
from perilune.ops.mla.reference import attention

__all__ = ["attention", "attention_exact"]
