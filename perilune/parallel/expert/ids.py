"""Ids of experts that one rank gets wrong are refused on all ranks together, so that none waits for another.

Legend: E experts, T tokens, J choices a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from perilune.errors import Error


def check_ids(ids_TJ: torch.Tensor, experts: int, top_k: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids that can be planned, int64 [1] that is not 0 where these are not the ones given).

    Ids fit as int64 [T, top_k] in -1 .. experts - 1, of at most `tokens` tokens. Nothing is read back.
    """
    if _misfit(ids_TJ, top_k, tokens):
        return ids_TJ.new_empty(0, top_k, dtype=torch.int64), ids_TJ.new_ones(1, dtype=torch.int64)
    wrong_TJ = (ids_TJ < -1) | (ids_TJ >= experts)
    return ids_TJ.masked_fill(wrong_TJ, -1), wrong_TJ.sum().view(1)


def raise_refusal(
    ids: Sequence[torch.Tensor], held: Sequence[int], refused: Sequence[bool], experts: int, top_k: int, tokens: int
) -> None:
    """Raise Error where any rank's ids were refused. ids: of the ranks `held` here; refused: of all ranks."""
    for rank, ids_TJ in zip(held, ids, strict=True):
        if refused[rank]:
            misfit = _misfit(ids_TJ, top_k, tokens)
            raise Error(
                misfit or f"plan: ids lie in {int(ids_TJ.min())}..{int(ids_TJ.max())}; must be in -1..{experts - 1}"
            )
    if any(refused):
        raise Error(f"plan: rank {list(refused).index(True)} refused its ids; its own message says why")


def _misfit(ids_TJ: torch.Tensor, top_k: int, tokens: int) -> str | None:
    if ids_TJ.dim() != 2 or ids_TJ.shape[1] != top_k or ids_TJ.dtype != torch.int64:
        return f"plan: ids are {ids_TJ.dtype} {tuple(ids_TJ.shape)}; must be int64 [tokens, {top_k}]"
    if ids_TJ.shape[0] > tokens:
        return f"plan: {ids_TJ.shape[0]} tokens on a rank; the buffers are made for tokens = {tokens}"
    return None


__all__ = ["check_ids", "raise_refusal"]
