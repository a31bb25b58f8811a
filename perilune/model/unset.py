"""Models whose weights are not set yet: names and shapes alone, or memory that a checkpoint is about to fill."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from perilune.config import ModelConfig
from perilune.model.parts import DEFAULT, Parts
from perilune.model.transformer import Transformer


def outline(config: ModelConfig, parts: Parts = DEFAULT, packed: bool = False) -> Transformer:
    """A model without memory (device "meta"): the names and shapes of its parameters and buffers."""
    with torch.device("meta"):
        return Transformer(config, parts, packed)


def give_memory_inplace(
    model: Transformer,
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
    shape: Callable[[str, torch.Size], Sequence[int]] = lambda name, whole: whole,
) -> Transformer:
    """Memory on `device` for the weights of an outline, unset; the model.

    dtypes: of parameters and buffers by name; codes of packed experts stay uint8. shape: name and shape of the whole ->
    shape of what is held here.
    """
    for prefix, module in model.named_modules():
        for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            path = f"{prefix}.{name}" if prefix else name
            kind = value.dtype if value.dtype == torch.uint8 else dtypes[path]
            new = torch.empty(tuple(shape(path, value.shape)), dtype=kind, device=device)
            setattr(module, name, nn.Parameter(new) if isinstance(value, nn.Parameter) else new)
    return model


__all__ = ["give_memory_inplace", "outline"]
