"""What the benchmarks of parallel training measure on: one KDA layer of Kimi-K3's shape, and models by name.

Used by bench/parallel.py (one GPU) and bench/multi_gpu_parallel.py (several).
"""

from __future__ import annotations

import dataclasses

import torch

from perilune.config import ModelConfig
from perilune.model import Transformer
from perilune.model.kda import KdaLayer
from perilune.parallel.layout import KEPT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kda_layer(heads: int = 96) -> KdaLayer:
    """A KDA layer of width 7168 with heads of 128, bfloat16 (small parameters float32), random, the same every time."""
    config = ModelConfig.from_pretrained("kimi-k3")
    config = dataclasses.replace(
        config,
        num_layers=1,
        dense_layers=1,
        kda=dataclasses.replace(config.kda, layers=(0,), num_heads=heads),
        mla=dataclasses.replace(config.mla, layers=()),
        hf_extra={},
        hf_present=None,
    )
    with torch.device("meta"):
        attn = KdaLayer(config)
    fill(attn, 0.02)
    return attn


def shape_of(name: str) -> ModelConfig:
    """`mini`; or `slice`: Kimi-K3's widths with 4 layers, 56 experts and a vocabulary of 8192."""
    if name == "mini":
        return ModelConfig.from_pretrained("mini")
    config = ModelConfig.from_pretrained("kimi-k3")
    return dataclasses.replace(
        config,
        num_layers=4,
        vocab_size=8192,
        kda=dataclasses.replace(config.kda, layers=(0, 1, 2)),
        mla=dataclasses.replace(config.mla, layers=(3,)),
        moe=dataclasses.replace(config.moe, num_experts=56),
        quant=None,
        hf_extra={},
        hf_present=None,
    )


def random_model(shape: ModelConfig, std: float = 0.02) -> Transformer:
    """A model with random weights in place of trained ones, bfloat16, made on the device; no copy of it on the host."""
    with torch.device("meta"):
        net = Transformer(shape)
    fill(net, std)
    return net


def fill(module: torch.nn.Module, std: float) -> None:
    """Memory and random values for a module made on meta; norms begin at 1, the small parameters stay in float32."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    for part in module.modules():
        for key, p in list(part.named_parameters(recurse=False)):
            dtype = torch.float32 if key in KEPT else torch.bfloat16
            value = torch.empty(p.shape, dtype=dtype, device=DEVICE).normal_(0, std, generator=generator)
            setattr(part, key, torch.nn.Parameter(value + 1 if "norm" in key else value))
        for key, b in list(part.named_buffers(recurse=False)):
            setattr(part, key, torch.zeros(b.shape, device=DEVICE))


__all__ = ["DEVICE", "fill", "kda_layer", "random_model", "shape_of"]
