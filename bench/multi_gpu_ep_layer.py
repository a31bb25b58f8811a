"""Inputs of the expert-parallel part of bench/multi_gpu.py, and the plain layers it is compared with.

Legend: R ranks, E experts, M experts a rank, S tokens a rank, J choices a token, L width, F expert width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from multi_gpu_common import DRY
from parallel_layers import DEVICE

from perilune.config import Activation
from perilune.ops import moe
from perilune.ops.moe import Dense

M, J, L, F = (4, 2, 64, 32) if DRY else (112, 16, 3584, 3072)
ACT = Activation("situ")


def draw(kind: str, experts: int, tokens: int, top_k: int, seed: int) -> torch.Tensor:
    """int64 [T, J], distinct in a token, by the Gumbel trick."""
    fixed = torch.Generator().manual_seed(0)
    p_E = torch.ones(experts, dtype=torch.float64)
    if kind.startswith("lognormal"):
        p_E = (float(kind.split()[1]) * torch.randn(experts, generator=fixed, dtype=torch.float64)).exp()
    elif kind.startswith("share"):
        # This share of all choices, beyond the even one, goes to the first rank's experts.
        first, ranks = experts // dist.get_world_size(), dist.get_world_size()
        more = float(kind.split()[1])
        p_E[:first] *= more * (ranks - 1) / (1 - more) if more < 1 else 1
        p_E[first:] *= 0 if more >= 1 else 1
    elif kind == "16 experts":
        p_E[top_k:] = 0
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    noise = torch.empty(tokens, experts, device=DEVICE).exponential_(generator=generator)
    return (noise / p_E.float().to(DEVICE).clamp(min=1e-30)).topk(top_k, largest=False).indices


class Exchange(torch.autograd.Function):
    """all_to_all_single of rows, and back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.sizes = sent, received
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sent, received = ctx.sizes
        d_x = d_out.new_empty(sum(sent), *d_out.shape[1:])
        dist.all_to_all_single(d_x, d_out.contiguous(), sent, received)
        return d_x, None, None


def plain(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, weights: Dense) -> torch.Tensor:
    """Rows by expert to their home ranks, by source there, grouped again by expert, and the same way back."""
    ranks, experts = dist.get_world_size(), M * dist.get_world_size()
    order, offs = moe.permute(ids, experts)
    counts_E = torch.diff(offs.long(), prepend=offs.new_zeros(1))
    arriving = torch.empty_like(counts_E)
    dist.all_to_all_single(arriving, counts_E)
    table = torch.stack([counts_E, arriving]).view(2, ranks, -1).sum(2).tolist()
    rows = Exchange.apply(moe.dispatch(x, order, J), *table)
    row_weights = Exchange.apply(w.reshape(-1).index_select(0, order), *table)
    # Arrived in order of (source, expert); the experts need (expert, source).
    expert_n = torch.arange(M, device=DEVICE).repeat(ranks).repeat_interleave(arriving)
    by_expert = torch.argsort(expert_n, stable=True)
    back = torch.empty_like(by_expert).scatter_(0, by_expert, torch.arange(by_expert.shape[0], device=DEVICE))
    ends = arriving.view(ranks, M).sum(0).cumsum(0).int()
    rows, row_weights = rows.index_select(0, by_expert), row_weights.index_select(0, by_expert)
    out = moe.experts(rows, weights, ends, ACT, row_weights_R=row_weights)
    returned = Exchange.apply(out.index_select(0, back), table[1], table[0])
    return moe.combine(returned, order, None, J)


def padded(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, weights: Dense) -> torch.Tensor:
    """`plain` with room for all choices of a rank in every message: nothing is read on the host."""
    ranks, experts, choices = dist.get_world_size(), M * dist.get_world_size(), ids.numel()
    order, offs = moe.permute(ids, experts)
    counts_E = torch.diff(offs.long(), prepend=offs.new_zeros(1))
    arriving = torch.empty_like(counts_E)
    dist.all_to_all_single(arriving, counts_E)
    # The place of each sorted choice: its rank's message, and how many of that rank's come before.
    row_n = torch.arange(choices, device=DEVICE)
    to_n = torch.searchsorted(offs[M - 1 :: M].contiguous(), row_n.int(), right=True)
    first_R = torch.cat([offs.new_zeros(1), offs[M - 1 : -1 : M]])
    place_n = to_n * choices + row_n - first_R[to_n]
    same = [choices] * ranks

    def send(rows: torch.Tensor) -> torch.Tensor:
        room = rows.new_zeros(ranks * choices, *rows.shape[1:])
        return Exchange.apply(room.index_copy(0, place_n, rows), same, same)

    rows, row_weights = send(moe.dispatch(x, order, J)), send(w.reshape(-1).index_select(0, order))
    # What is padding in a message counts as of an expert after all others.
    ends_RM = arriving.view(ranks, M).cumsum(1)
    expert_n = torch.searchsorted(ends_RM, row_n.expand(ranks, -1).contiguous(), right=True).reshape(-1)
    by_expert = torch.argsort(expert_n, stable=True)
    back = torch.empty_like(by_expert).scatter_(0, by_expert, torch.arange(by_expert.shape[0], device=DEVICE))
    ends = arriving.view(ranks, M).sum(0).cumsum(0).int()
    rows, row_weights = rows.index_select(0, by_expert), row_weights.index_select(0, by_expert)
    out = moe.experts(rows, weights, ends, ACT, row_weights_R=row_weights)
    returned = Exchange.apply(out.index_select(0, back), same, same)
    return moe.combine(returned.index_select(0, place_n), order, None, J)
