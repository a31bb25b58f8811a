"""Attention over two sets of keys from attention over each: softmax weights add up after a common shift.

Legend: T query tokens, H heads, V value width.
"""

from __future__ import annotations

import torch

from perilune.errors import Error


def merge(
    o1_THV: torch.Tensor, lse1_TH: torch.Tensor, o2_THV: torch.Tensor, lse2_TH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o_THV, lse_TH) over the union of two disjoint sets of keys; o in o1's dtype, lse in lse1's.

    A part with lse = -inf saw no key and adds nothing, whatever its o holds; two such parts give 0 and -inf.
    Differentiable in all four. Raises Error when the shapes differ. The order matters to the last bit: merge parts in
    the order of their keys where bits are compared.
    """
    if o1_THV.shape != o2_THV.shape or lse1_TH.shape != lse2_TH.shape or o1_THV.shape[:-1] != lse1_TH.shape:
        raise Error(
            f"merge: o1 {tuple(o1_THV.shape)}, o2 {tuple(o2_THV.shape)}, lse1 {tuple(lse1_TH.shape)}, lse2 "
            f"{tuple(lse2_TH.shape)}; o must be equal and lse must be o without its last dim"
        )
    lse_TH = torch.logaddexp(lse1_TH, lse2_TH)
    o_THV = torch.zeros_like(o1_THV, dtype=lse_TH.dtype)
    for part_THV, part_TH in ((o1_THV, lse1_TH), (o2_THV, lse2_TH)):
        seen_TH = part_TH != float("-inf")
        share_TH = torch.where(seen_TH, part_TH - torch.where(seen_TH, lse_TH, 0.0), float("-inf")).exp()
        o_THV = o_THV + torch.where(seen_TH[..., None], part_THV.to(lse_TH.dtype), 0.0) * share_TH[..., None]
    return o_THV.to(o1_THV.dtype), lse_TH


__all__ = ["merge"]
