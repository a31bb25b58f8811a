"""Choices of experts counted; ids that one rank gets wrong are refused on all together, so that none waits for another.

Legend: E experts, T tokens, J choices a token, C chunks of choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perilune.errors import Error
from perilune.parallel.expert.plan import count


@dataclass(frozen=True)
class Counted:
    """ids_TJ that can be planned; counts_E int64 of those in 0 .. E - 1; refused int64 [1], not 0 where the ids are not
    the ones given or some are out of range; earlier_CE: what kernels counted on the way, and need again."""

    ids_TJ: torch.Tensor
    counts_E: torch.Tensor
    refused: torch.Tensor
    earlier_CE: torch.Tensor | None


def count_ids(ids_TJ: torch.Tensor, experts: int, top_k: int, tokens: int) -> Counted:
    """Ids fit as int64 [T, top_k] in -1 .. experts - 1, of at most `tokens` tokens. Nothing is read back."""
    misfit = _misfit(ids_TJ, top_k, tokens) is not None
    if misfit:
        ids_TJ = ids_TJ.new_empty(0, top_k, dtype=torch.int64)
    if by_kernels(ids_TJ):
        from perilune.parallel.expert.rows_triton import count_choices

        # Counts, and the flag that ids out of range raise; the kernels leave those out.
        both_E1 = ids_TJ.new_zeros(experts + 1)
        counts_E, flag = both_E1[:experts], both_E1[experts:]
        _, earlier_CE = count_choices(ids_TJ, experts, flag, counts_E)
        return Counted(ids_TJ, counts_E, flag.fill_(1) if misfit else flag, earlier_CE)
    wrong_TJ = (ids_TJ < -1) | (ids_TJ >= experts)
    ids_TJ = ids_TJ.masked_fill(wrong_TJ, -1)
    refused = ids_TJ.new_ones(1) if misfit else wrong_TJ.sum().view(1)
    return Counted(ids_TJ, count(ids_TJ, experts), refused, None)


def by_kernels(x: torch.Tensor) -> bool:
    """Whether what belongs to x is done by Triton kernels."""
    return x.device.type == "cuda"


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


__all__ = ["Counted", "by_kernels", "count_ids", "raise_refusal"]
