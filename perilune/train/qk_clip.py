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
    The logit of a head is q_n.k_n + q_r.k_r. With f = min(1, limit / max), rows of q_n and k_n take sqrt(f) each; the
    rope key is shared by all heads, so q_r takes f alone. Values are left as they are.
    """
    heads = max_logit_H.shape[0]
    logit_H = max_logit_H.to(torch.float64)
    factor_H = torch.where(logit_H > limit, limit / logit_H, torch.ones_like(logit_H))
    query_HRX = query.view(heads, nope + rope, -1)
    key_HRX = key_value.view(heads, key_value.shape[0] // heads, -1)
    root_H11 = factor_H.sqrt().to(query.dtype)[:, None, None]
    query_HRX[:, :nope].mul_(root_H11)
    query_HRX[:, nope:].mul_(factor_H.to(query.dtype)[:, None, None])
    key_HRX[:, :nope].mul_(root_H11.to(key_value.dtype))
    return factor_H


__all__ = ["qk_clip"]
