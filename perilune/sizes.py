"""How large a model is, counted from its config alone: parameters, checkpoint bytes, state and cache bytes.

The shapes are those of the released checkpoints (Kimi-K3: 497,220 tensors; Kimi-Linear), as stored: K3 pads `A_log`
to a multiple of 128 values. Pure Python: no tensor is made and torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

from perilune.config import ModelConfig
from perilune.errors import Error

BYTES = {
    "float32": Fraction(4),
    "bfloat16": Fraction(2),
    "float16": Fraction(2),
    "mxfp4": Fraction(1, 2) + Fraction(1, 32),  # two values a byte and one scale byte for 32 values
}
# Kept in fp32 whatever the checkpoint's dtype: small, and read by exponentials or sums.
FP32 = "float32"
A_LOG_MULTIPLE = 128


@dataclass(frozen=True)
class Tensor:
    """`copies` equal weights of a checkpoint. `name` stands for all of them: {l} a layer, {e} an expert."""

    component: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    copies: int = 1

    @property
    def parameters(self) -> int:
        return prod(self.shape) * self.copies

    @property
    def bytes(self) -> int:
        return int(self.parameters * BYTES[self.dtype])

    @property
    def stored(self) -> int:
        """Tensors in the file: an MXFP4 weight is stored as two, packed values and scales."""
        return self.copies * (2 if self.dtype == "mxfp4" else 1)


@dataclass(frozen=True)
class Component:
    """One part of the model. active: parameters that one token uses, 0 for the input embedding and for vision."""

    name: str
    parameters: int
    active: int
    bytes: int


@dataclass(frozen=True)
class Sizes:
    """What `count` found; bytes are bytes, a state is that of one sequence.

    active: parameters one token uses, without the input embedding.
    kda_state_bytes: the recurrent matrices in fp32; with_conv adds the convolution windows in bf16.
    kv_bytes_per_token: latent cache rows of all MLA layers in bf16.
    """

    components: tuple[Component, ...]
    parameters: int
    text_parameters: int
    active: int
    tensors: int
    checkpoint_bytes: int
    kda_state_bytes: int
    kda_state_with_conv_bytes: int
    kv_bytes_per_token: int


def count(config: ModelConfig) -> Sizes:
    """Count everything about `config`. Raises Error where its vision_config lacks a size."""
    table = tuple(tensors(config))
    parts = []
    for name in dict.fromkeys(tensor.component for tensor in table):
        mine = [tensor for tensor in table if tensor.component == name]
        parameters = sum(tensor.parameters for tensor in mine)
        parts.append(Component(name, parameters, _active(name, parameters, config), sum(t.bytes for t in mine)))
    vision = sum(part.parameters for part in parts if part.name in VISION)
    total = sum(part.parameters for part in parts)
    kda, mla = config.kda, config.mla
    state = len(kda.layers) * kda.num_heads * kda.head_dim**2 * 4
    windows = len(kda.layers) * (kda.conv_size - 1) * 3 * kda.num_heads * kda.head_dim * 2
    return Sizes(
        components=tuple(parts),
        parameters=total,
        text_parameters=total - vision,
        active=sum(part.active for part in parts),
        tensors=sum(tensor.stored for tensor in table),
        checkpoint_bytes=sum(part.bytes for part in parts),
        kda_state_bytes=state,
        kda_state_with_conv_bytes=state + windows,
        kv_bytes_per_token=len(mla.layers) * (mla.kv_lora_rank + mla.qk_rope_head_dim) * 2,
    )


EMBEDDING, ROUTED, VISION = "input embedding", "routed experts", ("vision tower", "vision projector")


def _active(component: str, parameters: int, config: ModelConfig) -> int:
    if component == ROUTED:
        return parameters * config.moe.top_k // config.moe.num_experts
    return 0 if component == EMBEDDING or component in VISION else parameters


def dtype(config: ModelConfig) -> str:
    """The checkpoint's own dtype, from the `dtype` or `torch_dtype` field of its config; bfloat16 if it has none."""
    for level in ("text", "top"):
        for key in ("dtype", "torch_dtype"):
            value = config.hf_extra.get(level, {}).get(key)
            if value is not None:
                if not isinstance(value, str) or value not in BYTES:
                    raise Error(f"config {key} is {value!r}; sizes are known for {', '.join(BYTES)}")
                return str(value)
    return "bfloat16"


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Every weight of the checkpoint, equal ones together."""
    low = dtype(config)
    D, layers = config.hidden_size, config.num_layers
    yield Tensor(EMBEDDING, "embed_tokens", (config.vocab_size, D), low)
    yield from _kda(config, low)
    yield from _mla(config, low)
    yield from _feed_forward(config, low)
    if config.attn_res is not None:
        for name in ("self_attention_res", "mlp_res"):
            yield Tensor("attention residuals", f"layers.{{l}}.{name}_norm", (D,), low, layers)
            yield Tensor("attention residuals", f"layers.{{l}}.{name}_proj", (1, D), low, layers)
        yield Tensor("attention residuals", "output_attn_res_norm", (D,), low)
        yield Tensor("attention residuals", "output_attn_res_proj", (1, D), low)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Tensor("norms", f"layers.{{l}}.{name}", (D,), low, layers)
    yield Tensor("norms", "norm", (D,), low)
    yield Tensor("output head", "lm_head", (config.vocab_size, D), low)
    if config.vision is not None:
        yield from _vision(config.vision, low)


def _kda(config: ModelConfig, low: str) -> Iterator[Tensor]:
    D, kda, copies = config.hidden_size, config.kda, len(config.kda.layers)
    H, K = kda.num_heads, kda.head_dim
    # K3 pads the per-head values; Kimi-Linear stores [1, 1, H, 1].
    a_log = (-(-H // A_LOG_MULTIPLE) * A_LOG_MULTIPLE,) if config.family == "kimi_k3" else (1, 1, H, 1)
    gate = {"g_proj": (H * K, D)} if kda.full_rank_gate else {"g_a_proj": (K, D), "g_b_proj": (H * K, K)}
    shapes: list[tuple[str, tuple[int, ...], str]] = [
        *((f"{name}_proj", (H * K, D), low) for name in "qkv"),
        *((f"{name}_conv1d", (H * K, 1, kda.conv_size), FP32) for name in "qkv"),
        ("f_a_proj", (K, D), low),
        ("f_b_proj", (H * K, K), low),
        ("b_proj", (H, D), low),
        ("A_log", a_log, FP32),
        ("dt_bias", (H * K,), FP32),
        *((name, shape, low) for name, shape in gate.items()),
        ("o_norm", (K,), FP32),
        ("o_proj", (D, H * K), low),
    ]
    for name, shape, kind in shapes:
        yield Tensor("KDA", f"layers.{{l}}.self_attn.{name}", shape, kind, copies)


def _mla(config: ModelConfig, low: str) -> Iterator[Tensor]:
    D, mla, copies = config.hidden_size, config.mla, len(config.mla.layers)
    H, Q, V, L = mla.num_heads, mla.qk_head_dim, mla.v_head_dim, mla.kv_lora_rank
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("kv_a_proj_with_mqa", (L + mla.qk_rope_head_dim, D)),
        ("kv_a_layernorm", (L,)),
        ("kv_b_proj", (H * (mla.qk_nope_head_dim + V), L)),
        ("o_proj", (D, H * V)),
    ]
    if mla.q_lora_rank is None:
        shapes.append(("q_proj", (H * Q, D)))
    else:
        R = mla.q_lora_rank
        shapes += [("q_a_proj", (R, D)), ("q_a_layernorm", (R,)), ("q_b_proj", (H * Q, R))]
    if mla.output_gate:
        shapes.append(("g_proj", (H * V, D)))
    for name, shape in shapes:
        yield Tensor("MLA", f"layers.{{l}}.self_attn.{name}", shape, low, copies)


def _feed_forward(config: ModelConfig, low: str) -> Iterator[Tensor]:
    D, moe, copies = config.hidden_size, config.moe, len(config.sparse_layers)
    yield from _mlp("dense feed-forward", "layers.{l}.mlp", D, config.intermediate_size, low, config.dense_layers)
    if not copies:
        return
    name = "layers.{l}.block_sparse_moe"
    yield Tensor("routers", f"{name}.gate", (moe.num_experts, D), low, copies)
    yield Tensor("routers", f"{name}.gate.e_score_correction_bias", (moe.num_experts,), FP32, copies)
    width, F = moe.latent_size or D, moe.expert_size
    if moe.latent_size is not None:
        yield Tensor("latent projections", f"{name}.routed_expert_down_proj", (width, D), low, copies)
        yield Tensor("latent projections", f"{name}.routed_expert_up_proj", (D, width), low, copies)
    if moe.latent_norm:
        yield Tensor("latent projections", f"{name}.routed_expert_norm", (width,), low, copies)
    yield from _mlp("shared experts", f"{name}.shared_experts", D, moe.shared_size, low, copies)
    expert = "mxfp4" if config.quant is not None else low
    for part, shape in (("w1", (F, width)), ("w3", (F, width)), ("w2", (width, F))):
        yield Tensor(ROUTED, f"{name}.experts.{{e}}.{part}", shape, expert, copies * moe.num_experts)


def _mlp(component: str, name: str, D: int, F: int, low: str, copies: int) -> Iterator[Tensor]:
    if copies:
        yield Tensor(component, f"{name}.gate_proj", (F, D), low, copies)
        yield Tensor(component, f"{name}.up_proj", (F, D), low, copies)
        yield Tensor(component, f"{name}.down_proj", (D, F), low, copies)


def _vision(vision: Mapping[str, Any], low: str) -> Iterator[Tensor]:
    """The image encoder and its projector: three colour channels, no biases."""
    if not isinstance(vision, Mapping):
        raise Error(f"vision_config is {vision!r}; must be a JSON object to count the vision part")
    D, F, QKV = (_size(vision, key) for key in ("vt_hidden_size", "vt_intermediate_size", "vt_qkv_hidden_size"))
    layers, patch = _size(vision, "vt_num_hidden_layers"), _size(vision, "patch_size")
    grid = (_size(vision, "init_pos_emb_height"), _size(vision, "init_pos_emb_width"))
    merge = vision.get("merge_kernel_size", [2, 2])
    if not isinstance(merge, list) or not all(type(size) is int and size >= 1 for size in merge):
        raise Error(f"vision_config.merge_kernel_size is {merge!r}; must be a list of integers >= 1")
    merged, text = _size(vision, "mm_hidden_size") * prod(merge), _size(vision, "text_hidden_size")
    tower, projector = VISION
    yield Tensor(tower, "patch_embed.proj", (D, 3, patch, patch), low)
    yield Tensor(tower, "patch_embed.pos_emb", (*grid, D), low)
    for name in ("norm0", "norm1"):
        yield Tensor(tower, f"blocks.{{l}}.{name}", (D,), low, layers)
    yield Tensor(tower, "blocks.{l}.wqkv", (3 * QKV, D), low, layers)
    yield Tensor(tower, "blocks.{l}.wo", (D, QKV), low, layers)
    yield Tensor(tower, "blocks.{l}.mlp.fc0", (F, D), low, layers)
    yield Tensor(tower, "blocks.{l}.mlp.fc1", (D, F), low, layers)
    yield Tensor(tower, "final_layernorm", (D,), low)
    yield Tensor(projector, "proj.0", (merged, merged), low)
    yield Tensor(projector, "proj.2", (text, merged), low)
    yield Tensor(projector, "post_norm", (text,), low)


def _size(vision: Mapping[str, Any], key: str) -> int:
    value = vision.get(key)
    if type(value) is not int or value < 1:
        raise Error(f"vision_config.{key} is {value!r}; must be an integer >= 1 to count the vision part")
    return value


__all__ = ["Component", "Sizes", "Tensor", "count", "dtype", "tensors"]
