"""Hugging Face config.json <-> ModelConfig, as one table of fields.

A key that equals its default and that the source file did not have is not written, so that a round trip is exact.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from perilune.config import (
    Activation,
    AttnResConfig,
    Gate,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
)
from perilune.config_quant import KEY as QUANT
from perilune.config_quant import OWN as QUANT_OWN
from perilune.config_quant import mxfp4_quantization_config, read_quant, same, write_quant
from perilune.errors import Error

REQUIRED = object()
LINEAR = "linear_attn_config"

# Key of the file -> where it stands in ModelConfig, and what it means when a file leaves it out. These are at the top
# level of a kimi_linear file and in `text_config` of a kimi_k3 file.
TEXT_FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", REQUIRED),
    "hidden_size": ("hidden_size", REQUIRED),
    "num_hidden_layers": ("num_layers", REQUIRED),
    "intermediate_size": ("intermediate_size", REQUIRED),
    "num_attention_heads": ("mla.num_heads", REQUIRED),
    "hidden_act": ("activation.kind", "silu"),
    "activation_situ_beta": ("activation.beta", 4.0),
    "activation_situ_linear_beta": ("activation.linear_beta", 25.0),
    "rms_norm_eps": ("rms_norm_eps", 1e-5),
    "initializer_range": ("initializer_range", 0.02),
    "max_position_embeddings": ("max_position_embeddings", 1048576),
    "q_lora_rank": ("mla.q_lora_rank", None),
    "kv_lora_rank": ("mla.kv_lora_rank", REQUIRED),
    "qk_nope_head_dim": ("mla.qk_nope_head_dim", REQUIRED),
    "qk_rope_head_dim": ("mla.qk_rope_head_dim", REQUIRED),
    "v_head_dim": ("mla.v_head_dim", REQUIRED),
    "mla_use_output_gate": ("mla.output_gate", False),
    "num_experts": ("moe.num_experts", REQUIRED),
    "num_experts_per_token": ("moe.top_k", REQUIRED),
    "num_shared_experts": ("moe.num_shared_experts", REQUIRED),
    "moe_intermediate_size": ("moe.expert_size", REQUIRED),
    "routed_expert_hidden_size": ("moe.latent_size", None),
    "latent_moe_use_norm": ("moe.latent_norm", False),
    "routed_scaling_factor": ("moe.scaling_factor", 1.0),
    "moe_renormalize": ("moe.renormalize", True),
    "first_k_dense_replace": ("dense_layers", 1),
    "attn_res_block_size": ("attn_res.block_size", None),
    "perilune_mla_norm_eps": ("mla.norm_eps", 1e-6),
}
# The same of `linear_attn_config`, whose layers are numbered from 1.
LINEAR_FIELDS: dict[str, tuple[str, Any]] = {
    "full_attn_layers": ("mla.layers", REQUIRED),
    "kda_layers": ("kda.layers", REQUIRED),
    "head_dim": ("kda.head_dim", REQUIRED),
    "num_heads": ("kda.num_heads", REQUIRED),
    "short_conv_kernel_size": ("kda.conv_size", 4),
    "use_full_rank_gate": ("kda.full_rank_gate", False),
    "gate_lower_bound": ("gate.lower_bound", None),
}
LEVELS = {"text": TEXT_FIELDS, "linear_attn": LINEAR_FIELDS}
# Options of the format that we know but support in one setting only. Left out they mean that setting, but for
# mla_use_nope, which a file must have.
FIXED: dict[str, Any] = {
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
OWN_KEYS = {"perilune_mla_norm_eps", *QUANT_OWN}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# As many as query heads in every released file; kept as it stands there.
KV_HEADS = "num_key_value_heads"


def parse(data: Mapping[str, Any]) -> ModelConfig:
    """Contents of a config.json -> ModelConfig. Raises Error, naming the file's field, for what is not supported."""
    family = data.get("model_type")
    if family not in ("kimi_k3", "kimi_linear"):
        raise Error(f"model_type is {family!r}; supported: 'kimi_k3', 'kimi_linear'")
    _refuse_unknown_own_keys(data)
    text = data.get("text_config") if family == "kimi_k3" else data
    if not isinstance(text, Mapping):
        raise Error("text_config is missing; a kimi_k3 config keeps its language model there")
    linear = text.get(LINEAR)
    if not isinstance(linear, Mapping):
        raise Error(f"{LINEAR} is missing; it lists the KDA and full-attention layers")
    _check_fixed(data, text)
    levels = {"text": text, "linear_attn": linear}
    present = {f"{name}.{key}" for name, level in levels.items() for key in LEVELS[name] if key in level}
    quant, quant_present = read_quant({"text": text, "top": data} if family == "kimi_k3" else {"text": text})
    known = {"text": {*TEXT_FIELDS, LINEAR}, "linear_attn": {*LINEAR_FIELDS}, "top": {"text_config"}}
    sources = levels | ({"top": data} if family == "kimi_k3" else {})
    extra = {
        name: {k: v for k, v in level.items() if k not in known[name] and f"{name}.{k}" not in quant_present}
        for name, level in sources.items()
    }
    try:
        config = ModelConfig(
            family=family,
            quant=quant,
            hf_extra=copy.deepcopy(extra),
            hf_present=frozenset(present | quant_present),
            **{key: _token(data, text, key) for key in TOKENS},
            **_nested(_fields(levels)),
        )
    except Error as error:
        raise Error(_in_the_file(str(error))) from None
    if text.get(KV_HEADS) is not None and not same(text[KV_HEADS], config.mla.num_heads):
        raise Error(f"{KV_HEADS} is {text[KV_HEADS]!r}; must equal num_attention_heads = {config.mla.num_heads}")
    return config


def render(config: ModelConfig) -> dict[str, Any]:
    """ModelConfig -> contents of a config.json, the inverse of `parse`."""
    present = config.hf_present
    extra = copy.deepcopy({level: dict(values) for level, values in config.hf_extra.items()})
    text, top = extra.get("text", {}), extra.get("top", {})
    if present is None:
        text = _new_text(config) | text
        top = _new_top() | top if config.family == "kimi_k3" else top
    if text.get(KV_HEADS) is not None:
        text[KV_HEADS] = config.mla.num_heads
    text = _write(config, "text") | {"mla_use_nope": True} | text
    text[LINEAR] = _write(config, "linear_attn") | extra.get("linear_attn", {})
    if config.quant is not None:
        homes = {name for name in ("text", "top") if f"{name}.{QUANT}" in (present or ())} or {"text"}
        for name, level in (("text", text), ("top", top)):
            if name in homes:
                level[QUANT] = copy.deepcopy(write_quant(config.quant, present or frozenset()))
    return top | {"text_config": text} if config.family == "kimi_k3" else text


def _fields(levels: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Dotted name in ModelConfig -> what the file says there, or means."""
    found: dict[str, Any] = {}
    for name, level in levels.items():
        for key, (ours, default) in LEVELS[name].items():
            value = level.get(key, default)
            if value is REQUIRED:
                raise Error(f"{key} is missing from {LINEAR if name == 'linear_attn' else 'the config'}")
            found[ours] = _from_one(value, key) if ours.endswith(".layers") else value
    return found


def _nested(found: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ModelConfig from its fields by dotted name."""

    def of(group: str) -> dict[str, Any]:
        return {ours.removeprefix(f"{group}."): v for ours, v in found.items() if ours.startswith(f"{group}.")}

    bound, block = found["gate.lower_bound"], found["attn_res.block_size"]
    return {ours: value for ours, value in found.items() if "." not in ours} | {
        "activation": Activation(**of("activation")),
        "kda": KdaConfig(gate=Gate("softplus") if bound is None else Gate("safe", bound), **of("kda")),
        "mla": MlaConfig(**of("mla")),
        "moe": MoeConfig(**of("moe")),
        "attn_res": None if block is None else AttnResConfig(block),
    }


def _value(config: ModelConfig, ours: str) -> Any:
    """What stands at a dotted name; the inverse of `_nested`."""
    value: Any = config.kda if ours.startswith("gate.") else config
    for name in ours.split("."):
        value = None if value is None else getattr(value, name)
    return [layer + 1 for layer in value] if ours.endswith(".layers") else value


def _write(config: ModelConfig, level: str) -> dict[str, Any]:
    """The fields of a level that its file had, or that are not what leaving them out means."""
    written: dict[str, Any] = {}
    for key, (ours, default) in LEVELS[level].items():
        value, present = _value(config, ours), config.hf_present
        if present is None:
            usual = value is not None and not key.startswith("perilune_")
        else:
            usual = f"{level}.{key}" in present
        if usual or value != default:
            written[key] = value
    return written


def _in_the_file(message: str) -> str:
    """An error about fields of ModelConfig, with the file's names for them."""
    names = {ours: key for fields in LEVELS.values() for key, (ours, _) in fields.items()}
    return re.sub(r"\b[a-z_]+(\.[a-z_]+)?\b", lambda found: names.get(found[0], found[0]), message)


def _from_one(layers: Any, key: str) -> tuple[int, ...]:
    if not isinstance(layers, list) or not all(type(layer) is int and layer >= 1 for layer in layers):
        raise Error(f"{LINEAR}.{key} is {layers!r}; must be a list of 1-based layer numbers")
    return tuple(layer - 1 for layer in layers)


def _token(data: Mapping[str, Any], text: Mapping[str, Any], key: str) -> Any:
    value = text.get(key, data.get(key, 0))
    if isinstance(value, list):
        value = value[0] if value else 0
    if value is None:
        return 0
    if type(value) is not int:
        raise Error(f"{key} is {value!r}; must be a token id")
    return value


def _check_fixed(data: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    for key, only in FIXED.items():
        # In a kimi_k3 file the top level speaks of its language model too.
        for level in (data, text):
            value = level.get(key)
            if value is not None and not same(value, only):
                raise Error(f"{key} is {value!r}; only {only!r} is supported")
    if text.get("mla_use_nope") is None:
        raise Error("mla_use_nope is missing or null; only true (no rotary embedding) is supported")


def _refuse_unknown_own_keys(value: Any) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, str) and key.startswith("perilune_") and key not in OWN_KEYS:
                raise Error(f"config key {key!r} is unknown; our own keys are {', '.join(sorted(OWN_KEYS))}")
            _refuse_unknown_own_keys(inner)


def _new_text(config: ModelConfig) -> dict[str, Any]:
    """What a config that was made in Python says at the level of its language model, besides its fields."""
    return FIXED | {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": "bfloat16",
        KV_HEADS: config.mla.num_heads,
        "use_grouped_topk": True,
        "topk_method": "noaux_tc",
        **{key: getattr(config, key) for key in TOKENS},
    }


def _new_top() -> dict[str, Any]:
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


__all__ = ["mxfp4_quantization_config", "parse", "render"]
