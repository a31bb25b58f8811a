"""Memory that ranks write for each other, allocated once: it depends on shapes, not on the routing.

Legend: R ranks, E experts, B slots, T tokens, J choices, N rows, L width, F expert width.
"""

from __future__ import annotations

import torch

from perilune.parallel.expert.symmetric import Direct


class Workspace:
    """Receive buffers and slots, one set for all layers of one shape; memory does not depend on the routing.

    rows: receive buffers [N, L], a second one for training. origin, back: int32 [N], which row holds a row's payload,
    and where its result goes (rank times T J, plus choice). weights: [N], of the rows that arrive. results [T J, L],
    numbers [T J]: what comes back. slots, grads: for each weight of the experts, B copies and their gradients.
    """

    def __init__(
        self,
        transport: Direct,
        rows: int,
        choices: int,
        experts: int,
        slots: int,
        width: int,
        inner: int,
        dtype: torch.dtype,
        training: bool = True,
    ) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        self.key = (rows, choices, experts, slots, width, inner, dtype)
        self.counts = [transport.share((transport.ranks, experts), torch.int64) for _ in range(2)]
        self.rows = [transport.share((rows, width), dtype) for _ in range(2 if training else 1)]
        self.origin, self.back = (transport.share((rows,), torch.int32) for _ in range(2))
        self.weights = transport.share((rows,), wide)
        self.results, self.numbers = transport.share((choices, width), dtype), transport.share((choices,), wide)
        shapes = [(2 * inner, width), (width, inner)] if slots else []
        self.slots = [transport.share((slots, *shape), dtype) for shape in shapes]
        self.grads = [transport.share((slots, *shape), dtype) for shape in shapes] if training else []
        self.plans = 0
        self.generation = 0


__all__ = ["Workspace"]
