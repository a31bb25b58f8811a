"""What one rank sends and receives under a plan, in the order in which it travels.

On CUDA kernels write it (`routes_triton`); what is here in torch specifies them.

Legend: R ranks, G groups, T tokens, J choices a token, n choices, N rows of a rank's buffer, P payloads (token,
destination rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perilune.parallel.expert.ids import Counted, by_kernels
from perilune.parallel.expert.plan import Plan, destinations


@dataclass(frozen=True)
class Route:
    """One rank's part of a planned layer. Choices travel in order of destination, then token, then choice.

    As a source: place_n int32, where in that order each flattened (token, choice) stands, -1 where nothing is routed;
    token_P int32, of each payload. As a destination: row_n int32, the buffer row of each arrived choice; origin_n
    int32, J times the payload that it copies plus which choice of its token it is.
    *_sent[d], *_received[s]: how many go to rank d and come from rank s.
    """

    tokens: int
    place_n: torch.Tensor
    token_P: torch.Tensor
    row_n: torch.Tensor
    origin_n: torch.Tensor
    choices_sent: tuple[int, ...]
    choices_received: tuple[int, ...]
    payloads_sent: tuple[int, ...]
    payloads_received: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether every choice is routed."""
        return self.place_n.shape[0] == sum(self.choices_sent)


@dataclass(frozen=True)
class Source:
    """place_n as in `Route`; token_P and tell_n2 (row_n and origin_n, payloads counted from a destination's first)
    have room for all n choices, the routed ones first.

    told int64: payloads, then choices, that go to each rank; not 0 where ids were refused; the rows of the rank's own
    experts, and of all; the expert in each of its slots.
    """

    place_n: torch.Tensor
    token_P: torch.Tensor
    tell_n2: torch.Tensor
    told: torch.Tensor


def source_of(plan: Plan, counted: Counted, rank: int) -> Source:
    """What a source sends, and what it tells all ranks. Nothing is read back."""
    if counted.earlier_CE is not None:
        from perilune.parallel.expert.routes_triton import write_source

        return Source(*write_source(plan, counted.ids_TJ, counted.earlier_CE, counted.refused, rank))
    top_k, ranks = counted.ids_TJ.shape[1], plan.ranks
    rank_TJ, row_TJ = destinations(plan, counted.ids_TJ, rank)
    # What is not routed goes to rank R, after all others. Short keys are sorted in fewer passes.
    key_n = torch.where(rank_TJ < 0, ranks, rank_TJ).reshape(-1).to(torch.uint8 if ranks < 256 else torch.int32)
    rank_n, choice_n = key_n.sort(stable=True)
    rank_n = rank_n.long()
    n, token_n = rank_n.shape[0], choice_n // top_k
    first_n = torch.ones_like(rank_n, dtype=torch.bool)
    first_n[1:] = (rank_n[1:] != rank_n[:-1]) | (token_n[1:] != token_n[:-1])
    ends_R = torch.searchsorted(rank_n, torch.arange(ranks, device=rank_n.device), right=True)
    number_n = first_n.cumsum(0) - 1
    met_n = torch.cat([number_n.new_zeros(1), number_n + 1])
    payload_ends_R = met_n[ends_R]
    begin_R1 = torch.cat([payload_ends_R.new_zeros(1), payload_ends_R])
    # Later choices of a payload write to a spare place.
    token_P = token_n.new_zeros(n + 1).scatter_(0, torch.where(first_n, number_n, n), token_n)
    payload_n = (number_n - begin_R1[rank_n]) * top_k + choice_n % top_k
    tell_n2 = torch.stack([row_TJ.reshape(-1)[choice_n], payload_n], 1)
    place_n = torch.where(rank_n < ranks, torch.arange(n, device=rank_n.device), -1)
    place_n = torch.empty_like(place_n).scatter_(0, choice_n, place_n)
    told = (_sizes(payload_ends_R), _sizes(ends_R), counted.refused, *_of_plan(plan, rank))
    return Source(place_n.to(torch.int32), token_P.to(torch.int32), tell_n2.to(torch.int32), torch.cat(told))


def _sizes(ends: torch.Tensor) -> torch.Tensor:
    return ends - torch.cat([ends.new_zeros(1), ends[:-1]])


def _of_plan(plan: Plan, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ends_G = plan.ends_RG[rank].long()
    return ends_G[plan.home - 1 : plan.home], ends_G[-1:], plan.slots_RB[rank]


def arrivals(
    tell_n2: torch.Tensor, told: torch.Tensor, rank: int, top_k: int, choices: Sequence[int], payloads: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(row_n, origin_n) of what came: payloads are counted from the first of all, not from each source's first.

    told: of all ranks, on the device; choices, payloads: what came from each of them, on the host.
    """
    if by_kernels(tell_n2):
        from perilune.parallel.expert.routes_triton import write_arrivals

        return write_arrivals(tell_n2, told, rank, top_k)
    row_n, origin_n = tell_n2.t().contiguous()
    begin = before = 0
    for arrived, inputs in zip(choices, payloads, strict=True):
        origin_n[begin : begin + arrived] += before * top_k
        begin, before = begin + arrived, before + inputs
    return row_n, origin_n


def column(table: Sequence[Sequence[int]], rank: int) -> tuple[int, ...]:
    return tuple(row[rank] for row in table)


__all__ = ["Route", "Source", "arrivals", "column", "source_of"]
