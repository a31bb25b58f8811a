"""The five steps where ranks write each other's memory: static shapes, nothing read back, fit for a CUDA graph.

Same plan, rows, slots and sums as `steps.ExpertParallel`. A token's row is written straight into the receive buffer of
each rank that computes it; there its other choices' rows are copied from it, those of copied experts into a buffer of
their own, so that either group of experts is one grouped product. Results are written back one a choice.

Three barriers a pass: before rows are written (counts are exchanged under it, or everybody is done with the buffers),
after they have arrived, and after results have. Copies of experts travel on a stream of their own, with a
barrier of their own, while own experts compute.

Legend: R ranks, E experts, M experts at home, B slots, G = M + B groups, T tokens, J choices, N rows, L width,
F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from perilune.errors import Error
from perilune.parallel.expert import direct_triton as kernels
from perilune.parallel.expert.plan import Plan, slots_for
from perilune.parallel.expert.plan import plan as make_plan
from perilune.parallel.expert.policy import Policy, exact
from perilune.parallel.expert.rows_triton import count_choices, destination_rows
from perilune.parallel.expert.stats import Stats, measure
from perilune.parallel.expert.steps import worst_case_rows
from perilune.parallel.expert.symmetric import Direct, Shared
from perilune.parallel.expert.workspace import Workspace

Weights = tuple[torch.Tensor, ...]
_WORDS = 4096
_WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}


@dataclass(frozen=True)
class DirectPlanned:
    """A layer's plan and, for each rank here, where its choices go: all that dispatching again needs.

    dst: int32 [T, J], rank times N plus row, -1 for none. jobs: int32 [1 + R B], how many of its experts are copied and
    to which rank's slots. slot: int32 [M, R], the slot on each rank that holds a copy, or -1.
    """

    plan: Plan
    dst: tuple[torch.Tensor, ...]
    jobs: tuple[torch.Tensor, ...]
    slot: tuple[torch.Tensor, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(dst.shape[0] for dst in self.dst)


class DirectParallel:
    """`ExpertParallel` over memory that all ranks reach: `Symmetric`, or `Virtual` ranks on one device.

    width L and inner F of the experts, dtype of rows and weights; training: whether there are buffers for a backward
    pass; workspace: another layer's, to share its buffers. The other arguments are those of `ExpertParallel`. Raises
    Error for sizes that cannot be, and for `rows` below the policy's worst case, which could not be noticed in time.
    """

    def __init__(
        self,
        transport: Direct,
        experts: int,
        top_k: int,
        tokens: int,
        width: int,
        inner: int,
        dtype: torch.dtype = torch.bfloat16,
        policy: Policy | None = None,
        align: int = 1,
        domains: Sequence[int] | None = None,
        training: bool = True,
        workspace: Workspace | None = None,
    ) -> None:
        ranks = transport.ranks
        self.transport, self.experts, self.top_k, self.tokens = transport, experts, top_k, tokens
        self.policy, self.align, self.domains = policy or exact(), align, domains
        self.rows = worst_case_rows(self.policy, ranks, experts, top_k, tokens, align, domains)
        self.home, self.slots = experts // ranks, slots_for(self.policy, ranks, experts)
        self.choices = tokens * top_k
        if ranks * self.rows >= 2**31:
            raise Error(f"direct: {ranks} ranks of {self.rows} rows; together they must be below 2^31")
        if width * dtype.itemsize % 16 or inner * dtype.itemsize % 16:
            raise Error(f"direct: width {width} and inner {inner} of {dtype}; rows must be multiples of 16 bytes")
        key = (self.rows, self.choices, experts, self.slots, width, inner, dtype)
        self.workspace = workspace or Workspace(transport, *key, training=training)
        if self.workspace.key != key:
            raise Error(
                "direct: the workspace is for (rows, choices, experts, slots, width, inner, dtype) "
                f"{self.workspace.key}, the layer for {key}"
            )
        self.width, self.inner, self.dtype = width, inner, dtype
        self._column = triton.next_power_of_2(width)
        self._side = torch.cuda.Stream(transport.device) if transport.device.type == "cuda" else None
        self._flag = torch.zeros(1, dtype=torch.int32, device=transport.device)

    def plan(self, ids: Sequence[torch.Tensor]) -> DirectPlanned:
        """ids: int64 [T, J] of each rank here, -1 where nothing is routed -> plan and destinations.

        An id out of range is left out and noticed late: by `raise_if_refused`, which `stats` calls. Dispatch before
        the next plan. Raises Error at once for another shape or dtype, or too many tokens.
        """
        self._check_ids(ids)
        counts = self.workspace.counts[self.workspace.plans % 2]
        self.workspace.plans += 1
        ranks, experts = self.transport.ranks, self.experts
        earlier = []
        for rank, ids_TJ in zip(self.transport.held, ids, strict=True):
            counts_E, earlier_CE = count_choices(ids_TJ, experts, self._flag)
            earlier.append(earlier_CE)
            kernels.push_counts[(ranks, triton.cdiv(experts, 1024))](counts_E, counts.table, rank, experts, BLOCK=1024)
        self.transport.barrier()
        plan = make_plan(counts.mine[0].clone(), self.policy, self.domains, self.align)
        dst, jobs, slot = [], [], []
        for rank, ids_TJ, earlier_CE in zip(self.transport.held, ids, earlier, strict=True):
            dst.append(destination_rows(plan, ids_TJ, earlier_CE, rank, self.rows))
            jobs.append(dst[0].new_empty(1 + ranks * self.slots))
            slot.append(dst[0].new_empty(self.home, ranks))
            kernels.list_copies[(1,)](
                plan.slots_RB, jobs[-1], slot[-1], rank, ranks, self.home, self.slots, BLOCK=1024, num_warps=4
            )
        return DirectPlanned(plan, tuple(dst), tuple(jobs), tuple(slot))

    def begin_backward(self) -> None:
        """All ranks are done with the buffers; needed before a dispatch that follows no plan."""
        self._grads()
        self.transport.barrier()

    def send(
        self, x: Sequence[torch.Tensor], planned: DirectPlanned, weights: Sequence[torch.Tensor] | None, buffer: int = 0
    ) -> None:
        """Write rows [T, L] into the receive buffers, and what else a plan's first rows need: weights [T, J], indices.

        The second rows of a plan come without weights.
        """
        space = self.workspace
        for i, (x_TL, dst_TJ) in enumerate(zip(x, planned.dst, strict=True)):
            rank = self.transport.held[i]
            if x_TL.shape[0]:
                weights_TJ = x_TL if weights is None else weights[i]
                kernels.push_rows[(x_TL.shape[0],)](
                    x_TL.contiguous(),
                    weights_TJ.contiguous(),
                    dst_TJ,
                    space.rows[buffer].table,
                    space.origin.table,
                    space.back.table,
                    space.weights.table,
                    dst_TJ,
                    rank * self.choices,
                    self.rows,
                    self.width,
                    self.top_k,
                    ROUTE=weights is not None,
                    JP=triton.next_power_of_2(self.top_k),
                    LP=self._column,
                    num_warps=8 if self._column >= 4096 else 4,
                )
            if self.align > 1 and weights is not None:
                plan = planned.plan
                kernels.mark_padding[(plan.ends_RG.shape[1],)](
                    plan.ends_RG[rank],
                    plan.rows_RG[rank],
                    space.origin.mine[i],
                    space.back.mine[i],
                    space.weights.mine[i],
                    BLOCK=triton.next_power_of_2(self.align),
                    num_warps=1,
                )

    def receive(
        self, planned: DirectPlanned, weights: bool, buffer: int = 0
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """After a barrier: (rows [N, L] of own experts, rows of copied experts from 0, and the weights [N] of either).

        The first and third are views of the receive buffers, which the next dispatch overwrites.
        """
        space = self.workspace
        mine, copied = list(space.rows[buffer].mine), [_beside(rows, self.slots) for rows in space.rows[buffer].mine]
        weight, weight_copied = list(space.weights.mine), [_beside(w, self.slots) for w in space.weights.mine]
        for i, rank in enumerate(self.transport.held):
            kernels.expand[(self.rows,)](
                mine[i],
                copied[i],
                space.origin.mine[i],
                weight[i],
                weight_copied[i],
                planned.plan.ends_RG[rank],
                self.home,
                self.home + self.slots,
                self.width,
                WEIGHTS=weights,
                LP=self._column,
                num_warps=4,
            )
        return mine, copied, weight, weight_copied

    def push_copies(self, weights: Sequence[Weights], planned: DirectPlanned) -> int:
        """Write own experts into the slots that the plan asks for; returns the generation of the copies."""
        space = self.workspace
        space.generation += 1
        for k, slots in enumerate(space.slots):
            for i, rank in enumerate(self.transport.held):
                own = weights[i][k]
                kernels.push_experts[(_programs(own.device),)](
                    own,
                    planned.plan.slots_RB,
                    planned.jobs[i],
                    slots.table,
                    rank,
                    self.home,
                    self.slots,
                    own[0].numel(),
                    BLOCK=_WORDS,
                    num_warps=8,
                )
        return space.generation

    def start_copies(self, weights: Sequence[Weights], planned: DirectPlanned) -> int:
        """`push_copies` and a barrier beside what follows on this stream, up to `wait_for_copies`."""
        if self._side is None or not self.slots:
            return self.push_copies(weights, planned)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            generation = self.push_copies(weights, planned)
            self.transport.barrier(1)
        return generation

    def wait_for_copies(self) -> None:
        """What follows on this stream finds the copies that were started in its rank's slots."""
        if self._side is not None and self.slots:
            torch.cuda.current_stream().wait_stream(self._side)

    def copies(self, held_index: int, generation: int) -> Weights:
        """The slots [B, ...] of a rank here. Raises Error once they have been written again."""
        if generation != self.workspace.generation:
            raise Error(
                f"slots: copies of generation {generation} are gone, the workspace holds "
                f"{self.workspace.generation}; push them again before the experts run"
            )
        return tuple(slots.mine[held_index] for slots in self.workspace.slots)

    def return_rows(self, out: Sequence[torch.Tensor], copied: Sequence[torch.Tensor], planned: DirectPlanned) -> None:
        """Write the results of own and of copied experts back to where their tokens are."""
        for i, rank in enumerate(self.transport.held):
            kernels.return_rows[(self.rows,)](
                out[i],
                copied[i],
                self.workspace.back.mine[i],
                self.workspace.results.table,
                planned.plan.ends_RG[rank],
                self.home,
                self.home + self.slots,
                self.choices,
                self.width,
                LP=self._column,
                num_warps=4,
            )

    def combine(self, planned: DirectPlanned) -> list[torch.Tensor]:
        """y [T, L] of each rank here: its choices' results added in choice order in max(fp32, dtype), cast once."""
        out = []
        for results, dst_TJ in zip(self.workspace.results.mine, planned.dst, strict=True):
            y_TL = results.new_empty(dst_TJ.shape[0], self.width)
            if y_TL.shape[0]:
                kernels.sum_choices[(y_TL.shape[0],)](
                    y_TL,
                    results,
                    dst_TJ,
                    self.width,
                    self.top_k,
                    WIDE=_WIDE[torch.promote_types(self.dtype, torch.float32)],
                    LP=self._column,
                    num_warps=4,
                )
            out.append(y_TL)
        return out

    def return_numbers(
        self, own: Sequence[torch.Tensor], copied: Sequence[torch.Tensor], planned: DirectPlanned
    ) -> None:
        """Write a number a row, [N] of own and of copied experts' rows, back to where the choices are."""
        for i, rank in enumerate(self.transport.held):
            kernels.return_numbers[(triton.cdiv(self.rows, 1024),)](
                own[i],
                copied[i],
                self.workspace.back.mine[i],
                self.workspace.numbers.table,
                planned.plan.ends_RG[rank],
                self.home,
                self.home + self.slots,
                self.choices,
                BLOCK=1024,
                num_warps=4,
            )

    def numbers(self, planned: DirectPlanned) -> list[torch.Tensor]:
        """[T, J] of each rank here: what came back for its choices; 0 where nothing was routed."""
        mine = self.workspace.numbers.mine
        return [
            torch.where(dst_TJ >= 0, numbers[: dst_TJ.numel()].view(dst_TJ.shape), 0)
            for numbers, dst_TJ in zip(mine, planned.dst, strict=True)
        ]

    def offer_grads(self, copies: Sequence[Weights], planned: DirectPlanned) -> None:
        """Gradients [B, ...] of copied experts to where their homes read them after a barrier."""
        for i, rank in enumerate(self.transport.held):
            for grads, shared in zip(copies[i], self._grads(), strict=True):
                kernels.keep_used[(self.slots, 32)](
                    grads, shared.mine[i], planned.plan.slots_RB[rank], grads[0].numel(), BLOCK=_WORDS, num_warps=4
                )

    def reduce_grads(self, own: Sequence[Weights], planned: DirectPlanned) -> None:
        """Add the gradients of copies to those of own experts [M, ...], in order of rank, in place, cast once."""
        for i in range(len(own)):
            for grads, shared in zip(own[i] if self.slots else (), self._grads(), strict=True):
                kernels.add_copies[(self.home, 32)](
                    grads,
                    planned.slot[i],
                    shared.table,
                    self.transport.ranks,
                    grads[0].numel(),
                    WIDE=_WIDE[torch.promote_types(grads.dtype, torch.float32)],
                    BLOCK=_WORDS,
                    num_warps=4,
                )

    def _grads(self) -> list[Shared]:
        if len(self.workspace.rows) < 2:
            raise Error("direct: the workspace was made with training=False; it has no buffers for a backward pass")
        return self.workspace.grads

    def raise_if_refused(self) -> None:
        """Raise Error if any id was out of range since the last call; waits for the device."""
        if int(self._flag):
            self._flag.zero_()
            raise Error(f"plan: ids were out of range; must be in -1..{self.experts - 1}")

    def stats(self, planned: DirectPlanned, row_bytes: int, expert_bytes: int) -> Stats:
        """What the plan did; every rank must call it. Waits for the device."""
        self.raise_if_refused()
        ranks = self.transport.ranks
        sizes = []
        for dst_TJ in planned.dst:
            rank_TJ = torch.where(dst_TJ >= 0, dst_TJ // self.rows, ranks).long()
            met_TR = torch.zeros(dst_TJ.shape[0], ranks + 1, dtype=torch.int64, device=dst_TJ.device)
            met_TR.scatter_(1, rank_TJ, 1)
            choices_R = torch.bincount(rank_TJ.flatten(), minlength=ranks + 1)
            sizes.append(torch.cat([met_TR.sum(0)[:ranks], choices_R[:ranks]]))
        table = self.transport.gather(sizes).tolist()
        payloads, choices = [row[:ranks] for row in table], [row[ranks:] for row in table]
        return measure(planned.plan, payloads, choices, self.domains, row_bytes, expert_bytes)

    def copy_bytes(self, numbers: int, size: int) -> int:
        """What a copy of `numbers` dense weights of `size` bytes each takes on the way."""
        return numbers * size

    def _check_ids(self, ids: Sequence[torch.Tensor]) -> None:
        if len(ids) != len(self.transport.held):
            raise Error(f"plan: ids of {len(ids)} ranks; this process holds {len(self.transport.held)}")
        for x in ids:
            if x.dim() != 2 or x.shape[1] != self.top_k or x.dtype != torch.int64 or x.shape[0] > self.tokens:
                raise Error(
                    f"plan: ids are {x.dtype} {tuple(x.shape)}; must be int64 [tokens, {self.top_k}] "
                    f"of at most {self.tokens} tokens"
                )


def _beside(like: torch.Tensor, slots: int) -> torch.Tensor:
    """Room for the rows of copied experts, none where there are no slots; tests fill it with NaN here."""
    return like.new_empty(like.shape if slots else (0, *like.shape[1:]))


def _programs(device: torch.device) -> int:
    # Enough bytes under way for NVLink; on a GPU the other multiprocessors are left to the experts.
    return 64 if device.type == "cuda" else 3


__all__ = ["DirectParallel", "DirectPlanned", "Workspace"]
