"""QK-clip: attention logits that grew too large are scaled back in the weights that made them.

Source: Kimi K2 technical report, MuonClip. Legend: H heads, N nope key dims, R rope key dims, V value dims.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def qk_clip(query: Tensor, key_value: Tensor, max_logit_H: Tensor, nope: int, rope: int, limit: float) -> Tensor:
    """Scale in place the heads whose largest logit in the last step exceeded `limit`; returns the factors [H].

    query: [H*(N+R), *], each head's rows nope then rope; key_value: [H*(N+V), *], each head's rows key then value;
    max_logit_H: the exact largest scaled logit (scores times the softmax scale) of each head over the step.
    """
    value = key_value.shape[0] // max_logit_H.shape[0] - nope
    factor_H, query_rows, key_value_rows = row_factors(max_logit_H, nope, rope, value, limit)
    query.mul_(query_rows.to(query.dtype)[:, None])
    key_value.mul_(key_value_rows.to(key_value.dtype)[:, None])
    return factor_H


def row_factors(max_logit_H: Tensor, nope: int, rope: int, value: int, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """(factors of the heads [H], of the query's rows [H*(N+R)], of the key and value rows [H*(N+V)]), float64.

    The logit of a head is q_n.k_n + q_r.k_r. With f = min(1, limit / max), rows of q_n and k_n take sqrt(f) each; the
    rope key is shared by all heads, so q_r takes f alone. Values are left as they are.
    """
    logit_H = max_logit_H.to(torch.float64)
    factor_H = torch.where(logit_H > limit, limit / logit_H, torch.ones_like(logit_H))
    root_HN = factor_H.sqrt()[:, None].expand(-1, nope)
    query_HX = torch.cat((root_HN, factor_H[:, None].expand(-1, rope)), dim=1)
    key_value_HX = torch.cat((root_HN, torch.ones_like(factor_H)[:, None].expand(-1, value)), dim=1)
    return factor_H, query_HX.flatten(), key_value_HX.flatten()


__all__ = ["qk_clip", "row_factors"]
