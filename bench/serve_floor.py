"""What a step of the serving engine must read and multiply at least.

Bytes: the weights but the embedding, of the experts those that a uniform router would touch, states and MLA rows.
Products: two for each parameter that a token uses, and of MLA those of its queries with all rows before them; KDA's own
are left out.
"""

from __future__ import annotations

from perilune import Transformer
from perilune.sizes import count

PEAK = 989e12  # dense bf16 operations a second of an H200, by its data sheet


def weight_bytes(model: Transformer, tokens: int) -> float:
    """Of a step with so many tokens."""
    moe, weights, experts = model.config.moe, 0, 0
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_E2FL", "down_ELF")):
            experts += parameter.numel() * parameter.element_size()
        elif not name.startswith("embed"):
            weights += parameter.numel() * parameter.element_size()
    experts += sum(buffer.nbytes for name, buffer in model.named_buffers() if name.endswith(("_codes", "_scales")))
    return weights + experts * (1 - (1 - moe.top_k / moe.num_experts) ** tokens)


def decode_bytes(model: Transformer, batch: int, cached: int) -> int:
    """Bytes that one decode step of `batch` sequences with `cached` tokens each must read."""
    config = model.config
    kda, mla = len(config.kda.layers), len(config.mla.layers)
    heads, dim = config.kda.num_heads, config.kda.head_dim
    state = kda * heads * (dim * dim * 4 + 32 * 3 * dim * 4)  # a matrix and half a tail
    rows = mla * cached * (config.mla.kv_lora_rank + config.mla.qk_rope_head_dim) * 2
    return int(weight_bytes(model, batch) + batch * (state + rows))


def prefill_seconds(model: Transformer, new: int, cached: int, bandwidth: float) -> float:
    """The longer of reading the weights once and of computing `new` tokens after `cached` ones."""
    mla = model.config.mla
    pairs = len(mla.layers) * mla.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    operations = 2 * count(model.config).active * new + 2 * pairs * (new * cached + new * new / 2)
    return max(weight_bytes(model, new) / bandwidth, operations / PEAK)


__all__ = ["decode_bytes", "prefill_seconds", "weight_bytes"]
