"""Hugging Face config.json <-> ModelConfig, as one table of fields.

A field is (level, key, default): "text" is the top level of a kimi_linear file and `text_config` of a kimi_k3
file, "linear" is `linear_attn_config`. A key that equals its default and that the source file did not have is not
written, so that a round trip is exact.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from perilune.config import (
    QUANTIZED_ACTIVATIONS,
    SCALE_RULES,
    Activation,
    AttnResConfig,
    Gate,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    QuantConfig,
)
from perilune.errors import Error

REQUIRED = object()

# What each used key means when a file leaves it out.
TEXT_FIELDS: dict[str, Any] = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "intermediate_size": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "q_lora_rank": None,
    "kv_lora_rank": REQUIRED,
    "qk_nope_head_dim": REQUIRED,
    "qk_rope_head_dim": REQUIRED,
    "v_head_dim": REQUIRED,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "num_experts": REQUIRED,
    "num_experts_per_token": REQUIRED,
    "num_shared_experts": REQUIRED,
    "moe_intermediate_size": REQUIRED,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
    "routed_scaling_factor": 1.0,
    "moe_renormalize": True,
    "first_k_dense_replace": 1,
    "attn_res_block_size": None,
    "perilune_mla_norm_eps": 1e-6,
}
LINEAR_FIELDS: dict[str, Any] = {
    "full_attn_layers": REQUIRED,
    "kda_layers": REQUIRED,
    "head_dim": REQUIRED,
    "num_heads": REQUIRED,
    "short_conv_kernel_size": 4,
    "use_full_rank_gate": False,
    "gate_lower_bound": None,
}
# Options of the format that we know but support in one setting only.
FIXED: dict[str, Any] = {
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
OWN_KEYS = {"perilune_activations", "perilune_mla_norm_eps", "perilune_scale_rule"}


def parse(data: Mapping[str, Any]) -> ModelConfig:
    """Contents of a config.json -> ModelConfig. Raises Error, naming the field, for what is not supported."""
    family = data.get("model_type")
    if family not in ("kimi_k3", "kimi_linear"):
        raise Error(f"model_type is {family!r}; supported: 'kimi_k3', 'kimi_linear'")
    _refuse_unknown_own_keys(data)
    if family == "kimi_k3":
        text = data.get("text_config")
        if not isinstance(text, Mapping):
            raise Error("text_config is missing; a kimi_k3 config keeps its language model there")
    else:
        text = data
    linear = text.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        raise Error("linear_attn_config is missing; it lists the KDA and full-attention layers")
    _check_fixed(text)
    read = _Reader(text, linear)
    config_fields = _read_fields(read)
    text_extra = {k: v for k, v in text.items() if k not in TEXT_FIELDS and k != "linear_attn_config"}
    quant, quant_home = _read_quant(data, text, family)
    if quant is not None:
        text_extra.pop("quantization_config", None)
    top_extra = (
        {k: v for k, v in data.items() if k not in ("text_config", "quantization_config")}
        if family == "kimi_k3"
        else {}
    )
    extra = {
        "top": top_extra,
        "text": text_extra,
        "linear_attn": {k: v for k, v in linear.items() if k not in LINEAR_FIELDS},
    }
    return ModelConfig(
        family=family,
        quant=quant,
        bos_token_id=_token(data, text, "bos_token_id"),
        eos_token_id=_token(data, text, "eos_token_id"),
        pad_token_id=_token(data, text, "pad_token_id"),
        hf_extra=copy.deepcopy(extra),
        hf_present=frozenset(read.present | quant_home),
        **config_fields,
    )


def render(config: ModelConfig) -> dict[str, Any]:
    """ModelConfig -> contents of a config.json, the inverse of `parse`."""
    # A file without num_key_value_heads means as many as query heads.
    defaults = TEXT_FIELDS | {"num_key_value_heads": config.mla.num_heads}
    text = _write(config, _text_values(config), defaults, "text")
    linear = _write(config, _linear_values(config), LINEAR_FIELDS, "linear_attn")
    extra = copy.deepcopy({level: dict(values) for level, values in config.hf_extra.items()})
    text |= extra.get("text", {})
    text["linear_attn_config"] = linear | extra.get("linear_attn", {})
    quant = _quant_values(config)
    top = extra.get("top", {})
    if config.hf_present is None:
        tokens = {k: getattr(config, k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        text = _new_text(config) | tokens | text
        top = _new_top() | tokens | top if config.family == "kimi_k3" else top
    if quant is not None:
        homes = config.hf_present or frozenset()
        if not homes & {"text.quantization_config", "top.quantization_config"}:
            homes = frozenset({"text.quantization_config"})
        for name, level in (("text", text), ("top", top)):
            if f"{name}.quantization_config" in homes:
                level["quantization_config"] = copy.deepcopy(quant)
    return top | {"text_config": text} if config.family == "kimi_k3" else text


class _Reader:
    """Looks keys up in the two levels and remembers which ones were there."""

    def __init__(self, text: Mapping[str, Any], linear: Mapping[str, Any]) -> None:
        self.levels = {"text": (text, TEXT_FIELDS), "linear_attn": (linear, LINEAR_FIELDS)}
        self.present = {
            f"{name}.{key}" for name, (level, fields) in self.levels.items() for key in fields if key in level
        }

    def __call__(self, key: str, level: str = "text") -> Any:
        values, fields = self.levels[level]
        value = values.get(key, fields[key])
        if value is REQUIRED:
            raise Error(f"{key} is missing from {'linear_attn_config' if level != 'text' else 'the config'}")
        return value


def _read_fields(read: _Reader) -> dict[str, Any]:
    heads = read("num_attention_heads")
    if read("num_key_value_heads") not in (None, heads):
        raise Error(f"num_key_value_heads is {read('num_key_value_heads')}; must equal num_attention_heads = {heads}")
    if read("mla_use_nope") is not True:
        raise Error(f"mla_use_nope is {read('mla_use_nope')!r}; only true (no rotary embedding) is supported")
    if read("hidden_act") not in ("silu", "situ"):
        raise Error(f"hidden_act is {read('hidden_act')!r}; supported: 'silu', 'situ'")
    bound = read("gate_lower_bound", "linear_attn")
    block = read("attn_res_block_size")
    return {
        "vocab_size": read("vocab_size"),
        "hidden_size": read("hidden_size"),
        "num_layers": read("num_hidden_layers"),
        "intermediate_size": read("intermediate_size"),
        "activation": Activation(read("hidden_act"), read("activation_situ_beta"), read("activation_situ_linear_beta")),
        "kda": KdaConfig(
            layers=_layers(read("kda_layers", "linear_attn"), "kda_layers"),
            num_heads=read("num_heads", "linear_attn"),
            head_dim=read("head_dim", "linear_attn"),
            gate=Gate("softplus") if bound is None else Gate("safe", bound),
            conv_size=read("short_conv_kernel_size", "linear_attn"),
            full_rank_gate=read("use_full_rank_gate", "linear_attn"),
        ),
        "mla": MlaConfig(
            layers=_layers(read("full_attn_layers", "linear_attn"), "full_attn_layers"),
            num_heads=heads,
            kv_lora_rank=read("kv_lora_rank"),
            qk_nope_head_dim=read("qk_nope_head_dim"),
            qk_rope_head_dim=read("qk_rope_head_dim"),
            v_head_dim=read("v_head_dim"),
            q_lora_rank=read("q_lora_rank"),
            output_gate=read("mla_use_output_gate"),
            norm_eps=read("perilune_mla_norm_eps"),
        ),
        "moe": MoeConfig(
            num_experts=read("num_experts"),
            top_k=read("num_experts_per_token"),
            expert_size=read("moe_intermediate_size"),
            num_shared_experts=read("num_shared_experts"),
            latent_size=read("routed_expert_hidden_size"),
            latent_norm=read("latent_moe_use_norm"),
            scaling_factor=read("routed_scaling_factor"),
            renormalize=read("moe_renormalize"),
        ),
        "attn_res": None if block is None else AttnResConfig(block),
        "dense_layers": read("first_k_dense_replace"),
        "rms_norm_eps": read("rms_norm_eps"),
        "initializer_range": read("initializer_range"),
        "max_position_embeddings": read("max_position_embeddings"),
    }


def _text_values(config: ModelConfig) -> dict[str, Any]:
    mla, moe = config.mla, config.moe
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "hidden_act": config.activation.kind,
        "activation_situ_beta": config.activation.beta,
        "activation_situ_linear_beta": config.activation.linear_beta,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "max_position_embeddings": config.max_position_embeddings,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": mla.output_gate,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.top_k,
        "num_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.expert_size,
        "routed_expert_hidden_size": moe.latent_size,
        "latent_moe_use_norm": moe.latent_norm,
        "routed_scaling_factor": moe.scaling_factor,
        "moe_renormalize": moe.renormalize,
        "first_k_dense_replace": config.dense_layers,
        "attn_res_block_size": None if config.attn_res is None else config.attn_res.block_size,
        "perilune_mla_norm_eps": mla.norm_eps,
    }


def _linear_values(config: ModelConfig) -> dict[str, Any]:
    kda = config.kda
    return {
        "full_attn_layers": [layer + 1 for layer in config.mla.layers],
        "kda_layers": [layer + 1 for layer in kda.layers],
        "head_dim": kda.head_dim,
        "num_heads": kda.num_heads,
        "short_conv_kernel_size": kda.conv_size,
        "use_full_rank_gate": kda.full_rank_gate,
        "gate_lower_bound": kda.gate.lower_bound,
    }


def _write(config: ModelConfig, values: dict[str, Any], fields: dict[str, Any], level: str) -> dict[str, Any]:
    present = config.hf_present

    def written(key: str, value: Any) -> bool:
        if value != fields[key]:
            return True
        if present is None:
            return value is not None and not key.startswith("perilune_")
        return f"{level}.{key}" in present

    return {key: value for key, value in values.items() if written(key, value)}


def _layers(one_based: Any, key: str) -> tuple[int, ...]:
    if not isinstance(one_based, list) or not all(isinstance(layer, int) and layer >= 1 for layer in one_based):
        raise Error(f"linear_attn_config.{key} is {one_based!r}; must be a list of 1-based layer numbers")
    return tuple(layer - 1 for layer in one_based)


def _token(data: Mapping[str, Any], text: Mapping[str, Any], key: str) -> int:
    value = text.get(key, data.get(key, 0))
    if isinstance(value, list):
        value = value[0] if value else 0
    if value is None:
        return 0
    if not isinstance(value, int):
        raise Error(f"{key} is {value!r}; must be a token id")
    return value


def _check_fixed(text: Mapping[str, Any]) -> None:
    for key, only in FIXED.items():
        if text.get(key, only) not in (only, None):
            raise Error(f"{key} is {text[key]!r}; only {only!r} is supported")


def _refuse_unknown_own_keys(value: Any) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, str) and key.startswith("perilune_") and key not in OWN_KEYS:
                raise Error(f"config key {key!r} is unknown; our own keys are {', '.join(sorted(OWN_KEYS))}")
            _refuse_unknown_own_keys(inner)


def _read_quant(data: Mapping[str, Any], text: Mapping[str, Any], family: str) -> tuple[QuantConfig | None, set[str]]:
    places = {"text": text.get("quantization_config")}
    if family == "kimi_k3":
        places["top"] = data.get("quantization_config")
    found = {name: value for name, value in places.items() if value is not None}
    if not found:
        return None, set()
    quants = list(found.values())
    if any(quant != quants[0] for quant in quants):
        raise Error("quantization_config differs between the top level and text_config; must be the same")
    if not isinstance(quants[0], Mapping):
        raise Error(f"quantization_config is {quants[0]!r}; must be a JSON object")
    raw = dict(quants[0])
    homes = {f"{name}.quantization_config" for name in found}
    own: dict[str, Any] = {}
    for field, allowed in (("scale_rule", SCALE_RULES), ("activations", QUANTIZED_ACTIVATIONS)):
        value = raw.pop(f"perilune_{field}", None)
        if value is not None:
            if value not in allowed:
                raise Error(f"quantization_config.perilune_{field} is {value!r}; allowed: {', '.join(allowed)}")
            own[field] = value
            homes.add(f"perilune_{field}")
    if raw.get("format") != "mxfp4-pack-quantized":
        raise Error(f"quantization_config.format is {raw.get('format')!r}; supported: 'mxfp4-pack-quantized'")
    groups = raw.get("config_groups")
    weights = (
        [g.get("weights") for g in groups.values() if isinstance(g, Mapping)] if isinstance(groups, Mapping) else []
    )
    sizes = {w.get("group_size") for w in weights if isinstance(w, Mapping)}
    if sizes != {32}:
        raise Error(f"quantization_config group_size is {sorted(map(str, sizes))}; supported: 32")
    return QuantConfig(**own, hf=raw), homes


def _quant_values(config: ModelConfig) -> dict[str, Any] | None:
    if config.quant is None:
        return None
    values = dict(config.quant.hf) or mxfp4_quantization_config()
    for field, usual in (("scale_rule", "even"), ("activations", "none")):
        value, key = getattr(config.quant, field), f"perilune_{field}"
        if value != usual or key in (config.hf_present or ()):
            values[key] = value
    return values


def mxfp4_quantization_config() -> dict[str, Any]:
    """The quantization_config of a checkpoint whose routed experts are MXFP4 (compressed-tensors' own format)."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "group_size": 32,
        "strategy": "group",
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
        "observer": "minmax",
    }
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:vision_tower.*",
            "re:mm_projector.*",
        ],
    }


def _new_text(config: ModelConfig) -> dict[str, Any]:
    return FIXED | {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": "bfloat16",
        "use_grouped_topk": True,
        "topk_method": "noaux_tc",
    }


def _new_top() -> dict[str, Any]:
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
