"""What the optimizers update: plain tensors in float32 or wider, this rank's part of each parameter.

Quantisation-aware training lives here: the model multiplies by weights that are on the MXFP4 grid, the optimizer
updates unrounded copies of them, and a gradient with respect to the rounded weight is taken for the copy's
(straight-through). So rounding happens once a step, whatever the number of micro-batches, and what is exported is
bit for bit what was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor, nn

from perilune.errors import Error
from perilune.ops.mx import BLOCK, fake_quantize
from perilune.parallel.collectives import local
from perilune.parallel.packed_gather import gather_packed
from perilune.train.pieces import pieces


class Masters:
    """A float32 copy of every bfloat16 parameter, so that small updates are not lost to rounding; the local part of
    one that FSDP has cut (the same memory); other parameters themselves.

    quantized: names of the parameters that are rounded to MXFP4 by `rule`; they have a copy in any dtype, are rounded
    at once, and FSDP gathers their codes. Raises Error, naming the parameter, where this rank's part has rows that
    blocks of 32 do not fill.
    """

    def __init__(self, model: nn.Module, quantized: Set[str] = frozenset(), rule: str = "even") -> None:
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.quantized, self.rule = quantized & self.weights.keys(), rule
        for name in sorted(self.quantized):
            width = local(self.weights[name].detach()).shape[-1]
            if width % BLOCK:
                raise Error(f"{name} has rows of {width} values on this rank; MXFP4 needs a multiple of {BLOCK}")
        self.params: dict[str, Tensor] = {name: _updated(p, name in self.quantized) for name, p in self.weights.items()}
        self.write_back(self.quantized)
        gather_packed(model, self.quantized, rule)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(w, self.params[name]) for name, w in self.weights.items() if self.params[name] is not w]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move the weights' gradients to what is updated."""
        masters = dict(self._pairs())
        # In pieces, for those of a piece exist in both dtypes at once.
        for piece in pieces(masters):
            _take({weight: masters[weight] for weight in piece})

    @torch.no_grad()
    def write_back(self, names: Set[str] | None = None) -> None:
        """Round the copies to the weights (of `names`; None: all)."""
        weights, masters = [], []
        for name in self.weights if names is None else names:
            weight, master = self.weights[name], self.params[name]
            if name in self.quantized:
                fake_quantize(master, "mxfp4", self.rule, out=local(weight))
            elif _low(weight):
                weights.append(local(weight))
                masters.append(master)
        if weights:
            torch._foreach_copy_(weights, masters)


def _take(pairs: Mapping[Tensor, Tensor]) -> None:
    """`take_gradients` of some weights and their masters, by one copy: a launch for each would cost the host more."""
    given, taken = [], []
    for weight, master in pairs.items():
        grad, weight.grad = weight.grad, None
        if grad is not None:
            grad = local(grad)
            if grad.dtype != master.dtype:
                given.append(grad)
                grad = torch.empty_like(grad, dtype=master.dtype)
                taken.append(grad)
        master.grad = grad
    if given:
        torch._foreach_copy_(taken, given)


def _updated(weight: Tensor, copied: bool) -> Tensor:
    part = local(weight.detach())
    if copied or _low(part):
        return nn.Parameter(part.to(torch.promote_types(part.dtype, torch.float32), copy=True))
    return weight if isinstance(weight, nn.Parameter) and not hasattr(weight, "to_local") else nn.Parameter(part)


def _low(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


__all__ = ["Masters"]
