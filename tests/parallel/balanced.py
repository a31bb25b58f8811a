"""One mixture layer with its inputs, computed in one place: what the balanced layer must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from perilune.config import Activation
from perilune.ops import moe
from perilune.ops.moe import Dense, Packed

if TYPE_CHECKING:
    # Importing its kernels before `triton_cpu` would leave them without the interpreter.
    from perilune.parallel.expert import DirectParallel

EXPERTS, TOP_K, WIDTH, INNER = 16, 3, 32, 24
ACT = Activation("situ")

Layer = Callable[[torch.Tensor, moe.Routing, Dense], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Random inputs; `skew` lifts the first three experts, all at home on rank 0."""

    tokens: int
    skew: float
    dtype: torch.dtype
    seed: int = 0

    @property
    def bias(self) -> torch.Tensor:
        return torch.zeros(EXPERTS, dtype=self.wide)

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x_TL, logits_TE, gate_up_E2FL, down_ELF; fresh leaves with the same numbers each time."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        x, logits = draw(self.tokens, WIDTH), draw(self.tokens, EXPERTS)
        logits[:, :3] += self.skew
        gate_up, down = draw(EXPERTS, 2 * INNER, WIDTH) / WIDTH**0.5, draw(EXPERTS, WIDTH, INNER) / INNER**0.5
        # Routing must not change with the dtype under test.
        logits = logits.float().to(self.wide)
        return (
            x.to(self.dtype).requires_grad_(),
            logits.requires_grad_(),
            gate_up.to(self.dtype).requires_grad_(),
            down.to(self.dtype).requires_grad_(),
        )


def gradients(case: Case, layer: Layer, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """[y, dx, d logits, d gate_up, d down] for a fixed random dy."""
    leaves = [t.detach().to(device).requires_grad_() for t in case.leaves()]
    x, logits, gate_up, down = leaves
    y = layer(x, moe.route(logits, case.bias.to(device), TOP_K, 2.5), Dense(gate_up, down))
    return [y.detach(), *torch.autograd.grad(y, leaves, d_y(case).to(device))]


def d_y(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed + 1)
    return torch.randn(case.tokens, WIDTH, generator=generator, dtype=torch.float64).to(case.dtype)


def dense(x: torch.Tensor, routing: moe.Routing, weights: Dense) -> torch.Tensor:
    """The layer of `perilune.model.moe`, experts only."""
    return mixture(x, routing.ids_TJ, routing.weights_TJ, weights, EXPERTS, exact=True)


def mixture(
    x: torch.Tensor, ids: torch.Tensor, weights_TJ: torch.Tensor, weights: Dense | Packed, experts: int, exact: bool
) -> torch.Tensor:
    """Plain sum over choices of each expert's output for a weighted activation."""
    order, offs = moe.permute(ids, experts)
    row_weights = weights_TJ.flatten().index_select(0, order)
    rows = moe.dispatch(x, order, ids.shape[1])
    out = moe.experts(rows, weights, offs, ACT, exact=exact, row_weights_R=row_weights)
    return moe.combine(out, order, torch.ones_like(weights_TJ))


def poisoned(parallel: DirectParallel) -> DirectParallel:
    """Every buffer that others write starts as NaN."""
    space = parallel.workspace
    for shared in (*space.rows, space.weights, space.results, space.numbers, *space.slots, *space.grads):
        for tensor in shared.mine:
            tensor.fill_(float("nan"))
    return parallel
