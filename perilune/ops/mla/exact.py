"""Causal attention whose bits do not depend on the batch: prefill, chunked prefill and decode give the same rows.

Keys are cut at multiples of 64 of their absolute position and the softmax runs online over these tiles in order;
query rows come in multiples of 16. So every row sees the same additions whatever else is in the call. Keys after
the query are masked, and add exact zeros when they share its tile.

Legend: T query tokens, S key tokens, H heads, Q query/key width, V value width.
"""

from __future__ import annotations

import torch

from perilune.ops.mla.reference import check_attention
from perilune.ops.sequences import Sequences

_KEY_TILE = 64
_ROW_TILE = 16
_WIDTH_TILE = 16


@torch.no_grad()
def attention_exact(
    q_THQ: torch.Tensor, k_SHQ: torch.Tensor, v_SHV: torch.Tensor, queries: Sequences, keys: Sequences, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Same arguments and results as `attention`, no gradient; level bitwise-batch on CPU in fp32 and fp64.

    keys.starts gives the absolute position of each sequence's first key.
    """
    check_attention("attention_exact", q_THQ, k_SHQ, v_SHV, queries, keys)
    o_THV = v_SHV.new_empty(q_THQ.shape[0], *v_SHV.shape[1:])
    wide = torch.float64 if q_THQ.dtype == torch.float64 else torch.float32
    lse_TH = torch.empty(q_THQ.shape[:2], dtype=wide, device=q_THQ.device)
    max_logit_H = torch.full(q_THQ.shape[1:2], float("-inf"), dtype=wide, device=q_THQ.device)
    for i in range(queries.count):
        if queries.lengths[i] == 0:
            continue
        rows = slice(queries.offsets[i], queries.offsets[i + 1])
        cols = slice(keys.offsets[i], keys.offsets[i + 1])
        o_HTV, lse_HT, m_HT = _one_sequence(
            _heads_first(q_THQ[rows], wide),
            _heads_first(k_SHQ[cols], wide),
            _heads_first(v_SHV[cols], wide),
            keys.starts[i],
            scale,
        )
        o_THV[rows] = o_HTV[..., : v_SHV.shape[-1]].transpose(0, 1).to(v_SHV.dtype)
        lse_TH[rows] = lse_HT.t()
        max_logit_H = torch.maximum(max_logit_H, m_HT.amax(-1))
    return o_THV, lse_TH, max_logit_H


def _one_sequence(
    q_HTQ: torch.Tensor, k_HSQ: torch.Tensor, v_HSV: torch.Tensor, key_start: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, length, _ = q_HTQ.shape
    first = key_start + k_HSQ.shape[1] - length  # absolute position of the first query
    q_HTQ = _pad_rows(q_HTQ, 0, -length % _ROW_TILE)
    position_T = torch.arange(first, first + q_HTQ.shape[1], device=q_HTQ.device)
    m_HT1 = q_HTQ.new_full((heads, q_HTQ.shape[1], 1), float("-inf"))
    z_HT1 = torch.zeros_like(m_HT1)
    o_HTV = q_HTQ.new_zeros(heads, q_HTQ.shape[1], v_HSV.shape[-1])
    for tile in range(key_start // _KEY_TILE * _KEY_TILE, first + length, _KEY_TILE):
        # Query rows before the tile see none of it: leave them out, in whole row tiles.
        skip = max(0, tile - first) // _ROW_TILE * _ROW_TILE
        start, end = max(tile, key_start), min(tile + _KEY_TILE, first + length)
        cols = slice(start - key_start, end - key_start)
        k_HCQ, v_HCV = (_pad_rows(x[:, cols], start - tile, tile + _KEY_TILE - end) for x in (k_HSQ, v_HSV))
        s_HTC = torch.bmm(q_HTQ[:, skip:].contiguous(), k_HCQ.transpose(1, 2)).mul_(scale)
        position_C = torch.arange(tile, tile + _KEY_TILE, device=q_HTQ.device)
        hidden_TC = (position_C > position_T[skip:].unsqueeze(-1)) | (position_C < key_start)
        s_HTC.masked_fill_(hidden_TC, float("-inf"))
        m_new = torch.maximum(m_HT1[:, skip:], s_HTC.amax(-1, keepdim=True))
        p_HTC = s_HTC.sub_(m_new).exp_()
        shrink_HT1 = (m_HT1[:, skip:] - m_new).exp_()
        z_HT1[:, skip:] = z_HT1[:, skip:] * shrink_HT1 + p_HTC.sum(-1, keepdim=True)
        o_HTV[:, skip:] = o_HTV[:, skip:] * shrink_HT1 + torch.bmm(p_HTC, v_HCV)
        m_HT1[:, skip:] = m_new
    o_HTV = o_HTV[:, :length] / z_HT1[:, :length]
    m_HT = m_HT1[:, :length, 0]
    return o_HTV, m_HT + z_HT1[:, :length, 0].log(), m_HT


def _heads_first(x_THW: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[H, T, W padded with zeros]: at odd widths some processors' products depend on the number of rows."""
    return torch.nn.functional.pad(x_THW.transpose(0, 1).to(dtype), (0, -x_THW.shape[-1] % _WIDTH_TILE))


def _pad_rows(x_HTW: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """Contiguous, with zero rows added on both sides."""
    return torch.nn.functional.pad(x_HTW, (0, 0, before, after)).contiguous()


__all__ = ["attention_exact"]
