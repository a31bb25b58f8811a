"""A Perilune model whose experts are spread over ranks: the `mixture` of its `Parts`, and its experts cut and joined.

Legend: E experts, M experts of one rank, T tokens, L width of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from perilune.config import Activation
from perilune.errors import Error
from perilune.ops.moe import Dense, Packed, Routing
from perilune.ops.names import is_replay
from perilune.parallel.expert.layer import balanced_experts, even_split
from perilune.parallel.expert.stats import Stats
from perilune.parallel.expert.steps import ExpertParallel

if TYPE_CHECKING:
    from perilune.parallel.expert.direct import DirectParallel

# The stacked parameters of a layer's experts, by the end of their names.
STACKED = ("gate_up_E2FL", "down_ELF")


class Mixture:
    """`perilune.model.parts.mixture` over the ranks of `parallel`; several in this process share its tokens evenly.

    All layers share its buffers and slots. `planned` collects the plans of the calls until `drain`.
    """

    def __init__(self, parallel: ExpertParallel | DirectParallel, exact: bool = False) -> None:
        self.parallel, self.exact = parallel, exact
        self.planned: list[Any] = []
        self._sizes = (0, 0)

    def __call__(
        self,
        z_TL: torch.Tensor,
        routing: Routing,
        weights: Dense | Packed,
        activation: Activation,
        experts: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """y_TL. `experts` is not used: products on other ranks are not this model's to choose.

        Raises Error where the model rounds what stands between the experts' products (quant.activations "all").
        """
        if "inner_rule" in getattr(experts, "keywords", {}):
            raise Error("quant.activations is 'all'; experts on several ranks allow 'none' and 'inputs'")
        sizes = even_split(z_TL.shape[0], len(self.parallel.transport.held))
        planned = self.parallel.plan(routing.ids_TJ.split(sizes))
        if not is_replay():
            self.planned.append(planned)
        if isinstance(weights, Dense):
            one = weights.gate_up_E2FL[0].numel() + weights.down_ELF[0].numel()
            copy_bytes = self.parallel.copy_bytes(one, weights.down_ELF.element_size())
            self._sizes = (z_TL.shape[1] * z_TL.element_size(), copy_bytes)
        return balanced_experts(self.parallel, z_TL, routing.weights_TJ, weights, planned, activation, exact=self.exact)

    def drain(self) -> list[Stats]:
        """What the plans since the last call did, in the order of the layers; every rank must call it."""
        planned, self.planned = self.planned, []
        return [self.parallel.stats(p, *self._sizes) for p in planned]


def is_stacked(name: str) -> bool:
    """Whether a parameter (or its optimizer state) of this name holds one matrix an expert."""
    return name.rpartition(".")[2] in STACKED


def cut_experts(model: nn.Module, shard: int, shards: int) -> None:
    """Keep only the experts at home on rank `shard` of `shards`, in place. Raises Error when they do not divide."""
    for module in model.modules():
        for name in STACKED:
            whole = getattr(module, name, None)
            if isinstance(whole, nn.Parameter):
                setattr(module, name, nn.Parameter(cut(whole.detach(), shard, shards), whole.requires_grad))


def join_experts(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """The opposite of `cut_experts`: all experts on every rank of the group."""
    for module in model.modules():
        for name in STACKED:
            part = getattr(module, name, None)
            if isinstance(part, nn.Parameter):
                setattr(module, name, nn.Parameter(join(part.detach(), group), part.requires_grad))


def cut(whole_E: torch.Tensor, shard: int, shards: int) -> torch.Tensor:
    """[E, ...] -> the [M, ...] of one rank, with memory of its own."""
    if whole_E.shape[0] % shards:
        raise Error(f"parallel.ep is {shards}; must divide the {whole_E.shape[0]} experts of the model")
    return whole_E.chunk(shards)[shard].clone()


def join(part_M: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[M, ...] of every rank of the group -> [E, ...]."""
    parts = [torch.empty_like(part_M) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part_M.contiguous(), group=group)
    return torch.cat(parts)


def summary(stats: list[Stats]) -> Mapping[str, float]:
    """One step in a few numbers: the worst layer before and after, and sums over layers and micro-batches."""
    return {
        "before": max((s.before for s in stats), default=1.0),
        "after": max((s.after for s in stats), default=1.0),
        "max_vio": max((s.max_vio for s in stats), default=0.0),
        "residual": max((s.residual for s in stats), default=0),
        "copies": sum(s.copies for s in stats),
        "moved": sum(s.moved for s in stats),
        "copy_bytes": sum(s.copy_bytes for s in stats),
        "row_bytes": sum(s.row_bytes for s in stats),
    }


__all__ = ["Mixture", "cut", "cut_experts", "is_stacked", "join", "join_experts", "summary"]
