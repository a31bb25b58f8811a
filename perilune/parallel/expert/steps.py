"""The five steps of a balanced layer: plan, dispatch, prefetch, combine, reduce_grads.

Every argument and result is a list with one entry for each rank in this process: all of them on `Local`, one on
`Collective`. A token's input is sent once to each rank that computes any of its choices; its results come back one a
choice and are added at home in choice order, so the sum does not depend on who computed what.

Legend: R ranks, E experts, M = E / R experts at home, B slots, G = M + B groups, T tokens, J choices a token,
n routed choices sent, N rows of a rank's buffer, L width of a row, P payloads (token, destination rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perilune.errors import Error
from perilune.ops import moe
from perilune.parallel.expert.plan import Plan, count, destinations
from perilune.parallel.expert.plan import plan as make_plan
from perilune.parallel.expert.policy import PARTS, Policy, exact
from perilune.parallel.expert.slots import Copies, SlotPool
from perilune.parallel.expert.stats import Stats, measure
from perilune.parallel.expert.transport import Transport

Weights = tuple[torch.Tensor, ...]


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
class Planned:
    """A layer's plan with the routes of the ranks in this process; reused as it is in the backward pass.

    payloads[s][d], choices[s][d]: what goes from rank s to rank d. own_rows[r]: where rank r's own experts end.
    """

    plan: Plan
    routes: tuple[Route, ...]
    payloads: tuple[tuple[int, ...], ...]
    choices: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[int, ...], ...]
    own_rows: tuple[int, ...]


class ExpertParallel:
    """What stays fixed over the steps: transport, sizes, policy, the slots.

    experts E in all; top_k J; tokens: the most that a rank ever has; align: groups are padded to a multiple of it;
    domains: ranks with the same number share a fast link; rows: length of a rank's buffer. Without it the buffer
    holds the worst case of the policy: align_up(tokens J + (align - 1) 2M, align) for `exact`, R times as much for
    `off` and `budget`. Raises Error for sizes that cannot be.
    """

    def __init__(
        self,
        transport: Transport,
        experts: int,
        top_k: int,
        tokens: int,
        policy: Policy | None = None,
        align: int = 1,
        domains: Sequence[int] | None = None,
        rows: int | None = None,
        pool: SlotPool | None = None,
    ) -> None:
        if experts < 1 or experts % transport.ranks:
            raise Error(f"experts is {experts}; must be a multiple of the {transport.ranks} ranks")
        if not 1 <= top_k <= experts:
            raise Error(f"top_k is {top_k}; must be in 1..{experts}")
        if tokens < 0 or align < 1:
            raise Error(f"tokens is {tokens} and align {align}; must be >= 0 and >= 1")
        if domains is not None and len(domains) != transport.ranks:
            raise Error(f"domains has {len(domains)} numbers; must have one for each of the {transport.ranks} ranks")
        self.transport, self.experts, self.top_k, self.tokens = transport, experts, top_k, tokens
        self.policy, self.align, self.domains = policy or exact(), align, domains
        self.home = experts // transport.ranks
        self.slots = min(self.policy.slots_of(self.home), experts - self.home)
        self.rows = self._worst_case() if rows is None else rows
        self.pool = pool or SlotPool()

    def plan(self, ids: Sequence[torch.Tensor]) -> Planned:
        """ids: int64 [T, J] of each rank here, -1 where nothing is routed; T may differ and may be 0.

        Counts are gathered and planned on every rank, then each rank tells the others which rows their payloads are
        for. Raises Error on all ranks when one has ids out of range or too many tokens, or when a buffer is too small.
        """
        counts_RE = self._gather_counts(ids)
        plan = make_plan(counts_RE, self.policy, self.domains, self.align)
        needed = int(plan.ends_RG.amax())
        if needed > self.rows:
            raise Error(f"rows is {self.rows} but a rank gets {needed} under this policy; make it larger or use exact")
        sources = [_source(plan, x, rank) for x, rank in zip(ids, self.transport.held, strict=True)]
        sizes = self.transport.gather([source.sizes for source in sources]).tolist()
        ranks = self.transport.ranks
        payloads = tuple(tuple(row[:ranks]) for row in sizes)
        choices = tuple(tuple(row[ranks:]) for row in sizes)
        held = self.transport.held
        arrived = self.transport.exchange(
            [source.tell_n2 for source in sources],
            [choices[r] for r in held],
            [_column(choices, r) for r in held],
        )
        routes = []
        for rank, x, source, tell_n2 in zip(held, ids, sources, arrived, strict=True):
            routes.append(
                Route(
                    x.shape[0],
                    source.choice_n,
                    source.token_P,
                    tell_n2[:, 0].contiguous(),
                    _global_payload(tell_n2[:, 1], _column(choices, rank), _column(payloads, rank)),
                    choices[rank],
                    _column(choices, rank),
                    payloads[rank],
                    _column(payloads, rank),
                )
            )
        slots = tuple(tuple(e for e in row if e >= 0) for row in plan.slots_RB.tolist())
        own = tuple(plan.ends_RG[:, self.home - 1].tolist())
        return Planned(plan, tuple(routes), payloads, choices, slots, own)

    def dispatch(self, x: Sequence[torch.Tensor], planned: Planned) -> list[torch.Tensor]:
        """x [T, L] of each rank -> its buffer [N, L], rows grouped by expert; padding is zero, the tail undefined."""
        routes = planned.routes
        arrived = self.transport.exchange(
            [x_TL.index_select(0, route.token_P) for x_TL, route in zip(x, routes, strict=True)],
            [route.payloads_sent for route in routes],
            [route.payloads_received for route in routes],
        )
        return [
            self._place(payload_PL.index_select(0, route.payload_n), planned, rank)
            for rank, (payload_PL, route) in enumerate(zip(arrived, routes, strict=True))
        ]

    def dispatch_weights(self, weights: Sequence[torch.Tensor], planned: Planned) -> list[torch.Tensor]:
        """weights [T, J] of each rank -> [N], the weight of each buffer row; padding is zero, the tail undefined."""
        routes = planned.routes
        arrived = self.transport.exchange(
            [w_TJ.reshape(-1, 1).index_select(0, route.choice_n) for w_TJ, route in zip(weights, routes, strict=True)],
            [route.choices_sent for route in routes],
            [route.choices_received for route in routes],
        )
        return [self._place(w_n1, planned, rank).squeeze(1) for rank, w_n1 in enumerate(arrived)]

    def prefetch(self, weights: Sequence[Weights], planned: Planned) -> Copies:
        """weights: tensors [M, ...] of each rank's own experts -> copies in the slots that the plan asks for."""
        held = self.transport.held
        if not any(planned.slots):
            # Known to all ranks, so none of them sends.
            return self.pool.fill([[t[:0] for t in own] for own in weights], self.slots)
        wanted = [[self._wanted(planned, home, rank) for rank in range(self.transport.ranks)] for home in held]
        sent = [[len(ids) for ids in row] for row in wanted]
        received = [[len(self._wanted(planned, home, r)) for home in range(self.transport.ranks)] for r in held]
        arrived: list[list[torch.Tensor]] = [[] for _ in held]
        for k in range(len(weights[0])):
            sends = []
            for own, row in zip(weights, wanted, strict=True):
                index = torch.tensor([e for ids in row for e in ids], dtype=torch.int64, device=own[k].device)
                sends.append(own[k].index_select(0, index))
            # Slots are in order of expert, so in order of home rank: what arrives is in slot order.
            for rank, copies in enumerate(self.transport.exchange(sends, sent, received)):
                arrived[rank].append(copies)
        return self.pool.fill(arrived, self.slots)

    def combine(
        self, rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], planned: Planned
    ) -> list[torch.Tensor]:
        """Buffers [N, L] and weights [T, J] -> y [T, L]: choices added in order j = 0, 1, ... in max(fp32, dtype)."""
        out = []
        for x_TJL, w_TJ in zip(self.give_back(rows, planned), weights, strict=True):
            order_n = torch.arange(w_TJ.numel(), device=w_TJ.device)
            out.append(moe.combine(x_TJL.flatten(0, 1), order_n, w_TJ))
        return out

    def give_back(self, rows: Sequence[torch.Tensor], planned: Planned) -> list[torch.Tensor]:
        """Buffers [N, L] -> [T, J, L]: each choice's row back at its token; zero where nothing was routed."""
        routes = planned.routes
        arrived = self.transport.exchange(
            [rows_NL.index_select(0, route.row_n) for rows_NL, route in zip(rows, routes, strict=True)],
            [route.choices_received for route in routes],
            [route.choices_sent for route in routes],
        )
        out = []
        for x_nL, route in zip(arrived, routes, strict=True):
            x_TJL = x_nL.new_zeros(route.tokens * self.top_k, x_nL.shape[1])
            out.append(x_TJL.index_copy_(0, route.choice_n.long(), x_nL).view(route.tokens, self.top_k, x_nL.shape[1]))
        return out

    def reduce_grads(
        self, own: Sequence[Weights], copies: Sequence[Weights], planned: Planned
    ) -> list[tuple[torch.Tensor, ...]]:
        """Gradients [M, ...] of own experts and [B, ...] of copies -> [M, ...], the copies' added in rank order.

        Added in max(fp32, dtype) and cast once.
        """
        held, ranks = self.transport.held, self.transport.ranks
        if not any(planned.slots):
            return list(own)
        back = [[self._wanted(planned, home, rank) for rank in range(ranks)] for home in held]
        received = [[len(ids) for ids in row] for row in back]
        sent = [[len(self._wanted(planned, home, r)) for home in range(ranks)] for r in held]
        out: list[list[torch.Tensor]] = [[] for _ in held]
        for k in range(len(own[0])):
            sends = [grads[k][: sum(sizes)] for grads, sizes in zip(copies, sent, strict=True)]
            for i, arrived in enumerate(self.transport.exchange(sends, sent, received)):
                dtype = own[i][k].dtype
                total = own[i][k].to(torch.promote_types(dtype, torch.float32), copy=True)
                # One addition a rank: inside it each expert occurs once, so the order is the order of ranks.
                for ids, piece in zip(back[i], arrived.split(received[i]), strict=True):
                    total.index_add_(0, torch.tensor(ids, dtype=torch.int64, device=total.device), piece.to(total))
                out[i].append(total.to(dtype))
        return [tuple(grads) for grads in out]

    def stats(self, planned: Planned, row_bytes: int, expert_bytes: int) -> Stats:
        """What the plan did; row_bytes of one token's input, expert_bytes of one expert's weights. Reads the host."""
        return measure(planned.plan, planned.payloads, planned.choices, self.domains, row_bytes, expert_bytes)

    def _wanted(self, planned: Planned, home: int, rank: int) -> list[int]:
        """Which of `home`'s experts are copied to `rank`, as indices into its own."""
        return [e - home * self.home for e in planned.slots[rank] if e // self.home == home]

    def _place(self, x_nL: torch.Tensor, planned: Planned, held_index: int) -> torch.Tensor:
        route, rank = planned.routes[held_index], self.transport.held[held_index]
        buffer_NL = _buffer(x_nL, self.rows)
        if self.align > 1:
            buffer_NL.index_fill_(0, _padding(planned.plan, rank), 0)
        return buffer_NL.index_copy_(0, route.row_n.long(), x_nL)

    def _gather_counts(self, ids: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(ids) != len(self.transport.held):
            raise Error(f"plan: ids of {len(ids)} ranks; this process holds {len(self.transport.held)}")
        problems = [self._problem(x) for x in ids]
        rows = []
        for x_TJ, problem in zip(ids, problems, strict=True):
            counts_E = x_TJ.new_zeros(self.experts, dtype=torch.int64) if problem else count(x_TJ, self.experts)
            # The last number says that this rank's ids are refused, so that all ranks stop together.
            rows.append(torch.cat([counts_E, counts_E.new_tensor([bool(problem)])]))
        counts_RE1 = self.transport.gather(rows)
        for problem in filter(None, problems):
            raise Error(problem)
        refused = counts_RE1[:, -1].nonzero().view(-1).tolist()
        if refused:
            raise Error(f"plan: rank {refused[0]} refused its ids; its own message says why")
        return counts_RE1[:, :-1].contiguous()

    def _problem(self, ids_TJ: torch.Tensor) -> str | None:
        if ids_TJ.dim() != 2 or ids_TJ.shape[1] != self.top_k or ids_TJ.dtype != torch.int64:
            return f"plan: ids are {ids_TJ.dtype} {tuple(ids_TJ.shape)}; must be int64 [tokens, {self.top_k}]"
        if ids_TJ.shape[0] > self.tokens:
            return f"plan: {ids_TJ.shape[0]} tokens on a rank; the buffers are made for tokens = {self.tokens}"
        lowest, highest = (int(ids_TJ.min()), int(ids_TJ.max())) if ids_TJ.numel() else (-1, -1)
        if lowest < -1 or highest >= self.experts:
            return f"plan: ids lie in {lowest}..{highest}; must be in -1..{self.experts - 1}"
        return None

    def _worst_case(self) -> int:
        rows, ranks = self.tokens * self.top_k, self.transport.ranks
        if self.policy.kind in ("budget", "off"):
            rows *= ranks
        if self.policy.kind == "tolerant":
            rows = -(-rows * (PARTS + round(self.policy.eps * PARTS)) // PARTS)
            # Refused copies stay at home: a donor makes at most M + R - 1 of them.
            rows = min(rows + self.policy.min_rows * (self.home + ranks - 1), self.tokens * self.top_k * ranks)
        groups = self.home + self.slots
        if self.policy.kind in ("exact", "one_donor"):
            groups = 2 * self.home
        return -(-(rows + (self.align - 1) * groups) // self.align) * self.align


@dataclass(frozen=True)
class _Source:
    choice_n: torch.Tensor
    token_P: torch.Tensor
    tell_n2: torch.Tensor
    sizes: torch.Tensor


def _source(plan: Plan, ids_TJ: torch.Tensor, rank: int) -> _Source:
    """What a source sends: choices by destination, payloads, and to each destination (row, payload) of each choice."""
    top_k = ids_TJ.shape[1]
    rank_TJ, row_TJ = destinations(plan, ids_TJ, rank)
    rank_n, choice_n = rank_TJ.reshape(-1).sort(stable=True)
    routed = rank_n >= 0
    rank_n, choice_n = rank_n[routed], choice_n[routed]
    token_n = choice_n // top_k
    pair_n = rank_n * max(ids_TJ.shape[0], 1) + token_n
    first_n = torch.ones_like(pair_n, dtype=torch.bool)
    first_n[1:] = pair_n[1:] != pair_n[:-1]
    choices_R = torch.bincount(rank_n, minlength=plan.ranks)
    payloads_R = torch.bincount(rank_n[first_n], minlength=plan.ranks)
    before_R = payloads_R.cumsum(0) - payloads_R
    payload_n = first_n.cumsum(0) - 1 - before_R[rank_n]
    row_n = row_TJ.reshape(-1)[choice_n]
    return _Source(
        choice_n.to(torch.int32),
        token_n[first_n].to(torch.int32),
        torch.stack([row_n, payload_n], 1).to(torch.int32),
        torch.cat([payloads_R, choices_R]),
    )


def _global_payload(payload_n: torch.Tensor, choices: Sequence[int], payloads: Sequence[int]) -> torch.Tensor:
    """Payload numbers counted from each source's first -> counted from the first of all."""
    before, out = 0, []
    for piece, arrived in zip(payload_n.split(list(choices)), payloads, strict=True):
        out.append(piece + before)
        before += arrived
    return torch.cat(out)


def _padding(plan: Plan, rank: int) -> torch.Tensor:
    """Rows of a rank's buffer that belong to a group but to no choice."""
    ends_G, rows_G = plan.ends_RG[rank].long(), plan.rows_RG[rank]
    starts_G = torch.cat([ends_G.new_zeros(1), ends_G[:-1]])
    row_N = torch.arange(int(ends_G[-1]), device=ends_G.device)
    group_N = torch.searchsorted(ends_G, row_N, right=True)
    return row_N[row_N - starts_G[group_N] >= rows_G[group_N]]


def _buffer(like_nL: torch.Tensor, rows: int) -> torch.Tensor:
    """Uninitialised rows; tests fill them with NaN here."""
    return like_nL.new_empty(rows, like_nL.shape[1])


def _column(table: Sequence[Sequence[int]], rank: int) -> tuple[int, ...]:
    return tuple(row[rank] for row in table)


__all__ = ["ExpertParallel", "Planned", "Route"]
