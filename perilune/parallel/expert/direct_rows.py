"""Rows that ranks write into each other's buffers, and the way of the results back.

A token's row is written straight into the receive buffer of each rank that computes it; there its other choices' rows
are copied from it, those of copied experts into a buffer of their own, so that either group of experts is one grouped
product. Results are written back one a choice.

Legend: R ranks, M experts at home, B slots, T tokens, J choices, N rows, L width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton

from perilune.errors import Error
from perilune.parallel.expert import direct_triton as kernels
from perilune.parallel.expert.aside import Aside
from perilune.parallel.expert.symmetric import Direct
from perilune.parallel.expert.workspace import Workspace

if TYPE_CHECKING:
    from perilune.parallel.expert.direct import DirectPlanned


class RowExchange:
    """The buffers of a workspace. home: M; align: groups of rows are padded to a multiple of it."""

    def __init__(self, transport: Direct, workspace: Workspace, top_k: int, home: int, align: int) -> None:
        self.transport, self.workspace, self.top_k, self.home, self.align = transport, workspace, top_k, home, align
        self.rows, self.choices, _, self.slots, self.width, _, self.dtype = workspace.key
        self._column = triton.next_power_of_2(self.width)
        self.aside = Aside(transport.device)

    def begin_backward(self) -> None:
        """All ranks are done with the buffers; needed before a dispatch that follows no plan."""
        if len(self.workspace.rows) < 2:
            raise Error("direct: the workspace was made with training=False; it has no buffers for a backward pass")
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
        self, planned: DirectPlanned
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """After a barrier: (rows [N, L] of own experts, rows of copied experts from 0, and the weights [N] of either).

        The first and third are views of the receive buffers, which the next dispatch overwrites.
        """
        weight = list(self.workspace.weights.mine)
        weight_copied = [_beside(w, self.slots) for w in weight]
        mine = list(self.workspace.rows[0].mine)
        copied = [_beside(rows, self.slots) for rows in mine]
        self._expand(mine, copied, weight, weight_copied, planned, weights=True)
        return mine, copied, weight, weight_copied

    def second(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Room for the second rows of a plan: (rows of own experts, rows of copied experts)."""
        mine = list(self.workspace.rows[1].mine)
        return mine, [_beside(rows, self.slots) for rows in mine]

    def start_second(
        self,
        x: Sequence[torch.Tensor],
        room: tuple[list[torch.Tensor], list[torch.Tensor]],
        planned: DirectPlanned,
        mark: torch.cuda.Event | None,
    ) -> None:
        """Rows [T, L] that go where a plan's first ones went, contiguous, into `second`'s room.

        Beside the product that was launched after the mark, up to `aside.join`; all was there before the mark.
        """
        weight = list(self.workspace.weights.mine)
        with self.aside.after(mark):
            self.send(x, planned, None, buffer=1)
            self.transport.barrier(2)
            self._expand(*room, weight, weight, planned, weights=False)

    def _expand(
        self,
        mine: Sequence[torch.Tensor],
        copied: Sequence[torch.Tensor],
        weight: Sequence[torch.Tensor],
        weight_copied: Sequence[torch.Tensor],
        planned: DirectPlanned,
        weights: bool,
    ) -> None:
        for i, rank in enumerate(self.transport.held):
            kernels.expand[(self.rows,)](
                mine[i],
                copied[i],
                self.workspace.origin.mine[i],
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
                    WIDE=kernels.WIDE[torch.promote_types(self.dtype, torch.float32)],
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


def _beside(like: torch.Tensor, slots: int) -> torch.Tensor:
    """Room for the rows of copied experts, none where there are no slots; tests fill it with NaN here."""
    return like.new_empty(like.shape if slots else (0, *like.shape[1:]))


__all__ = ["RowExchange"]
