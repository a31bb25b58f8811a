"""Starting weights, and which parameters Muon orthogonalises, by parameter name.

Sources: Kimi Linear report (A_log, dt_bias), Kimi K3 report (zero AttnRes queries, per-head Muon for q, k, v).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from perilune.config import ModelConfig
from perilune.model.transformer import Transformer


@torch.no_grad()
def initialize(model: Transformer, seed: int = 0) -> Transformer:
    """Fill every weight of `model` from one seed, in place; the same numbers on every device. Returns the model."""
    places = dict(model.named_parameters()), dict(model.named_buffers())
    shapes, buffers = ({name: tuple(value.shape) for name, value in some.items()} for some in places)
    tensors = places[0] | places[1]
    for name, begin, value in initial_values(model.config, shapes, buffers, seed):
        at = tuple(slice(first, first + size) for first, size in zip(begin, value.shape, strict=True))
        tensors[name][at].copy_(value)
    return model


def initial_values(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], buffers: Mapping[str, tuple[int, ...]], seed: int
) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
    """The starting numbers of a model's parameters and buffers, as (name, where they begin in it, float32 values).

    shapes: of the parameters by name, in the model's order, in which they are drawn. Stacked matrices come one by one.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        # torch draws normal numbers in blocks of 16: runs of whole blocks are the numbers of one draw.
        count = shape[0] if len(shape) == 3 and torch.Size(shape[1:]).numel() % 16 == 0 else 1
        for i in range(count):
            value = torch.empty(shape if count == 1 else (1, *shape[1:]), dtype=torch.float32)
            _draw(name.rsplit(".", 1)[-1], value, config, generator)
            yield name, (i, *(0 for _ in shape[1:])), value
    for name, shape in buffers.items():
        yield name, tuple(0 for _ in shape), torch.zeros(shape)


def _draw(leaf: str, value: torch.Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    if leaf in ("attn_norm_D", "ffn_norm_D", "norm_D", "o_norm_K", "q_a_norm", "kv_a_norm", "latent_norm"):
        value.fill_(1.0)
    elif leaf == "query_D":
        value.zero_()
    elif leaf == "A_log_H":
        if config.kda.gate.mode == "safe":
            value.zero_()
        else:
            value.uniform_(1.0, 16.0, generator=generator).log_()
    elif leaf == "dt_bias_HK":
        low, high = math.log(1e-3), math.log(1e-1)
        dt = value.uniform_(low, high, generator=generator).exp_()
        # Inverse of softplus, so that the first decays are dt.
        value.copy_(dt + torch.log(-torch.expm1(-dt)))
    elif leaf == "conv_CW":
        limit = value.shape[1] ** -0.5
        value.uniform_(-limit, limit, generator=generator)
    else:
        value.normal_(0.0, config.initializer_range, generator=generator)


NOT_MUON = ("embed.weight", "lm_head.weight")


def muon_heads(model: Transformer) -> dict[str, int]:
    """Parameter name -> number of equal row blocks that Muon orthogonalises apart; absent names go to AdamW.

    Projections to q, k and v are split by head (K3 report); kv_b holds k and v rows of each head, so it has two
    blocks a head where both are equally wide. Three-dimensional parameters are one matrix an expert, 1 block each.
    """
    kda, mla = model.config.kda, model.config.mla
    kv_blocks = 2 if mla.qk_nope_head_dim == mla.v_head_dim else 1
    per_head = {
        "q_b_proj": mla.num_heads,
        "kv_b_proj": mla.num_heads * kv_blocks,
        "k_proj": kda.num_heads,
        "v_proj": kda.num_heads,
    }
    heads: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or name in NOT_MUON or name.endswith(("conv_CW", "dt_bias_HK")):
            continue
        module = name.split(".")[-2]
        if module == "q_proj":
            layer = int(name.split(".")[1])
            heads[name] = mla.num_heads if model.config.is_mla(layer) else kda.num_heads
        else:
            heads[name] = per_head.get(module, 1)
    return heads
