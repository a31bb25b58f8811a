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
from perilune.ops.mx import BLOCK, RULES, decode_mxfp4, encode_mxfp4
from perilune.ops.precision import widen
from perilune.parallel.expert.capacity import worst_case_rows
from perilune.parallel.expert.ids import count_ids, raise_refusal
from perilune.parallel.expert.messages import Room, by_choice, pack, sum_choices, unpack
from perilune.parallel.expert.plan import Plan, slots_for
from perilune.parallel.expert.plan import plan as make_plan
from perilune.parallel.expert.policy import Policy, exact
from perilune.parallel.expert.routes import Route, arrivals, column, source_of
from perilune.parallel.expert.slots import Copies, SlotPool
from perilune.parallel.expert.stats import Stats, measure
from perilune.parallel.expert.transport import Sizes, Transport

Weights = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Planned:
    """A layer's plan with the routes of the ranks in this process; reused as it is in the backward pass.

    payloads[s][d], choices[s][d]: what goes from rank s to rank d. own_rows[r], all_rows[r]: where the rows of rank r's
    own experts end, and those of all that it computes.
    """

    plan: Plan
    routes: tuple[Route, ...]
    payloads: tuple[tuple[int, ...], ...]
    choices: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[int, ...], ...]
    own_rows: tuple[int, ...]
    all_rows: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of each rank in this process."""
        return tuple(route.tokens for route in self.routes)


class ExpertParallel:
    """What stays fixed over the steps: transport, sizes, policy, the slots. The steps build no autograd graph.

    experts E in all; top_k J; tokens: the most that a rank ever has; align: groups are padded to a multiple of it;
    domains: ranks with the same number share a fast link; rows: length of a rank's buffer. Without it the buffer
    holds the worst case of the policy: align_up(tokens J + (align - 1) 2M, align) for `exact`, R times as much for
    `off` and `budget`. copy_rule: dense copies travel as MXFP4 with this scale rule (`ops.mx`), in a quarter of bf16's
    bytes, and are decoded on arrival: the same weights where they lie on that grid already (quantisation-aware
    training), rounded to it otherwise. Raises Error for sizes that cannot be and an unknown rule.
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
        copy_rule: str | None = None,
    ) -> None:
        if copy_rule is not None and copy_rule not in RULES:
            raise Error(f"copy_rule is {copy_rule!r}; allowed: None, {', '.join(map(repr, RULES))}")
        worst = worst_case_rows(policy or exact(), transport.ranks, experts, top_k, tokens, align, domains)
        self.transport, self.experts, self.top_k, self.tokens = transport, experts, top_k, tokens
        self.policy, self.align, self.domains = policy or exact(), align, domains
        self.home = experts // transport.ranks
        self.slots = slots_for(self.policy, transport.ranks, experts)
        self.rows = worst if rows is None else rows
        self.pool, self.copy_rule = pool or SlotPool(), copy_rule

    def plan(self, ids: Sequence[torch.Tensor]) -> Planned:
        """ids: int64 [T, J] of each rank here, -1 where nothing is routed; T may differ and may be 0.

        Counts are gathered and planned on every rank, then each rank tells the others which rows their payloads are
        for. The host reads once: all sizes together. Raises Error on all ranks when one has ids out of range or too
        many tokens, or when a buffer is too small.
        """
        held, ranks = self.transport.held, self.transport.ranks
        if len(ids) != len(held):
            raise Error(f"plan: ids of {len(ids)} ranks; this process holds {len(held)}")
        counted = [count_ids(x, self.experts, self.top_k, self.tokens) for x in ids]
        counts_RE = self.transport.gather([of_rank.counts_E for of_rank in counted])
        plan = make_plan(counts_RE, self.policy, self.domains, self.align)
        sources = [source_of(plan, of_rank, rank) for of_rank, rank in zip(counted, held, strict=True)]
        told = self.transport.gather([source.told for source in sources])
        read: list[list[int]] = told.tolist()
        # Refusals are known here first, so that all ranks stop together.
        refused = [bool(row[2 * ranks]) for row in read]
        raise_refusal(ids, held, refused, self.experts, self.top_k, self.tokens)
        own, every = (tuple(row[2 * ranks + at] for row in read) for at in (1, 2))
        if max(every) > self.rows:
            raise Error(
                f"rows is {self.rows} but a rank gets {max(every)} under this policy; make it larger or use exact"
            )
        payloads = tuple(tuple(row[:ranks]) for row in read)
        choices = tuple(tuple(row[ranks : 2 * ranks]) for row in read)
        slots = tuple(tuple(e for e in row[2 * ranks + 3 :] if e >= 0) for row in read)
        tells = self.transport.exchange(
            [source.tell_n2[: sum(choices[rank])] for source, rank in zip(sources, held, strict=True)],
            [choices[rank] for rank in held],
            [column(choices, rank) for rank in held],
        )
        routes = []
        for rank, of_rank, source, tell_n2 in zip(held, counted, sources, tells, strict=True):
            came = column(choices, rank), column(payloads, rank)
            routes.append(
                Route(
                    of_rank.ids_TJ.shape[0],
                    source.place_n,
                    source.token_P[: sum(payloads[rank])],
                    *arrivals(tell_n2, told, rank, self.top_k, *came),
                    choices[rank],
                    came[0],
                    payloads[rank],
                    came[1],
                )
            )
        return Planned(plan, tuple(routes), payloads, choices, slots, own, every)

    def dispatch(self, x: Sequence[torch.Tensor], planned: Planned) -> list[torch.Tensor]:
        """x [T, L] of each rank -> its buffer [N, L], rows grouped by expert; padding is zero, the tail undefined."""
        return [rows for (rows,), _ in self.dispatch_together([x], None, planned)]

    def dispatch_weights(self, weights: Sequence[torch.Tensor], planned: Planned) -> list[torch.Tensor]:
        """weights [T, J] of each rank -> [N], the weight of each buffer row; padding is zero, the tail undefined."""
        return [w_N for _, w_N in self.dispatch_together([], weights, planned) if w_N is not None]

    @torch.no_grad()
    def dispatch_together(
        self, inputs: Sequence[Sequence[torch.Tensor]], weights: Sequence[torch.Tensor] | None, planned: Planned
    ) -> list[tuple[list[torch.Tensor], torch.Tensor | None]]:
        """`dispatch` of up to two inputs and `dispatch_weights`, all in one message to each rank.

        inputs[k][r]: the k-th of rank r. Of each rank: (the buffers of its inputs, the weights or None).
        """
        routes, here = planned.routes, range(len(planned.routes))
        of_rank = [None] * len(routes) if weights is None else list(weights)
        arrived = self.transport.exchange(
            [pack([x[i] for x in inputs], of_rank[i], routes[i].token_P) for i in here],
            [route.payloads_sent for route in routes],
            [route.payloads_received for route in routes],
        )
        out = []
        for i, rank in enumerate(self.transport.held):
            buffers = [_buffer(x[i], self.rows) for x in inputs]
            w_TJ = of_rank[i]
            w_N = None if w_TJ is None else _buffer(w_TJ[:, :1], self.rows).squeeze(1)
            room = Room(buffers, w_N, planned.plan, rank, planned.all_rows[rank])
            unpack(arrived[i], routes[i], room, self.top_k)
            out.append((buffers, w_N))
        return out

    def prefetch(self, weights: Sequence[Weights], planned: Planned) -> Copies:
        """weights: tensors [M, ...] of each rank's own experts -> copies in the slots that the plan asks for."""
        held, copies = self.transport.held, self.pool.open(weights, self.slots)
        if not any(planned.slots):
            # Known to all ranks, so none of them sends.
            return copies
        wanted = [[self._wanted(planned, home, rank) for rank in range(self.transport.ranks)] for home in held]
        sent = [[len(ids) for ids in row] for row in wanted]
        received = [[len(self._wanted(planned, home, r)) for home in range(self.transport.ranks)] for r in held]
        for k in range(len(weights[0])):
            sends = []
            for own, row in zip(weights, wanted, strict=True):
                # Slices: which they are is known here, and weights may be too large for index operations.
                sends.append(torch.cat([own[k][:0], *(own[k][e : e + 1] for ids in row for e in ids)]))
            # Slots are in order of expert, so in order of home rank: what arrives is in slot order.
            into = [copies.weights(i)[k][: sum(sizes)] for i, sizes in enumerate(received)]
            self._exchange_weights(sends, sent, received, into)
        return copies

    def _exchange_weights(
        self, sends: list[torch.Tensor], sent: Sizes, received: Sizes, into: list[torch.Tensor]
    ) -> None:
        if self.copy_rule is None or not sends[0].is_floating_point():
            self.transport.exchange(sends, sent, received, into)
            return
        packed = [encode_mxfp4(x, self.copy_rule) for x in sends]
        codes, scales = (self.transport.exchange([p[i] for p in packed], sent, received) for i in range(2))
        for slots, code, scale in zip(into, codes, scales, strict=True):
            slots.copy_(decode_mxfp4(code, scale, slots.dtype))

    def copy_bytes(self, numbers: int, size: int) -> int:
        """What a copy of `numbers` dense weights of `size` bytes each takes on the way."""
        return numbers * size if self.copy_rule is None else numbers // 2 + numbers // BLOCK

    @torch.no_grad()
    def combine(self, rows: Sequence[torch.Tensor], planned: Planned) -> list[torch.Tensor]:
        """Buffers [N, L] -> y [T, L]: choices added in order j = 0, 1, ... in max(fp32, dtype), cast once."""
        returned = self._returned(rows, planned)
        return [sum_choices(x_nL, route, self.top_k) for x_nL, route in zip(returned, planned.routes, strict=True)]

    @torch.no_grad()
    def give_back(self, rows: Sequence[torch.Tensor], planned: Planned) -> list[torch.Tensor]:
        """Buffers [N, L] -> [T, J, L]: each choice's row back at its token; zero where nothing was routed."""
        returned = self._returned(rows, planned)
        return [by_choice(x_nL, route, self.top_k) for x_nL, route in zip(returned, planned.routes, strict=True)]

    def reduce_grads(
        self, own: Sequence[Weights], copies: Sequence[Weights], planned: Planned
    ) -> list[tuple[torch.Tensor, ...]]:
        """Add gradients [B, ...] of copies to those of own experts [M, ...], in place and in order of rank.

        The sum of an expert is taken in max(fp32, dtype) and cast once.
        """
        held, ranks = self.transport.held, self.transport.ranks
        if any(planned.slots):
            back = [[self._wanted(planned, home, rank) for rank in range(ranks)] for home in held]
            received = [[len(ids) for ids in row] for row in back]
            sent = [[len(self._wanted(planned, home, r)) for home in range(ranks)] for r in held]
            for k in range(len(own[0])):
                sends = [grads[k][: sum(sizes)] for grads, sizes in zip(copies, sent, strict=True)]
                for i, arrived in enumerate(self.transport.exchange(sends, sent, received)):
                    # Copies arrive in order of rank.
                    copied = [e for ids in back[i] for e in ids]
                    for e in sorted(set(copied)):
                        grads = [g for other, g in zip(copied, arrived, strict=True) if other == e]
                        if len(grads) == 1:
                            # A sum of two is the same in any precision that it is then rounded from.
                            own[i][k][e].add_(grads[0])
                            continue
                        total = widen(own[i][k][e])
                        for grad in grads:
                            total = total + grad
                        own[i][k][e].copy_(total)
        return [tuple(grads) for grads in own]

    def stats(self, planned: Planned, row_bytes: int, expert_bytes: int) -> Stats:
        """What the plan did; row_bytes of one token's input, expert_bytes of one expert's weights. Reads the host."""
        return measure(planned.plan, planned.payloads, planned.choices, self.domains, row_bytes, expert_bytes)

    def _wanted(self, planned: Planned, home: int, rank: int) -> list[int]:
        """Which of `home`'s experts are copied to `rank`, as indices into its own."""
        return [e - home * self.home for e in planned.slots[rank] if e // self.home == home]

    def _returned(self, rows: Sequence[torch.Tensor], planned: Planned) -> list[torch.Tensor]:
        """Buffers [N, L] -> [n, L] back at each source, in the order in which its choices went."""
        routes = planned.routes
        return self.transport.exchange(
            [rows_NL.index_select(0, route.row_n) for rows_NL, route in zip(rows, routes, strict=True)],
            [route.choices_received for route in routes],
            [route.choices_sent for route in routes],
        )


def _buffer(like_nL: torch.Tensor, rows: int) -> torch.Tensor:
    """Uninitialised rows; tests fill them with NaN here."""
    return like_nL.new_empty(rows, like_nL.shape[1])


__all__ = ["ExpertParallel", "Planned"]
