"""Projections of one input as one product: their weights become consecutive rows of one tensor.

The parameters stay what they were, views of that tensor from then on: loading into them or training them in place
changes the tensor. Legend: F output rows of all weights, D input width, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from perilune.model.kda import KdaLayer
from perilune.model.mla import MlaLayer
from perilune.model.transformer import Transformer

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fuse_inplace(model: Transformer) -> None:
    """Lay the input projections of every attention layer behind each other; nothing happens to those that are."""
    with torch.inference_mode(False), torch.no_grad():
        for layer in model.layers:
            weights = inputs_of(layer.attn)  # type: ignore[arg-type]
            if whole(weights) is not None:
                continue
            joined = torch.cat([weight.data for weight in weights])
            for weight, part in zip(weights, joined.split([len(w) for w in weights]), strict=True):
                weight.data = part


def inputs_of(attn: KdaLayer | MlaLayer) -> list[nn.Parameter]:
    """The weights that multiply a layer's input, in the order of their outputs in `whole`."""
    names = ["q_proj", "k_proj", "v_proj", "f_a_proj", "b_proj", "g_a_proj", "g_proj"]
    if isinstance(attn, MlaLayer):
        names = ["q_proj", "q_a_proj", "kv_a_proj", "g_proj"]
    return [getattr(attn, name).weight for name in names if hasattr(attn, name)]


def whole(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """w_FD over all weights, without gradient, if they lie behind each other, else None."""
    first, at = weights[0], weights[0].storage_offset()
    for weight in weights:
        apart = weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        if apart or weight.storage_offset() != at or not weight.is_contiguous():
            return None
        at += weight.numel()
    rows = sum(map(len, weights))
    return torch.as_strided(first.detach(), (rows, first.shape[1]), (first.shape[1], 1), first.storage_offset())


def project(attn: KdaLayer | MlaLayer, x_TD: torch.Tensor, linear: Linear) -> list[torch.Tensor]:
    """The outputs of `inputs_of`, q, k and v of a KDA layer as one; by one product if the weights are fused.

    For inference: no gradient reaches fused weights. Outputs may be views with the row stride of the whole product.
    """
    weights = inputs_of(attn)
    joined = 3 if isinstance(attn, KdaLayer) else 1
    w_FD = whole(weights)
    if w_FD is None:
        parts = [linear(x_TD, weight) for weight in weights]
        return [torch.cat(parts[:joined], dim=-1), *parts[joined:]]
    widths = [len(weight) for weight in weights]
    return list(linear(x_TD, w_FD).split([sum(widths[:joined]), *widths[joined:]], dim=-1))


__all__ = ["fuse_inplace", "inputs_of", "project", "whole"]
