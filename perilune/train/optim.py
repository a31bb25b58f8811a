"""Which parameter is updated by what, and the clipping of the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import repeat

import torch
from torch import Tensor

from perilune.errors import Error
from perilune.memory.optimizer import States, whole
from perilune.parallel.muon import Spread
from perilune.train.config import OptimConfig
from perilune.train.muon import Muon
from perilune.train.schedule import learning_rate

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def build_optimizers(
    params: Mapping[str, Tensor],
    heads: Mapping[str, int],
    config: OptimConfig,
    spread: Spread | None = None,
    states: States | None = None,
) -> dict[str, torch.optim.Optimizer]:
    """{"muon": ..., "adamw": ...} over named parameters; an optimizer without parameters is left out.

    heads: name -> row blocks of the matrices that Muon takes (`perilune.model.muon_heads`); all others are AdamW's,
    with weight decay on matrices called `weight` only (embedding and head; not biases, decays or convolutions).
    spread: where the matrices of Muon are that lie on several ranks. states: brings states that lie elsewhere.
    Raises Error for a model without parameters or a name in `heads` that is none of them.
    """
    if not params:
        raise Error("the model has no trainable parameters")
    unknown = sorted(set(heads) - set(params))
    if unknown:
        raise Error(f"Muon is to take {unknown[0]}, which is not a parameter of the model")
    optimizers: dict[str, torch.optim.Optimizer] = {}
    if heads:
        split: dict[int, list[Tensor]] = {}
        for name, param in params.items():
            if name in heads:
                split.setdefault(heads[name], []).append(param)
        optimizers["muon"] = Muon(
            [{"params": group, "heads": count} for count, group in sorted(split.items())],
            config.lr,
            config.momentum,
            config.weight_decay,
            config.ns_steps,
            _DTYPES[config.ns_dtype],
            spread=spread,
            names={param: name for name, param in params.items()},
            chunks=whole if states is None else states.chunks,
        )
    others = {name: param for name, param in params.items() if name not in heads}
    decayed = [p for name, p in others.items() if name.endswith("weight") and p.dim() >= 2]
    plain = [p for name, p in others.items() if not (name.endswith("weight") and p.dim() >= 2)]
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((decayed, config.weight_decay), (plain, 0.0))
        if group
    ]
    if groups:
        optimizers["adamw"] = torch.optim.AdamW(groups, config.adam_lr or config.lr, config.betas, config.eps)
    return optimizers


def step_optimizers(optimizers: Mapping[str, torch.optim.Optimizer], states: States | None = None) -> None:
    """One step of each, after which no parameter has a gradient. states: as for `build_optimizers`."""
    for optimizer in optimizers.values():
        if states is None or isinstance(optimizer, Muon):
            optimizer.step()
        else:
            states.step(optimizer)
        optimizer.zero_grad(set_to_none=True)


def set_learning_rates(
    optimizers: dict[str, torch.optim.Optimizer], config: OptimConfig, step: int, steps: int
) -> float:
    """Set the rates of step `step` (from 0) of `steps`; returns Muon's."""
    factor = learning_rate(step, steps, 1.0, config.warmup, config.min_lr)
    for name, optimizer in optimizers.items():
        peak = config.lr if name == "muon" else (config.adam_lr or config.lr)
        for group in optimizer.param_groups:
            group["lr"] = factor * peak
    return factor * config.lr


@torch.no_grad()
def clip_gradients(
    params: Iterable[Tensor],
    limit: float,
    copies: Iterable[int] | None = None,
    add_squares: Callable[[Tensor], Tensor] = lambda squares: squares,
) -> Tensor:
    """Scale all gradients so that their common norm is at most `limit`; returns the norm before (at least fp32).

    Squares are summed in at least float32, each tensor's by themselves and then the tensors' in the order of `params`,
    so the result does not depend on how a library groups tensors. copies: on how many ranks each parameter's numbers
    are; add_squares adds up over all of them. A norm that is not finite leaves the gradients as they are.
    """
    counts = repeat(1) if copies is None else copies
    pairs = [(p.grad, n) for p, n in zip(params, counts, strict=copies is not None) if p.grad is not None]
    grads = [grad for grad, _ in pairs]
    if not grads:
        raise Error("clip_gradients: no parameter has a gradient")
    wide = reduce(torch.promote_types, (grad.dtype for grad in grads), torch.float32)
    by_count: dict[int, list[Tensor]] = {}
    for squares, (_, count) in zip(_squares(grads, wide), pairs, strict=True):
        by_count.setdefault(count, []).append(squares)
    total = torch.zeros((), dtype=wide, device=grads[0].device)
    for count, found in by_count.items():
        total += torch.stack(found).sum() / count
    total = add_squares(total)
    norm = total.sqrt()
    factor = torch.where(norm > limit, limit / norm, torch.ones_like(norm))
    factor = torch.where(norm.isfinite(), factor, torch.ones_like(norm))
    for dtype in {grad.dtype for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.dtype == dtype], factor.to(dtype))
    return norm


def _squares(grads: list[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """The sum of the squares of each."""
    if not grads[0].is_cuda:
        # The norm of a CPU adds up one by one: with ten million numbers in float32 it is off by 4e-4.
        return [grad.to(dtype).square().sum() for grad in grads]
    # One kernel for many; a launch for each would cost the host more than the sums take.
    norms = torch._foreach_norm(grads, 2, dtype=dtype)
    return torch._foreach_mul(norms, norms)


__all__ = ["build_optimizers", "clip_gradients", "set_learning_rates", "step_optimizers"]
