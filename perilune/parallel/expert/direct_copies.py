"""Copies of experts in memory that all ranks reach, and the way of their gradients home.

Both travel on a stream of their own: copies while own experts compute, gradients while the rows' gradients of own
experts are multiplied. The programs that move them take few registers and no shared memory, so that they fit on a
multiprocessor beside a product's.

Legend: R ranks, M experts at home, B slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from perilune.errors import Error
from perilune.parallel.expert import direct_triton as kernels
from perilune.parallel.expert.aside import Aside
from perilune.parallel.expert.symmetric import Direct
from perilune.parallel.expert.workspace import Workspace

if TYPE_CHECKING:
    from perilune.parallel.expert.direct import DirectPlanned

Weights = tuple[torch.Tensor, ...]
_BLOCK = 4096


class ExpertCopies:
    """The slots of a workspace."""

    def __init__(self, transport: Direct, workspace: Workspace, home: int, slots: int) -> None:
        self.transport, self.workspace, self.home, self.slots = transport, workspace, home, slots
        self.aside = Aside(transport.device)
        # Stores that a link cannot take pile up and hold back the product's loads, so few push; loads may be many.
        processors = 4
        if transport.device.type == "cuda":
            processors = torch.cuda.get_device_properties(transport.device).multi_processor_count
        self._pushing, self._adding = processors // 2, 2 * processors

    def push(self, weights: Sequence[Weights], planned: DirectPlanned) -> int:
        """Write own experts [M, ...] into the slots that the plan asks for; returns the generation of the copies."""
        space = self.workspace
        space.generation += 1
        for k, slots in enumerate(space.slots):
            for i, rank in enumerate(self.transport.held):
                own = weights[i][k]
                kernels.push_experts[(self._pushing,)](
                    own,
                    planned.plan.slots_RB,
                    planned.jobs[i],
                    slots.table,
                    rank,
                    self.home,
                    self.slots,
                    own[0].numel(),
                    BLOCK=_BLOCK,
                    num_warps=8,
                )
        return space.generation

    def start(self, weights: Sequence[Weights], planned: DirectPlanned, mark: torch.cuda.Event | None) -> int:
        """`push` beside the product that was launched after the mark; `wait` for the copies that come here."""
        with self.aside.after(mark):
            generation = self.push(weights, planned)
            # Nobody waits on this stream: a waiting program would keep a later product's away.
            self.transport.signal(1)
        return generation

    def wait(self) -> None:
        """What follows on this stream finds all ranks' copies in the slots."""
        self.aside.join()
        self.transport.wait(1)

    def weights(self, held_index: int, generation: int) -> Weights:
        """The slots [B, ...] of a rank here. Raises Error once they have been written again."""
        if generation != self.workspace.generation:
            raise Error(
                f"slots: copies of generation {generation} are gone, the workspace holds "
                f"{self.workspace.generation}; push them again before the experts run"
            )
        return tuple(slots.mine[held_index] for slots in self.workspace.slots)

    def gradients(self, held_index: int) -> Weights:
        """Where the gradients [B, ...] of a rank's copies are written, for their homes to read."""
        return tuple(grads.mine[held_index] for grads in self.workspace.grads)

    def start_reduce(self, own: Sequence[Weights], planned: DirectPlanned, mark: torch.cuda.Event | None) -> None:
        """Add the gradients of copies to those of own experts [M, ...], in order of rank, in place, cast once.

        Beside the product that was launched after the mark, up to `aside.join`; both were written before the mark.
        """
        with self.aside.after(mark):
            self.transport.barrier(3)
            self._reduce(own, planned)

    def _reduce(self, own: Sequence[Weights], planned: DirectPlanned) -> None:
        for i in range(len(own)):
            for grads, shared in zip(own[i] if self.slots else (), self.workspace.grads, strict=True):
                kernels.add_copies[(self._adding,)](
                    grads,
                    planned.slot[i],
                    shared.table,
                    self.transport.ranks,
                    self.home,
                    grads[0].numel(),
                    WIDE=kernels.WIDE[torch.promote_types(grads.dtype, torch.float32)],
                    BLOCK=_BLOCK,
                    num_warps=8,
                )


__all__ = ["ExpertCopies", "Weights"]
