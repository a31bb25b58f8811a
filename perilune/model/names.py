"""One table: the tensors of a released checkpoint <-> our parameters, for both families.

Legend: H heads, K head dim, E experts, F expert width, L width the experts work on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from perilune.config import ModelConfig


@dataclass(frozen=True)
class Entry:
    """One checkpoint tensor and the place it goes to.

    name, shape: of the checkpoint tensor, before packing. param: our parameter or buffer. index: expert, if the
    parameter is stacked. rows: row range inside it, if several tensors share it. float32: kept so in every dtype.
    packed: stored as `.weight_packed` and `.weight_scale` (MXFP4). valid: only so many values are used, zeros follow.
    """

    name: str
    shape: tuple[int, ...]
    param: str
    index: int | None = None
    rows: tuple[int, int] | None = None
    float32: bool = False
    packed: bool = False
    valid: int | None = None

    def stored(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors in the file: one, or two where packed."""
        if not self.packed:
            return {self.name: self.shape}
        stem = self.name.removesuffix(".weight")
        rows, width = self.shape
        return {f"{stem}.weight_packed": (rows, width // 2), f"{stem}.weight_scale": (rows, width // 32)}


VISION_PREFIXES = ("vision_tower.", "mm_projector.")


def released_name(name: str) -> str:
    """The released name of a tensor in a file: transformers writes a dense layer's MLP under the sparse prefix."""
    return DENSE_AS_SPARSE.sub(r".mlp.\1_proj.", name)


DENSE_AS_SPARSE = re.compile(r"\.block_sparse_moe\.(gate|up|down)_proj\.")


def entries(config: ModelConfig) -> Iterator[Entry]:
    """Every tensor of a checkpoint of `config`, in file order: layers, then embedding, norms and head."""
    prefix = "language_model." if config.family == "kimi_k3" else ""
    d = config.hidden_size
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"{prefix}model.layers.{layer}"
        yield Entry(f"{theirs}.input_layernorm.weight", (d,), f"{ours}.attn_norm_D")
        yield Entry(f"{theirs}.post_attention_layernorm.weight", (d,), f"{ours}.ffn_norm_D")
        if config.attn_res is not None:
            yield from _mixer(f"{theirs}.self_attention_res", f"{ours}.attn_res", d)
            yield from _mixer(f"{theirs}.mlp_res", f"{ours}.ffn_res", d)
        attention = _mla if config.is_mla(layer) else _kda
        yield from attention(config, f"{theirs}.self_attn", f"{ours}.attn")
        if config.is_sparse(layer):
            yield from _moe(config, f"{theirs}.block_sparse_moe", f"{ours}.ffn")
        else:
            yield from _mlp(f"{theirs}.mlp", f"{ours}.ffn", d, config.intermediate_size)
    yield Entry(f"{prefix}model.embed_tokens.weight", (config.vocab_size, d), "embed.weight")
    yield Entry(f"{prefix}model.norm.weight", (d,), "norm_D")
    if config.attn_res is not None:
        yield from _mixer(f"{prefix}model.output_attn_res", "output_res", d)
    yield Entry(f"{prefix}lm_head.weight", (config.vocab_size, d), "lm_head.weight")


def quantized_parameters(config: ModelConfig) -> frozenset[str]:
    """Our parameters that are MXFP4 in a checkpoint of `config`: what training rounds and what serving keeps packed."""
    return frozenset(entry.param for entry in entries(config) if entry.packed)


def _mixer(theirs: str, ours: str, d: int) -> Iterator[Entry]:
    yield Entry(f"{theirs}_norm.weight", (d,), f"{ours}.norm_D")
    yield Entry(f"{theirs}_proj.weight", (1, d), f"{ours}.query_D")


def _linear(theirs: str, ours: str, module: str, rows: int, columns: int) -> Entry:
    return Entry(f"{theirs}.{module}.weight", (rows, columns), f"{ours}.{module}.weight")


def _mlp(theirs: str, ours: str, d: int, inner: int) -> Iterator[Entry]:
    yield _linear(theirs, ours, "gate_proj", inner, d)
    yield _linear(theirs, ours, "up_proj", inner, d)
    yield _linear(theirs, ours, "down_proj", d, inner)


def _kda(config: ModelConfig, theirs: str, ours: str) -> Iterator[Entry]:
    kda, d = config.kda, config.hidden_size
    width = kda.num_heads * kda.head_dim
    for i, stream in enumerate("qkv"):
        yield _linear(theirs, ours, f"{stream}_proj", width, d)
        rows = (i * width, (i + 1) * width)
        name, shape = f"{theirs}.{stream}_conv1d.weight", (width, 1, kda.conv_size)
        yield Entry(name, shape, f"{ours}.conv_CW", rows=rows, float32=True)
    yield _linear(theirs, ours, "f_a_proj", kda.head_dim, d)
    yield _linear(theirs, ours, "f_b_proj", width, kda.head_dim)
    yield _linear(theirs, ours, "b_proj", kda.num_heads, d)
    if config.family == "kimi_k3":
        # The released tensor has one value a head, zero-padded to a multiple of 128.
        padded = -(-kda.num_heads // 128) * 128
        yield Entry(f"{theirs}.A_log", (padded,), f"{ours}.A_log_H", float32=True, valid=kda.num_heads)
    else:
        yield Entry(f"{theirs}.A_log", (1, 1, kda.num_heads, 1), f"{ours}.A_log_H", float32=True)
    yield Entry(f"{theirs}.dt_bias", (width,), f"{ours}.dt_bias_HK", float32=True)
    if kda.full_rank_gate:
        yield _linear(theirs, ours, "g_proj", width, d)
    else:
        yield _linear(theirs, ours, "g_a_proj", kda.head_dim, d)
        yield _linear(theirs, ours, "g_b_proj", width, kda.head_dim)
    yield Entry(f"{theirs}.o_norm.weight", (kda.head_dim,), f"{ours}.o_norm_K", float32=True)
    yield _linear(theirs, ours, "o_proj", d, width)


def _mla(config: ModelConfig, theirs: str, ours: str) -> Iterator[Entry]:
    mla, d = config.mla, config.hidden_size
    queries = mla.num_heads * mla.qk_head_dim
    if mla.q_lora_rank is None:
        yield _linear(theirs, ours, "q_proj", queries, d)
    else:
        yield _linear(theirs, ours, "q_a_proj", mla.q_lora_rank, d)
        yield Entry(f"{theirs}.q_a_layernorm.weight", (mla.q_lora_rank,), f"{ours}.q_a_norm")
        yield _linear(theirs, ours, "q_b_proj", queries, mla.q_lora_rank)
    kv_a = (mla.kv_lora_rank + mla.qk_rope_head_dim, d)
    yield Entry(f"{theirs}.kv_a_proj_with_mqa.weight", kv_a, f"{ours}.kv_a_proj.weight")
    yield Entry(f"{theirs}.kv_a_layernorm.weight", (mla.kv_lora_rank,), f"{ours}.kv_a_norm")
    keys_values = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield _linear(theirs, ours, "kv_b_proj", keys_values, mla.kv_lora_rank)
    if mla.output_gate:
        yield _linear(theirs, ours, "g_proj", mla.num_heads * mla.v_head_dim, d)
    yield _linear(theirs, ours, "o_proj", d, mla.num_heads * mla.v_head_dim)


def _moe(config: ModelConfig, theirs: str, ours: str) -> Iterator[Entry]:
    moe, d = config.moe, config.hidden_size
    yield Entry(f"{theirs}.gate.weight", (moe.num_experts, d), f"{ours}.router.weight")
    bias = f"{theirs}.gate.e_score_correction_bias"
    yield Entry(bias, (moe.num_experts,), f"{ours}.router.bias_E", float32=True)
    width = moe.latent_size or d
    if moe.latent_size is not None:
        down, up = f"{theirs}.routed_expert_down_proj.weight", f"{theirs}.routed_expert_up_proj.weight"
        yield Entry(down, (width, d), f"{ours}.latent_down.weight")
        yield Entry(up, (d, width), f"{ours}.latent_up.weight")
    if moe.latent_norm:
        yield Entry(f"{theirs}.routed_expert_norm.weight", (width,), f"{ours}.latent_norm")
    yield from _mlp(f"{theirs}.shared_experts", f"{ours}.shared", d, moe.shared_size)
    inner, packed = moe.expert_size, config.quant is not None
    for e in range(moe.num_experts):
        stem, stacked = f"{theirs}.experts.{e}", f"{ours}.gate_up_E2FL"
        yield Entry(f"{stem}.w1.weight", (inner, width), stacked, e, (0, inner), packed=packed)
        yield Entry(f"{stem}.w3.weight", (inner, width), stacked, e, (inner, 2 * inner), packed=packed)
        yield Entry(f"{stem}.w2.weight", (width, inner), f"{ours}.down_ELF", e, packed=packed)
