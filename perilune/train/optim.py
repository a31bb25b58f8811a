"""Which parameter is updated by what, and the clipping of the gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from perilune.errors import Error
from perilune.train.config import OptimConfig
from perilune.train.muon import Muon
from perilune.train.schedule import learning_rate

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def build_optimizers(model: nn.Module, config: OptimConfig) -> dict[str, torch.optim.Optimizer]:
    """{"muon": ..., "adamw": ...}; Muon takes the parameters that carry `muon = True`, AdamW all others.

    Weight decay goes to matrices (2 or more dims) only. Raises Error for a model without parameters.
    """
    chosen: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for param in model.parameters():
        if not param.requires_grad:
            continue
        if getattr(param, "muon", False):
            chosen.append(param)
        else:
            (decayed if param.dim() >= 2 else plain).append(param)
    if not (chosen or decayed or plain):
        raise Error("the model has no trainable parameters")
    optimizers: dict[str, torch.optim.Optimizer] = {}
    if chosen:
        optimizers["muon"] = Muon(
            chosen, config.lr, config.momentum, config.weight_decay, config.ns_steps, _DTYPES[config.ns_dtype]
        )
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, config.weight_decay), (plain, 0.0))
        if params
    ]
    if groups:
        optimizers["adamw"] = torch.optim.AdamW(groups, config.adam_lr or config.lr, config.betas, config.eps)
    return optimizers


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
def clip_gradients(params: Iterable[Tensor], limit: float) -> Tensor:
    """Scale all gradients so that their common norm is at most `limit`; returns the norm before (at least fp32).

    Squares are summed in at least float32, tensor by tensor in the order of `params`, so the result does not depend
    on how a library groups tensors. A norm that is not finite leaves the gradients as they are.
    """
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        raise Error("clip_gradients: no parameter has a gradient")
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=grads[0].device)
    for grad in grads:
        total += grad.to(wide).square().sum()
    norm = total.sqrt()
    factor = torch.where(norm > limit, limit / norm, torch.ones_like(norm))
    factor = torch.where(norm.isfinite(), factor, torch.ones_like(norm))
    for grad in grads:
        grad.mul_(factor.to(grad.dtype))
    return norm


__all__ = ["build_optimizers", "clip_gradients", "set_learning_rates"]
