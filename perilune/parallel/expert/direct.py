"""The five steps where ranks write each other's memory: static shapes, nothing read back, fit for a CUDA graph.

Same plan, rows, slots and sums as `steps.ExpertParallel`; `exchange` moves rows (`direct_rows`), `copies` moves experts
(`direct_copies`).

Three barriers a pass: before rows are written (counts are exchanged under it, or everybody is done with the buffers),
after they have arrived, and after results have. What travels on a stream of its own has a barrier of its own: copies of
experts, and the second rows of a backward pass.

Legend: R ranks, E experts, M experts at home, B slots, T tokens, J choices, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from perilune.errors import Error
from perilune.parallel.expert import direct_triton as kernels
from perilune.parallel.expert.capacity import worst_case_rows
from perilune.parallel.expert.direct_copies import ExpertCopies
from perilune.parallel.expert.direct_rows import RowExchange
from perilune.parallel.expert.plan import Plan, slots_for
from perilune.parallel.expert.plan import plan as make_plan
from perilune.parallel.expert.policy import Policy, exact
from perilune.parallel.expert.rows_triton import count_choices, destination_rows
from perilune.parallel.expert.stats import Stats, measure
from perilune.parallel.expert.symmetric import Direct
from perilune.parallel.expert.workspace import Workspace


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
        self.exchange = RowExchange(transport, self.workspace, top_k, self.home, align)
        self.copies = ExpertCopies(transport, self.workspace, self.home, self.slots)
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


__all__ = ["DirectParallel", "DirectPlanned", "Workspace"]
