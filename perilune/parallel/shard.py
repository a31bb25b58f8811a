"""Parameters, gradients and optimizer states cut over ranks with tokens of their own: FSDP2 (`fully_shard`).

zero 1: gradients stay whole until a step's last micro-batch; 2: they are reduced and cut after each one; 3: weights are
gathered for each layer's forward and backward pass and freed after it. In 1 and 2 they are gathered once a step.
Gradients are summed, not averaged, in float32 (float64 in float64 runs). With pipeline stages torch's schedules reduce
gradients once, after a step's last micro-batch, and free weights then: 2 is 1 there, and 3 frees a layer's weights
between its forward and its backward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from perilune.model import Transformer
from perilune.parallel.mesh import Mesh


def shard_model(
    model: Transformer,
    roots: Sequence[nn.Module],
    mesh: Mesh,
    zero: int,
    dtype: torch.dtype,
    whole: Callable[[str], bool],
    device: torch.device,
) -> frozenset[str]:
    """Cut the model's parameters in place over `mesh.parts`; returns the names of those that were.

    roots: the model, or the stages whose parameters it has. dtype: of the computation; parameters that are cut are held
    in float32 where it is a shorter one. whole: names that stay as they are. device: where the parameters are, or will
    be. Attention and feed-forward of each layer are gathered by themselves, the rest with its root.
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

    over = _device_mesh(mesh, device.type)

    def cut(module: nn.Module) -> None:
        fully_shard(
            module,
            mesh=over,
            reshard_after_forward=zero == 3 and module not in roots,
            mp_policy=precision,
            ignored_params=ignored,
        )
        assert isinstance(module, FSDPModule)
        # Losses are divided by the number of tokens of all ranks: the sum is the gradient.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    for layer in (layer for root in roots for layer in root.layers):  # type: ignore[union-attr]
        cut(layer.attn)
        cut(layer.ffn)
    for root in roots:
        cut(root)
    # The hidden state is a view where there are attention residuals; nothing here writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    if isinstance(model, FSDPModule):
        register_fsdp_forward_method(model, "hidden")
    return frozenset(name for param, name in names.items() if param not in ignored)


def begin_micro_batch(model: nn.Module, zero: int, last: bool) -> None:
    """Say before a micro-batch whether it is the last one of the step."""
    # Each call goes through all modules; what is left out is what FSDP does by itself.
    if isinstance(model, FSDPModule) and zero == 1:
        model.set_requires_gradient_sync(last)
    if isinstance(model, FSDPModule) and zero < 3:
        model.set_reshard_after_backward(last)


def free_gathered(roots: Sequence[nn.Module]) -> None:
    """Free weights that are left gathered, in all of these modules."""
    for module in (module for root in roots for module in root.modules()):
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
