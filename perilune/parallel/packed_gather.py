"""FSDP gathers MXFP4 weights as their codes: 4.25 bits a number on the wire instead of the run's 16 or 32.

The weights are on the MXFP4 grid already (`perilune.train.masters` rounds a rank's own part), so encoding and decoding
change no bit of them; every rank encodes its part for the gather and decodes the whole. FSDP2 asks a parameter's local
tensor for the two functions by name (its all-gather extension), at the first forward pass.

Legend: E experts, e those of a rank, G weight rows, K weight columns, a multiple of 32.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from perilune.ops.mx import decode_mxfp4, encode_mxfp4


def gather_packed(model: nn.Module, names: Set[str], rule: str) -> frozenset[str]:
    """Let FSDP gather the parameters `names` as MXFP4 codes; returns those it will, before the first forward pass.

    rule: the scale rule by which they are on the grid. Left alone are parameters that FSDP has not cut, and those whose
    first dim is not a multiple of the ranks: FSDP pads them to a size that codes do not have.
    """
    packed = set()
    for name, param in model.named_parameters():
        if name in names and isinstance(param, DTensor) and _even(param):
            _extend(param._local_tensor, rule)
            packed.add(name)
    return frozenset(packed)


def _even(param: DTensor) -> bool:
    """Whether several ranks have the same share of it, cut along the first dim."""
    cuts = [n for n, placement in zip(param.device_mesh.shape, param.placements, strict=True) if placement == Shard(0)]
    return len(cuts) == 1 and cuts[0] > 1 and param.shape[0] % cuts[0] == 0


def _extend(part_eGK: torch.Tensor, rule: str) -> None:
    """Give a local tensor the two functions that FSDP looks for."""

    def fsdp_pre_all_gather(
        mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        return encode_mxfp4(part_eGK.detach(), rule), None

    def fsdp_post_all_gather(
        gathered: tuple[torch.Tensor, ...], _: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        codes, scales = gathered
        if out is None:
            whole_EGK = decode_mxfp4(codes, scales, dtype)
            return whole_EGK, (whole_EGK,)  # what FSDP frees with the layer
        # `data`: autograd must not take the same values in the same place for a change between the passes.
        decode_mxfp4(codes, scales, dtype, out=out.data)
        return None

    part_eGK.fsdp_pre_all_gather = fsdp_pre_all_gather  # type: ignore[attr-defined]
    part_eGK.fsdp_post_all_gather = fsdp_post_all_gather  # type: ignore[attr-defined]


__all__ = ["gather_packed"]
