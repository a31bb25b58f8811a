"""What one rank sends and receives under a plan, in the order in which it travels.

Legend: R ranks, G groups, T tokens, J choices a token, n choices, N rows of a rank's buffer, P payloads (token,
destination rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perilune.parallel.expert.plan import Plan, destinations


@dataclass(frozen=True)
class Route:
    """One rank's part of a planned layer. Choices stand in order of destination, then token, then choice.

    As a source: choice_n int32, the flattened (token, choice) of each routed choice; token_P int32, of each payload.
    As a destination: row_n int32, the buffer row of each arrived choice; payload_n int32, the payload it copies.
    *_sent[d], *_received[s]: how many go to rank d and come from rank s.
    """

    tokens: int
    choice_n: torch.Tensor
    token_P: torch.Tensor
    row_n: torch.Tensor
    payload_n: torch.Tensor
    choices_sent: tuple[int, ...]
    choices_received: tuple[int, ...]
    payloads_sent: tuple[int, ...]
    payloads_received: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """Tensors of all n choices, the routed ones first; sizes: payloads, then choices, that go to each rank."""

    choice_n: torch.Tensor
    token_P: torch.Tensor
    tell_n2: torch.Tensor
    sizes: torch.Tensor


def source_of(plan: Plan, ids_TJ: torch.Tensor, rank: int, earlier_CE: torch.Tensor | None = None) -> Source:
    """What a source sends: choices by destination, payloads, and to each destination (row, payload) of each choice.

    earlier_CE: as for `destinations`.
    """
    top_k, ranks = ids_TJ.shape[1], plan.ranks
    rank_TJ, row_TJ = destinations(plan, ids_TJ, rank, earlier_CE)
    # What is not routed goes to rank R, after all others. Short keys are sorted in fewer passes.
    key_n = torch.where(rank_TJ < 0, ranks, rank_TJ).reshape(-1).to(torch.uint8 if ranks < 256 else torch.int32)
    rank_n, choice_n = key_n.sort(stable=True)
    rank_n = rank_n.long()
    token_n = choice_n // top_k
    first_n = torch.ones_like(rank_n, dtype=torch.bool)
    first_n[1:] = (rank_n[1:] != rank_n[:-1]) | (token_n[1:] != token_n[:-1])
    ends_R1 = torch.searchsorted(rank_n, torch.arange(ranks + 1, device=rank_n.device), right=True)
    number_n = first_n.cumsum(0) - 1
    met_n = torch.cat([number_n.new_zeros(1), number_n + 1])
    payload_ends_R = met_n[ends_R1[:ranks]]
    begin_R1 = torch.cat([payload_ends_R.new_zeros(1), payload_ends_R])
    # Later choices of a payload write to a spare place.
    n = rank_n.shape[0]
    token_P = token_n.new_zeros(n + 1).scatter_(0, torch.where(first_n, number_n, n), token_n)
    tell_n2 = torch.stack([row_TJ.reshape(-1)[choice_n], number_n - begin_R1[rank_n]], 1)
    return Source(
        choice_n.to(torch.int32),
        token_P.to(torch.int32),
        tell_n2.to(torch.int32),
        torch.cat([_sizes(payload_ends_R), _sizes(ends_R1[:ranks])]),
    )


def _sizes(ends: torch.Tensor) -> torch.Tensor:
    return ends - torch.cat([ends.new_zeros(1), ends[:-1]])


def global_payload(payload_n: torch.Tensor, choices: Sequence[int], payloads: Sequence[int]) -> torch.Tensor:
    """Payload numbers counted from each source's first -> counted from the first of all."""
    before, out = 0, []
    for piece, arrived in zip(payload_n.split(list(choices)), payloads, strict=True):
        out.append(piece + before)
        before += arrived
    return torch.cat(out)


def padding(plan: Plan, rank: int) -> torch.Tensor:
    """Rows of a rank's buffer that belong to a group but to no choice."""
    ends_G, rows_G = plan.ends_RG[rank].long(), plan.rows_RG[rank]
    starts_G = torch.cat([ends_G.new_zeros(1), ends_G[:-1]])
    row_N = torch.arange(int(ends_G[-1]), device=ends_G.device)
    group_N = torch.searchsorted(ends_G, row_N, right=True)
    return row_N[row_N - starts_G[group_N] >= rows_G[group_N]]


def column(table: Sequence[Sequence[int]], rank: int) -> tuple[int, ...]:
    return tuple(row[rank] for row in table)


__all__ = ["Route", "Source", "column", "global_payload", "padding", "source_of"]
