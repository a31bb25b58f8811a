"""QK-clip: attention logits that grew too large are scaled back in the weights that made them.

Source: Kimi K2 technical report, MuonClip. Legend: H heads, N nope key dims, R rope key dims, V value dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from perilune.config import MlaConfig


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


def peaks(logits: Mapping[int, Tensor]) -> dict[int, float]:
    """The largest logit of each layer, in one read of the device."""
    if not logits:
        return {}
    return dict(zip(logits, torch.stack([max_logit_H.max() for max_logit_H in logits.values()]).tolist(), strict=True))


def clip_heads(
    logits: Mapping[int, Tensor],
    highest: Mapping[int, float],
    limit: float,
    mla: MlaConfig,
    params: Mapping[str, Tensor],
    scale_rows: Callable[[str, Tensor, Tensor], None],
) -> int:
    """QK-clip of MLA layers; returns how many heads were scaled. limit 0: none.

    logits: layer -> largest logit of each head [H] in the step; highest: their `peaks`. scale_rows(name, what this
    rank has of a parameter, factors of the rows of the whole).
    """
    heads = 0
    for layer, max_logit_H in logits.items() if limit else ():
        if highest[layer] <= limit:
            continue
        names = (f"layers.{layer}.attn.{name}.weight" for name in ("q_b_proj", "q_proj"))
        query = next(name for name in names if name in params)
        key_value = f"layers.{layer}.attn.kv_b_proj.weight"
        factor_H, *factors = row_factors(max_logit_H, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim, limit)
        for name, factor_R in zip((query, key_value), factors, strict=True):
            scale_rows(name, params[name], factor_R)
        heads += int((factor_H < 1).sum())
    return heads


__all__ = ["clip_heads", "peaks", "qk_clip", "row_factors"]
