"""quantization_config of a Hugging Face config.json <-> QuantConfig.

A kimi_k3 file may have it at its top level, under text_config, or in both; what compressed-tensors reads there is kept
as it is, and our own facts stand beside it as `perilune_*` keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from perilune.config import QUANTIZED_ACTIVATIONS, SCALE_RULES, QuantConfig
from perilune.errors import Error

KEY = "quantization_config"
OWN = {
    "perilune_scale_rule": ("scale_rule", SCALE_RULES, "even"),
    "perilune_activations": ("activations", QUANTIZED_ACTIVATIONS, "none"),
}
# What the one format is; a file that says otherwise has other bytes.
MXFP4 = {"num_bits": 4, "type": "float", "group_size": 32}


def read_quant(levels: Mapping[str, Mapping[str, Any]]) -> tuple[QuantConfig | None, set[str]]:
    """The quantisation that a file has at its levels, by name, and what of it stands where (for `hf_present`).

    Raises Error, naming the field, for another format, other settings, or levels that differ.
    """
    found = {name: level[KEY] for name, level in levels.items() if level.get(KEY) is not None}
    if not found:
        return None, set()
    first, *others = found.values()
    if any(other != first for other in others):
        raise Error(f"{KEY} differs between the top level and text_config; must be the same")
    if not isinstance(first, Mapping):
        raise Error(f"{KEY} is {first!r}; must be a JSON object")
    present = {f"{name}.{KEY}" for name in found}
    own: dict[str, Any] = {}
    for key, (field, allowed, _) in OWN.items():
        value = first.get(key)
        if value is not None:
            if value not in allowed:
                raise Error(f"{KEY}.{key} is {value!r}; allowed: {', '.join(allowed)}")
            own[field] = value
            present.add(key)
    hf = {key: value for key, value in first.items() if key not in present}
    _check(hf)
    return QuantConfig(**own, hf=hf), present


def same(value: Any, only: Any) -> bool:
    """Whether they are one JSON value; Python's True is 1."""
    return type(value) is type(only) and value == only


def _check(hf: Mapping[str, Any]) -> None:
    if hf.get("format") != "mxfp4-pack-quantized":
        raise Error(f"{KEY}.format is {hf.get('format')!r}; supported: 'mxfp4-pack-quantized'")
    groups = hf.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise Error(f"{KEY}.config_groups is {groups!r}; must be a JSON object with a group of weights")
    for name, group in groups.items():
        where = f"{KEY}.config_groups.{name}"
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise Error(f"{where} is {group!r}; must be a JSON object with 'weights'")
        for key, only in MXFP4.items():
            if not same(weights.get(key), only):
                raise Error(f"{where}.weights.{key} is {weights.get(key)!r}; supported: {only!r}")
        if group.get("input_activations") is not None:
            raise Error(
                f"{where}.input_activations is {group['input_activations']!r}; supported: null, with "
                f"{KEY}.perilune_activations beside it"
            )
    ignore = hf.get("ignore")
    if not isinstance(ignore, list | None) or not all(isinstance(rule, str) for rule in ignore or ()):
        raise Error(f"{KEY}.ignore is {ignore!r}; must be a list of module names and 're:' expressions")
    for rule in ignore or ():
        try:
            re.compile(rule.removeprefix("re:") if rule.startswith("re:") else "")
        except re.error as error:
            raise Error(f"{KEY}.ignore has {rule!r}, which is no regular expression: {error}") from None


def write_quant(quant: QuantConfig, present: frozenset[str]) -> dict[str, Any]:
    """The contents of quantization_config. present: what of ours the source file had."""
    values = dict(quant.hf) or mxfp4_quantization_config()
    for key, (field, _, usual) in OWN.items():
        value = getattr(quant, field)
        if value != usual or key in present:
            values[key] = value
    return values


def mxfp4_quantization_config() -> dict[str, Any]:
    """The quantization_config of a checkpoint whose routed experts are MXFP4 (compressed-tensors' own format)."""
    weights = MXFP4 | {
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


__all__ = ["KEY", "OWN", "mxfp4_quantization_config", "read_quant", "same", "write_quant"]
