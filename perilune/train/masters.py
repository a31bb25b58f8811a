"""Float32 copies of low-precision weights, so that small updates are not lost to rounding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Masters:
    """What the optimizers update: a float32 copy of every bfloat16 parameter, and the other parameters themselves."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.params: dict[str, Tensor] = {
            name: nn.Parameter(p.detach().float()) if _low(p) else p for name, p in self.weights.items()
        }

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(w, self.params[name]) for name, w in self.weights.items() if self.params[name] is not w]

    def take_gradients(self) -> None:
        """Move the weights' gradients to the copies."""
        for weight, master in self._pairs():
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the copies to the weights."""
        for weight, master in self._pairs():
            weight.copy_(master)

    def state(self) -> Mapping[str, Tensor]:
        """The copies by parameter name."""
        return {name: master for name, master in self.params.items() if master is not self.weights[name]}


def _low(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


__all__ = ["Masters"]
