"""Parameters, gradients and optimizer states cut over ranks with tokens of their own: FSDP2 (`fully_shard`).

zero 1: gradients stay whole until a step's last micro-batch; 2: they are reduced and cut after each one; 3: weights are
gathered for each layer's forward and backward pass and freed after it. In 1 and 2 they are gathered once a step.
Gradients are summed, not averaged, in float32 (float64 in float64 runs).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from perilune.model import Transformer
from perilune.parallel.mesh import Mesh


def shard_model(
    model: Transformer, mesh: Mesh, zero: int, dtype: torch.dtype, whole: Callable[[str], bool]
) -> frozenset[str]:
    """Cut the model's parameters in place over `mesh.parts`; returns the names of those that were.

    dtype: of the computation; parameters that are cut are held in float32 where it is a shorter one. whole: names that
    stay as they are. Attention and feed-forward of each layer are gathered by themselves, the rest with the root.
    """
    names = {param: name for name, param in model.named_parameters()}
    ignored = {param for param, name in names.items() if whole(name)}
    low = dtype in (torch.bfloat16, torch.float16)
    if low:
        for param, name in names.items():
            if not whole(name):
                param.data = param.data.float()
    precision = MixedPrecisionPolicy(
        param_dtype=dtype if low else None, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
    )

    def cut(module: nn.Module) -> None:
        fully_shard(
            module,
            mesh=_device_mesh(mesh, next(iter(names)).device.type),
            reshard_after_forward=zero == 3 and module is not model,
            mp_policy=precision,
            ignored_params=ignored,
        )
        assert isinstance(module, FSDPModule)
        # Losses are divided by the number of tokens of all ranks: the sum is the gradient.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    for layer in model.layers:
        cut(layer.attn)  # type: ignore[arg-type]
        cut(layer.ffn)  # type: ignore[arg-type]
    cut(model)
    # The hidden state is a view where there are attention residuals; nothing here writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    register_fsdp_forward_method(model, "hidden")
    return frozenset(name for param, name in names.items() if param not in ignored)


def begin_micro_batch(model: nn.Module, zero: int, last: bool) -> None:
    """Say before a micro-batch whether it is the last one of the step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(zero != 1 or last)
        model.set_reshard_after_backward(zero == 3 or last)


def free_gathered(model: nn.Module) -> None:
    """Free weights that a forward pass without a backward pass left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _device_mesh(mesh: Mesh, device: str) -> DeviceMesh:
    """`parts`, or copies x parts where there are several copies."""
    assert mesh.parts is not None
    if mesh.copies is None:
        return DeviceMesh.from_group(mesh.parts, device)
    members = torch.arange(mesh.ranks).view(mesh.sizes)[mesh.places[0], :, :, :, mesh.places[4]].flatten(1)
    return DeviceMesh.from_group([mesh.copies, mesh.parts], device, mesh=members, mesh_dim_names=("copies", "parts"))


__all__ = ["begin_micro_batch", "free_gathered", "shard_model"]
