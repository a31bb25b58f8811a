"""Softmax attention as MLA needs it: wide keys and narrow values over packed sequences, and paged latent rows."""

from perilune.ops.mla.exact import attention_exact
from perilune.ops.mla.merge import merge
from perilune.ops.mla.paged import append_rows_inplace, choose_split, gather_rows, paged_attention
from perilune.ops.mla.prefix import prefix_attention
from perilune.ops.mla.varlen import attention

__all__ = [
    "append_rows_inplace",
    "attention",
    "attention_exact",
    "choose_split",
    "gather_rows",
    "merge",
    "paged_attention",
    "prefix_attention",
]
