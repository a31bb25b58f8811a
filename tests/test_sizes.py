"""Counts from a config against published totals, and against the tensors of a model that is really built."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.model import Transformer, initialize, save
from perilune.sizes import count, tensors


def by_component(name: str) -> dict[str, int]:
    return {part.name: part.parameters for part in count(ModelConfig.from_pretrained(name)).components}


def test_kimi_k3_matches_the_released_checkpoint_to_the_byte() -> None:
    sizes = count(ModelConfig.from_pretrained("kimi-k3"))
    assert sizes.parameters == 2_779_931_837_184
    assert sizes.text_parameters == 2_779_484_478_208
    assert sizes.checkpoint_bytes == 1_560_860_324_864  # metadata.total_size of the released index
    assert sizes.tensors == 497_220


def test_kimi_k3_active_parameters() -> None:
    sizes = count(ModelConfig.from_pretrained("kimi-k3"))
    assert round(sizes.active / 1e9, 2) == 104.19  # the report rounds to 104.2
    assert sum(part.active for part in sizes.components) == sizes.active


@pytest.mark.parametrize(
    ("component", "billions", "digits"),
    [
        ("routed experts", 2722.7, 1),
        ("KDA", 30.6, 1),
        ("shared experts", 12.2, 1),
        ("MLA", 5.6, 1),
        ("latent projections", 4.7, 1),
        ("dense feed-forward", 0.73, 2),
        ("routers", 0.59, 2),
        ("vision tower", 0.401, 3),
        ("vision projector", 0.046, 3),
    ],
)
def test_kimi_k3_split(component: str, billions: float, digits: int) -> None:
    assert round(by_component("kimi-k3")[component] / 1e9, digits) == billions


def test_kimi_k3_state_and_cache() -> None:
    sizes = count(ModelConfig.from_pretrained("kimi-k3"))
    assert sizes.kda_state_bytes == 69 * 96 * 128 * 128 * 4
    assert round(sizes.kda_state_bytes / 1e6, 1) == 434.1
    assert round(sizes.kda_state_with_conv_bytes / 1e6, 1) == 449.4
    assert sizes.kv_bytes_per_token == 24 * 576 * 2


def test_kimi_linear() -> None:
    sizes = count(ModelConfig.from_pretrained("kimi-linear-48b-a3b"))
    assert round(sizes.parameters / 1e9, 2) == 49.12
    assert sizes.text_parameters == sizes.parameters
    assert round(sizes.active / 1e9, 1) == 3.1
    assert round(sizes.checkpoint_bytes / 2**30, 1) == 91.5  # 20 released shards


def test_the_small_presets_keep_their_promise() -> None:
    assert count(ModelConfig.from_pretrained("nano")).parameters <= 3_500_000
    assert 80e6 < count(ModelConfig.from_pretrained("mini")).parameters < 140e6


@pytest.mark.parametrize("preset", ["kimi-k3", "kimi-linear-48b-a3b", "mini", "nano"])
def test_parts_add_up(preset: str) -> None:
    config = ModelConfig.from_pretrained(preset)
    sizes = count(config)
    assert sizes.parameters == sum(math.prod(t.shape) * t.copies for t in tensors(config))
    assert sizes.checkpoint_bytes == sum(part.bytes for part in sizes.components)
    assert sizes.active < sizes.parameters


def test_a_model_without_experts_has_none_to_count() -> None:
    config = ModelConfig.from_pretrained("nano")
    dense = dataclasses.replace(config, dense_layers=config.num_layers)
    names = [part.name for part in count(dense).components]
    assert "dense feed-forward" in names
    assert not {"routed experts", "shared experts", "routers"} & set(names)


def test_a_vision_part_without_a_size_is_named() -> None:
    hf = json.loads(json.dumps(ModelConfig.from_pretrained("kimi-k3").to_hf()))
    del hf["vision_config"]["vt_hidden_size"]
    with pytest.raises(Error, match=r"vision_config\.vt_hidden_size is None; must be an integer"):
        count(ModelConfig.from_hf(hf))


@pytest.mark.parametrize("field", ["vision_config", "merge_kernel_size", "patch_size", "vt_num_hidden_layers"])
def test_a_vision_part_of_another_type_is_named(field: str) -> None:
    for value in ("x", ["x"], 1.5, -1, True):
        hf = ModelConfig.from_pretrained("kimi-k3").to_hf()
        (hf if field in hf else hf["vision_config"])[field] = value
        with pytest.raises(Error, match=rf"{field} is {re.escape(repr(value))}; must be"):
            count(ModelConfig.from_hf(hf))


@pytest.mark.parametrize("dtype", ["int3", ["bfloat16"], 16])
def test_an_unknown_dtype_is_named(dtype: object) -> None:
    hf = ModelConfig.from_pretrained("nano").to_hf()
    hf["text_config"]["dtype"] = dtype
    with pytest.raises(Error, match=rf"dtype is {re.escape(repr(dtype))}; sizes"):
        count(ModelConfig.from_hf(hf))


@pytest.mark.parametrize("packed", [False, True])
def test_counts_equal_a_saved_checkpoint(packed: bool, tmp_path: Path) -> None:
    """Written by the checkpoint room from its own table of names: tensors, parameters and bytes must be the same."""
    hf = ModelConfig.from_pretrained("nano").to_hf()
    if packed:
        hf["text_config"] |= {"moe_intermediate_size": 64, "routed_expert_hidden_size": 96}
        hf["text_config"]["quantization_config"] = ModelConfig.from_pretrained("kimi-k3").to_hf()["text_config"][
            "quantization_config"
        ]
    config = ModelConfig.from_hf(hf)
    save(initialize(Transformer(config)), tmp_path / "model")
    stored = stored_bytes = parameters = 0
    for shard in (tmp_path / "model").glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                tensor = file.get_tensor(name)
                stored += 1
                stored_bytes += tensor.nbytes
                parameters += 0 if name.endswith("_scale") else tensor.numel() * (2 if name.endswith("_packed") else 1)
    sizes = count(config)
    assert (sizes.tensors, sizes.parameters, sizes.checkpoint_bytes) == (stored, parameters, stored_bytes)
