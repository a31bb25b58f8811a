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
from perilune.ops.mx import BLOCK, RULES, decode_mxfp4, encode_mxfp4
from perilune.ops.precision import widen
from perilune.parallel.expert.capacity import worst_case_rows
from perilune.parallel.expert.ids import check_ids, raise_refusal
from perilune.parallel.expert.plan import Plan, counted, slots_for
from perilune.parallel.expert.plan import plan as make_plan
from perilune.parallel.expert.policy import Policy, exact
from perilune.parallel.expert.routes import Route, column, global_payload, padding, source_of
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
        checked = [check_ids(x, self.experts, self.top_k, self.tokens) for x in ids]
        # The last number says that this rank's ids are refused, so that all ranks stop together.
        counts = [counted(x, self.experts) for x, _ in checked]
        counts_RE1 = self.transport.gather(
            [torch.cat([counts_E, bad]) for (counts_E, _), (_, bad) in zip(counts, checked, strict=True)]
        )
        plan = make_plan(counts_RE1[:, :-1].contiguous(), self.policy, self.domains, self.align)
        sources = [
            source_of(plan, x, rank, earlier_CE)
            for (x, _), (_, earlier_CE), rank in zip(checked, counts, held, strict=True)
        ]
        sizes_R2R = self.transport.gather([source.sizes for source in sources])
        ends_RG = plan.ends_RG.long()
        own_R1, all_R1 = ends_RG[:, self.home - 1].unsqueeze(1), ends_RG.amax(1, keepdim=True)
        read: list[list[int]] = torch.cat([sizes_R2R, plan.slots_RB, own_R1, all_R1, counts_RE1[:, -1:]], 1).tolist()
        raise_refusal(ids, held, [bool(row[-1]) for row in read], self.experts, self.top_k, self.tokens)
        needed = max(row[-2] for row in read)
        if needed > self.rows:
            raise Error(f"rows is {self.rows} but a rank gets {needed} under this policy; make it larger or use exact")
        payloads = tuple(tuple(row[:ranks]) for row in read)
        choices = tuple(tuple(row[ranks : 2 * ranks]) for row in read)
        slots = tuple(tuple(e for e in row[2 * ranks : -3] if e >= 0) for row in read)
        arrived = self.transport.exchange(
            [source.tell_n2[: sum(choices[rank])] for source, rank in zip(sources, held, strict=True)],
            [choices[rank] for rank in held],
            [column(choices, rank) for rank in held],
        )
        routes = [
            Route(
                x.shape[0],
                source.choice_n[: sum(choices[rank])],
                source.token_P[: sum(payloads[rank])],
                tell_n2[:, 0].contiguous(),
                global_payload(tell_n2[:, 1], column(choices, rank), column(payloads, rank)),
                choices[rank],
                column(choices, rank),
                payloads[rank],
                column(payloads, rank),
            )
            for rank, (x, _), source, tell_n2 in zip(held, checked, sources, arrived, strict=True)
        ]
        own, every = (tuple(row[at] for row in read) for at in (-3, -2))
        return Planned(plan, tuple(routes), payloads, choices, slots, own, every)

    @torch.no_grad()
    def dispatch(self, x: Sequence[torch.Tensor], planned: Planned) -> list[torch.Tensor]:
        """x [T, L] of each rank -> its buffer [N, L], rows grouped by expert; padding is zero, the tail undefined."""
        routes = planned.routes
        arrived = self.transport.exchange(
            [x_TL.index_select(0, route.token_P) for x_TL, route in zip(x, routes, strict=True)],
            [route.payloads_sent for route in routes],
            [route.payloads_received for route in routes],
        )
        return [
            self._place(payload_PL, route.payload_n, planned, rank)
            for rank, (payload_PL, route) in enumerate(zip(arrived, routes, strict=True))
        ]

    @torch.no_grad()
    def dispatch_weights(self, weights: Sequence[torch.Tensor], planned: Planned) -> list[torch.Tensor]:
        """weights [T, J] of each rank -> [N], the weight of each buffer row; padding is zero, the tail undefined."""
        routes = planned.routes
        arrived = self.transport.exchange(
            [w_TJ.reshape(-1, 1).index_select(0, route.choice_n) for w_TJ, route in zip(weights, routes, strict=True)],
            [route.choices_sent for route in routes],
            [route.choices_received for route in routes],
        )
        return [
            self._place(
                w_n1, torch.arange(w_n1.shape[0], dtype=torch.int32, device=w_n1.device), planned, rank
            ).squeeze(1)
            for rank, w_n1 in enumerate(arrived)
        ]

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
                # Slices: which they are is known here, and weights may be too large for index operations.
                sends.append(torch.cat([own[k][:0], *(own[k][e : e + 1] for ids in row for e in ids)]))
            # Slots are in order of expert, so in order of home rank: what arrives is in slot order.
            for rank, copies in enumerate(self._exchange_weights(sends, sent, received)):
                arrived[rank].append(copies)
        return self.pool.fill(arrived, self.slots)

    def _exchange_weights(self, sends: list[torch.Tensor], sent: Sizes, received: Sizes) -> list[torch.Tensor]:
        if self.copy_rule is None or not sends[0].is_floating_point():
            return self.transport.exchange(sends, sent, received)
        packed = [encode_mxfp4(x, self.copy_rule) for x in sends]
        codes, scales = (self.transport.exchange([p[i] for p in packed], sent, received) for i in range(2))
        return [decode_mxfp4(c, s, sends[0].dtype) for c, s in zip(codes, scales, strict=True)]

    def copy_bytes(self, numbers: int, size: int) -> int:
        """What a copy of `numbers` dense weights of `size` bytes each takes on the way."""
        return numbers * size if self.copy_rule is None else numbers // 2 + numbers // BLOCK

    @torch.no_grad()
    def combine(self, rows: Sequence[torch.Tensor], planned: Planned) -> list[torch.Tensor]:
        """Buffers [N, L] -> y [T, L]: choices added in order j = 0, 1, ... in max(fp32, dtype), cast once."""
        out = []
        for x_nL, route in zip(self._returned(rows, planned), planned.routes, strict=True):
            if 0 < x_nL.shape[0] == route.tokens * self.top_k:
                out.append(moe.combine(x_nL, route.choice_n.long(), None, self.top_k))
                continue
            x_TJL = self._by_choice(x_nL, route)
            y_TL = widen(x_TJL[:, 0])
            for j in range(1, self.top_k):
                y_TL = y_TL + x_TJL[:, j]
            out.append(y_TL.to(x_TJL.dtype))
        return out

    @torch.no_grad()
    def give_back(self, rows: Sequence[torch.Tensor], planned: Planned) -> list[torch.Tensor]:
        """Buffers [N, L] -> [T, J, L]: each choice's row back at its token; zero where nothing was routed."""
        returned = self._returned(rows, planned)
        return [self._by_choice(x_nL, route) for x_nL, route in zip(returned, planned.routes, strict=True)]

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
                        total = widen(own[i][k][e])
                        for grad in (g for other, g in zip(copied, arrived, strict=True) if other == e):
                            total = total + grad
                        own[i][k][e] = total.to(own[i][k].dtype)
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

    def _by_choice(self, x_nL: torch.Tensor, route: Route) -> torch.Tensor:
        x_TJL = x_nL.new_zeros(route.tokens * self.top_k, x_nL.shape[1])
        return x_TJL.index_copy_(0, route.choice_n.long(), x_nL).view(route.tokens, self.top_k, x_nL.shape[1])

    def _place(self, x_PL: torch.Tensor, index_n: torch.Tensor, planned: Planned, held_index: int) -> torch.Tensor:
        """x[index_n] to the buffer rows of the arrived choices."""
        row_n, rank = planned.routes[held_index].row_n.long(), self.transport.held[held_index]
        buffer_NL = _buffer(x_PL, self.rows)
        end = planned.all_rows[rank]
        source_N = torch.zeros(end, dtype=index_n.dtype, device=index_n.device).scatter_(0, row_n, index_n)
        torch.index_select(x_PL, 0, source_N, out=buffer_NL[:end])
        if self.align > 1:
            buffer_NL.index_fill_(0, padding(planned.plan, rank), 0)
        return buffer_NL


def _buffer(like_nL: torch.Tensor, rows: int) -> torch.Tensor:
    """Uninitialised rows; tests fill them with NaN here."""
    return like_nL.new_empty(rows, like_nL.shape[1])


__all__ = ["ExpertParallel", "Planned"]
