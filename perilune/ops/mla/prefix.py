"""Chunked prefill: new tokens attend to a paged prefix and to themselves, with bounded memory.

The prefix is read in pieces at multiples of `piece` of its absolute position; each piece is expanded to keys and
values, attended to without a mask, and merged by log-sum-exp in order; the causal part among the new tokens comes last.

Legend: T new tokens, N sequences, H heads, Q query/key width, V value width, L latent row width, P pages, S tokens a
page, M table width, R rows of one piece.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from perilune.errors import Error
from perilune.ops.mla.merge import merge
from perilune.ops.mla.paged import gather_rows
from perilune.ops.mla.varlen import attention
from perilune.ops.sequences import Sequences

Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@torch.no_grad()
def prefix_attention(
    q_THQ: torch.Tensor,
    k_THQ: torch.Tensor,
    v_THV: torch.Tensor,
    sequences: Sequences,
    pages_PSL: torch.Tensor,
    table_NM: torch.Tensor,
    expand: Expand,
    scale: float,
    *,
    piece: int = 8192,
    row_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o_THV, lse_TH) of new tokens over the cached tokens before them and over themselves; no gradient.

    k_THQ, v_THV: keys and values of the new tokens (their rows may or may not be in the pages yet: positions from
    sequences.starts on are not read). sequences.starts: cached tokens before the new ones. expand: rows_RL in q's
    dtype -> (k_RHQ, v_RHV), the model's kv_b. At most N * piece rows are expanded at a time.
    Level: bitwise-batch wherever `attention` and `expand` are. Raises Error for a piece below 1 and what `attention`
    and `gather_rows` refuse.
    """
    if piece < 1:
        raise Error(f"prefix_attention: piece is {piece}; must be >= 1")
    o_THV, lse_TH = None, None
    for start in range(0, max(sequences.starts, default=0), piece):
        lengths = [
            min(max(cached - start, 0), piece) if new else 0
            for cached, new in zip(sequences.starts, sequences.lengths, strict=True)
        ]
        keys = Sequences.from_lengths(lengths, [start] * len(lengths), device=sequences.device)
        if not keys.total:
            continue
        k_RHQ, v_RHV = expand(gather_rows(pages_PSL, table_NM, keys, q_THQ.dtype, row_scale=row_scale))
        part = attention(q_THQ, k_RHQ, v_RHV, sequences, keys, scale, causal=False)[:2]
        o_THV, lse_TH = part if o_THV is None or lse_TH is None else merge(o_THV, lse_TH, *part)
    part = attention(q_THQ, k_THQ, v_THV, sequences, sequences, scale)[:2]
    return part if o_THV is None or lse_TH is None else merge(o_THV, lse_TH, *part)


__all__ = ["Expand", "prefix_attention"]
