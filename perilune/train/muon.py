"""Muon: momentum whose matrices are made nearly orthogonal before they are applied.

Source: Keller Jordan et al., Muon (2024), for the Newton-Schulz polynomial; Liu et al., "Muon is scalable for LLM
training" (2025), for the update's size and the weight decay; the Kimi K3 report for one matrix a head.

Legend: B matrices of one shape, M rows, N columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from perilune.errors import Error
from perilune.memory.optimizer import whole
from perilune.parallel.muon import Spread

# (optimizer, parameters) -> the parameters in pieces whose states are there (`perilune.memory.optimizer`).
Chunks = Callable[[torch.optim.Optimizer, Sequence[Tensor]], Iterator[Sequence[Tensor]]]

_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalize(x_BMN: Tensor, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """x = U S Vt -> about U Vt, for every matrix of the batch; singular values end in about [0.7, 1.2].

    Newton-Schulz: x <- a x + (b A + c A A) x with A = x xt, after scaling each matrix to Frobenius norm 1. Runs in
    `dtype` and returns it. A zero matrix stays zero.
    """
    y = x_BMN.to(dtype)
    y = y / (torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True) + 1e-7)
    wide = y.shape[-2] <= y.shape[-1]
    y = y if wide else y.mT  # the small side makes the small Gram matrix
    for _ in range(steps):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), y, beta=_A)
    return y if wide else y.mT


class Muon(torch.optim.Optimizer):
    """Muon over 2-D [M, N] and 3-D [E, M, N] parameters (one matrix an expert).

    A parameter group's `heads = h` says that each matrix is h matrices lying row after row (the heads of a q, k or v
    projection), each made orthogonal by itself. All matrices of one shape, over all parameters, are one batched
    Newton-Schulz. An update is scaled by 0.2 sqrt(max(M, N)), which gives it the mean square of a typical AdamW
    update, so that both take one learning rate; weight decay is decoupled.

    torch.optim.Muon does not fit: it takes 2-D parameters only (experts are 3-D), runs Newton-Schulz in bfloat16
    (a gradient difference of 1e-3 becomes one of several per cent, and equality tests need fp32 or fp64), one matrix
    at a time, and knows no heads.

    State of a parameter: "momentum", a tensor like it. Raises Error for a shape that cannot be split.

    spread: turns the parameters whose matrices lie on several ranks (`perilune.parallel.muon`); names: theirs.
    chunks: brings the momenta where they do not lie on the device.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.float32,
        heads: int = 1,
        spread: Spread | None = None,
        names: Mapping[Tensor, str] | None = None,
        chunks: Chunks = whole,
    ) -> None:
        self.away = {p: n for p, n in (names or {}).items() if spread is not None and spread.takes(n)}
        self.spread, self.chunks = spread, chunks
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "heads": heads,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for param in group["params"]:
                if param not in self.away:
                    _matrices(param, group["heads"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        if closure is not None:
            raise Error("Muon.step takes no closure")
        buckets: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        groups: dict[Tensor, dict[str, Any]] = {}
        away: list[Tensor] = []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                groups[param] = group
                if param in self.away:
                    away.append(param)
                else:
                    shape = (param.shape[-2] // group["heads"], param.shape[-1])
                    buckets[(*shape, group["lr"], group["ns_steps"], group["ns_dtype"])].append(param)
        for (rows, columns, lr, ns_steps, ns_dtype), bucket in buckets.items():
            updates = self._updates(bucket, groups)
            parts = [_matrices(updates.pop(param), groups[param]["heads"]) for param in bucket]
            counts = [part_BMN.shape[0] for part_BMN in parts]
            turned_BMN = orthogonalize(torch.cat(parts), ns_steps, ns_dtype).contiguous()
            turned = zip(bucket, torch.split(turned_BMN, counts), strict=True)
            steps = [part.view(param.shape).to(param.dtype) for param, part in turned]
            torch._foreach_add_(bucket, steps, alpha=-lr * 0.2 * max(rows, columns) ** 0.5)
        self._turn_away(self._updates(away, groups))

    def _updates(self, params: Sequence[Tensor], groups: Mapping[Tensor, dict[str, Any]]) -> dict[Tensor, Tensor]:
        """Momentum and weight decay of the parameters; what is to be made orthogonal of each.

        All of a group in one operation: a GPU's host would spend more on launches than the arithmetic takes.
        """
        updates: dict[Tensor, Tensor] = {}
        for chunk in self.chunks(self, params):
            for group in self.param_groups:
                mine = [param for param in chunk if groups[param] is group]
                if not mine:
                    continue
                grads = [param.grad for param in mine if param.grad is not None]
                averages = [self._average(param) for param in mine]
                torch._foreach_mul_(averages, group["momentum"])
                torch._foreach_add_(averages, grads)
                torch._foreach_mul_(mine, 1 - group["lr"] * group["weight_decay"])
                updates |= zip(mine, torch._foreach_add(grads, averages, alpha=group["momentum"]), strict=True)
        return updates

    def _average(self, param: Tensor) -> Tensor:
        """The momentum, from zero on."""
        state = self.state[param]
        if not state:
            state["momentum"] = torch.zeros_like(param)
        momentum: Tensor = state["momentum"]
        return momentum

    def _turn_away(self, updates: Mapping[Tensor, Tensor]) -> None:
        """The same for matrices that lie on several ranks; all groups have one learning rate and one iteration."""
        if self.spread is None or not updates:
            return
        group = self.param_groups[0]
        turned = self.spread.turn(
            {self.away[param]: update for param, update in updates.items()},
            lambda x_BMN: orthogonalize(x_BMN, group["ns_steps"], group["ns_dtype"]),
        )
        for param in updates:
            name = self.away[param]
            scale = 0.2 * max(self.spread.matrices[name].shape) ** 0.5
            param.add_(turned[name].to(param.dtype), alpha=-group["lr"] * scale)


def _matrices(value: Tensor, heads: int) -> Tensor:
    """`value` as the [B, M, N] batch of matrices that Muon treats one by one."""
    if value.dim() not in (2, 3) or heads < 1 or value.shape[-2] % heads:
        raise Error(
            f"Muon: parameter of shape {tuple(value.shape)} with {heads} heads; needs 2 or 3 dims, rows divisible by it"
        )
    return value.reshape(-1, value.shape[-2] // heads, value.shape[-1])


__all__ = ["Muon", "orthogonalize"]
