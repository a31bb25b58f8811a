"""Causal softmax attention over packed sequences, with its own backward pass.

The queries of a sequence are the last tokens of its keys, so query t (counted in the sequence's queries) sees keys
0 .. (keys - queries) + t; without `causal` every query sees all keys of its sequence. Softmax and sums are in
max(fp32, dtype). The weights are made for 64 queries at a time and made again in the backward pass: memory grows with
T, never with T^2.

Legend: T query tokens, S key tokens, H heads, Q query/key width, V value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from perilune.errors import Error
from perilune.ops.checks import check_floats
from perilune.ops.precision import widen
from perilune.ops.sequences import Sequences

# 64 query rows against a few hundred keys stay in cache on a CPU.
_QUERY_BLOCK = 64
# Heads are processed in groups so that a block of weights has at most this many numbers.
_BLOCK_NUMBERS = 1 << 24


def attention(
    q_THQ: torch.Tensor,
    k_SHQ: torch.Tensor,
    v_SHV: torch.Tensor,
    queries: Sequences,
    keys: Sequences,
    scale: float,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops.mla.attention`."""
    check_attention("attention", q_THQ, k_SHQ, v_SHV, queries, keys, causal)
    o_THV, lse_TH, max_logit_H = _Attention.apply(q_THQ, k_SHQ, v_SHV, queries, keys, scale, causal)  # type: ignore[no-untyped-call]
    return o_THV, lse_TH, max_logit_H


def check_attention(
    op: str,
    q_THQ: torch.Tensor,
    k_SHQ: torch.Tensor,
    v_SHV: torch.Tensor,
    queries: Sequences,
    keys: Sequences,
    causal: bool = True,
) -> None:
    """Raise Error unless the tensors and the two cuts fit together."""
    for name, x in (("q_THQ", q_THQ), ("k_SHQ", k_SHQ), ("v_SHV", v_SHV)):
        if x.ndim != 3:
            raise Error(f"{op}: {name} has shape {tuple(x.shape)}; must have three dimensions: tokens, heads, width")
    check_floats(op, q_THQ=q_THQ, k_SHQ=k_SHQ, v_SHV=v_SHV)
    queries.check_total(f"{op}: q_THQ", q_THQ.shape[0])
    keys.check_total(f"{op}: k_SHQ", k_SHQ.shape[0])
    if q_THQ.shape[1:] != k_SHQ.shape[1:]:
        raise Error(f"{op}: q is [T, {', '.join(map(str, q_THQ.shape[1:]))}], k has {tuple(k_SHQ.shape[1:])} after S")
    if k_SHQ.shape[:2] != v_SHV.shape[:2]:
        raise Error(f"{op}: k has {tuple(k_SHQ.shape[:2])} tokens and heads, v {tuple(v_SHV.shape[:2])}; must be equal")
    if queries.count != keys.count:
        raise Error(f"{op}: {queries.count} sequences of queries but {keys.count} of keys; must be equal")
    for i, (n, s) in enumerate(zip(queries.lengths, keys.lengths, strict=True)):
        if causal and s < n:
            raise Error(f"{op}: keys.lengths[{i}] is {s}; must be >= queries.lengths[{i}] = {n}")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THQ: torch.Tensor,
        k_SHQ: torch.Tensor,
        v_SHV: torch.Tensor,
        queries: Sequences,
        keys: Sequences,
        scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_HTQ, k_HSQ, v_HSV = (widen(x).transpose(0, 1) for x in (q_THQ, k_SHQ, v_SHV))
        heads, tokens = q_HTQ.shape[:2]
        # 0 and -inf stay where a sequence has no key.
        o_THV = q_HTQ.new_zeros(tokens, heads, v_HSV.shape[-1])
        o_HTV = o_THV.transpose(0, 1)
        lse_HT = q_HTQ.new_full((heads, tokens), float("-inf"))
        max_logit_H = q_HTQ.new_full((heads,), float("-inf"))
        future = _future(q_HTQ.device) if causal else None
        for h, rows, cols in _blocks(queries, keys, heads, causal):
            s_HTS = _logits(q_HTQ[h, rows], k_HSQ[h, cols], scale, future)
            m_HT1 = s_HTS.amax(-1, keepdim=True)
            max_logit_H[h] = torch.maximum(max_logit_H[h], m_HT1.amax((1, 2)))
            p_HTS = s_HTS.sub_(m_HT1).exp_()
            z_HT1 = p_HTS.sum(-1, keepdim=True)
            torch.div(torch.bmm(p_HTS, v_HSV[h, cols]), z_HT1, out=o_HTV[h, rows])
            lse_HT[h, rows] = m_HT1.add_(z_HT1.log_()).squeeze(-1)
        lse_TH = lse_HT.t().contiguous()
        ctx.save_for_backward(q_THQ, k_SHQ, v_SHV, o_THV, lse_TH)
        ctx.queries, ctx.keys, ctx.scale, ctx.causal = queries, keys, scale, causal
        ctx.mark_non_differentiable(lse_TH, max_logit_H)
        return o_THV.to(v_SHV.dtype), lse_TH, max_logit_H

    @staticmethod
    def backward(ctx: Any, d_o_THV: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        q_THQ, k_SHQ, v_SHV, o_THV, lse_TH = ctx.saved_tensors
        q_HTQ, k_HSQ, v_HSV, d_o_HTV = (widen(x).transpose(0, 1) for x in (q_THQ, k_SHQ, v_SHV, d_o_THV))
        d_q_HTQ, d_k_HSQ, d_v_HSV = (x.new_zeros(x.shape) for x in (q_HTQ, k_HSQ, v_HSV))
        lse_HT1 = lse_TH.t().unsqueeze(-1)
        # delta = sum_V d_o o is what the softmax Jacobian takes off.
        delta_HT1 = (d_o_HTV * o_THV.transpose(0, 1)).sum(-1, keepdim=True)
        future = _future(q_HTQ.device) if ctx.causal else None
        for h, rows, cols in _blocks(ctx.queries, ctx.keys, q_HTQ.shape[0], ctx.causal):
            q, k, v, d_o = q_HTQ[h, rows], k_HSQ[h, cols], v_HSV[h, cols], d_o_HTV[h, rows]
            p_HTS = _logits(q, k, ctx.scale, future).sub_(lse_HT1[h, rows]).exp_()
            d_v_HSV[h, cols].baddbmm_(p_HTS.transpose(1, 2), d_o)
            d_s_HTS = torch.bmm(d_o, v.transpose(1, 2)).sub_(delta_HT1[h, rows]).mul_(p_HTS).mul_(ctx.scale)
            d_q_HTQ[h, rows] = torch.bmm(d_s_HTS, k)
            d_k_HSQ[h, cols].baddbmm_(d_s_HTS.transpose(1, 2), q)
        d_q, d_k, d_v = (x.transpose(0, 1) for x in (d_q_HTQ, d_k_HSQ, d_v_HSV))
        return d_q.to(q_THQ.dtype), d_k.to(k_SHQ.dtype), d_v.to(v_SHV.dtype), None, None, None, None


def _blocks(queries: Sequences, keys: Sequences, heads: int, causal: bool) -> Iterator[tuple[slice, slice, slice]]:
    """(heads, query rows, the keys that the last of these rows may see), covering all pairs."""
    for i, length in enumerate(queries.lengths):
        first_row, first_col = queries.offsets[i], keys.offsets[i]
        before = keys.lengths[i] - length
        for start in range(0, length, _QUERY_BLOCK):
            end = min(start + _QUERY_BLOCK, length)
            visible = before + end if causal else keys.lengths[i]
            if not visible:
                continue
            group = max(1, _BLOCK_NUMBERS // ((end - start) * visible))
            for h in range(0, heads, group):
                rows = slice(first_row + start, first_row + end)
                yield slice(h, h + group), rows, slice(first_col, first_col + visible)


def _logits(q_HTQ: torch.Tensor, k_HSQ: torch.Tensor, scale: float, future: torch.Tensor | None) -> torch.Tensor:
    """s_HTS, -inf where the key lies after the query; with `future` the last T - 1 keys are the triangle."""
    s_HTS = torch.bmm(q_HTQ, k_HSQ.transpose(1, 2)).mul_(scale)
    rows = q_HTQ.shape[1]
    if future is not None and rows > 1:
        s_HTS[:, :, 1 - rows :].masked_fill_(future[:rows, : rows - 1], float("-inf"))
    return s_HTS


def _future(device: torch.device) -> torch.Tensor:
    """[row, column]: whether the key `column + 1` places after the block's first query lies after this row's."""
    return torch.ones(_QUERY_BLOCK, _QUERY_BLOCK, dtype=torch.bool, device=device).triu_()


__all__ = ["attention", "check_attention"]
