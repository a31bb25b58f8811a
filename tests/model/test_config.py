"""ModelConfig: exact Hugging Face round trip, presets, and errors that name the field."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from perilune import Error, ModelConfig
from perilune.config import PRESETS, Gate

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
PRESET_FILES = Path(__file__).parents[2] / "perilune" / "presets"


def golden() -> dict:
    return json.loads((GOLDENS / "k3-tiny" / "config.json").read_text())


def sources() -> list[Path]:
    return [GOLDENS / "k3-tiny" / "config.json", GOLDENS / "k3-eps" / "config.json", *sorted(PRESET_FILES.iterdir())]


@pytest.mark.parametrize("path", sources(), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_round_trip_is_exact(path: Path) -> None:
    data = json.loads(path.read_text())
    assert ModelConfig.from_pretrained(path).to_hf() == data


def test_round_trip_keeps_unused_fields_of_every_level() -> None:
    data = golden()
    data["torch_dtype"] = {"nested": [1, 2]}
    data["text_config"]["rope_theta"] = 1e4
    data["text_config"]["linear_attn_config"]["comment"] = None
    assert ModelConfig.from_hf(copy.deepcopy(data)).to_hf() == data


def test_round_trip_keeps_absent_fields_absent() -> None:
    data = golden()
    for key in ("rms_norm_eps", "initializer_range", "num_key_value_heads", "first_k_dense_replace"):
        del data["text_config"][key]
    data["text_config"]["q_lora_rank"] = None
    assert ModelConfig.from_hf(copy.deepcopy(data)).to_hf() == data


@pytest.mark.parametrize("name", PRESETS)
def test_config_made_in_python_survives_writing(name: str) -> None:
    config = dataclasses.replace(ModelConfig.from_pretrained(name), hf_present=None, hf_extra={})
    again = ModelConfig.from_hf(config.to_hf())
    assert dataclasses.replace(again, hf_present=None, hf_extra={}, quant=config.quant) == config


def test_k3_facts() -> None:
    config = ModelConfig.from_pretrained("kimi-k3")
    assert len(config.mla.layers) == 24
    assert config.mla.layers[-2:] == (91, 92)
    assert len(config.kda.layers) == 69
    assert config.kda.gate == Gate("safe", -5.0)
    assert config.mla.norm_eps == 1e-6
    assert [layer for layer in range(93) if config.starts_block(layer)] == list(range(0, 93, 12))


def test_kimi_linear_facts() -> None:
    config = ModelConfig.from_pretrained("kimi-linear-48b-a3b")
    assert config.kda.gate == Gate("softplus")
    assert config.attn_res is None
    assert config.mla.q_lora_rank is None
    assert config.moe.scaling_factor == 2.446


def test_own_fields_are_written() -> None:
    config = ModelConfig.from_hf(golden())
    config = dataclasses.replace(
        config,
        mla=dataclasses.replace(config.mla, norm_eps=1e-5),
        quant=dataclasses.replace(config.quant, scale_rule="floor"),
    )
    text = config.to_hf()["text_config"]
    assert text["perilune_mla_norm_eps"] == 1e-5
    assert text["quantization_config"]["perilune_scale_rule"] == "floor"
    again = ModelConfig.from_hf(config.to_hf())
    assert (again.mla.norm_eps, again.quant.scale_rule) == (1e-5, "floor")


def test_quantisation_added_later_is_written() -> None:
    quant = ModelConfig.from_hf(golden()).quant
    config = dataclasses.replace(ModelConfig.from_pretrained("mini"), quant=quant)
    assert ModelConfig.from_hf(config.to_hf()).quant == quant


def edit(path: str, value: object):
    def apply(data: dict) -> None:
        *parents, leaf = path.split(".")
        for key in parents:
            data = data[key]
        if value is KeyError:
            del data[leaf]
        else:
            data[leaf] = value

    return apply


TEXT = "text_config"
LINEAR = "text_config.linear_attn_config"
BAD = [
    (edit("model_type", "llama"), "model_type"),
    (edit(TEXT, KeyError), "text_config"),
    (edit(LINEAR, KeyError), "linear_attn_config"),
    (edit(f"{TEXT}.hidden_size", KeyError), "hidden_size"),
    (edit(f"{TEXT}.hidden_size", 0), "hidden_size"),
    (edit(f"{TEXT}.hidden_size", "64"), "hidden_size"),
    (edit(f"{TEXT}.num_hidden_layers", 15), "layers"),
    (edit(f"{LINEAR}.kda_layers", [1, 2]), "layers"),
    (edit(f"{LINEAR}.full_attn_layers", [0, 4]), "full_attn_layers"),
    (edit(f"{TEXT}.num_experts_per_token", 17), "top_k"),
    (edit(f"{TEXT}.moe_intermediate_size", 48), "group_size"),
    (edit(f"{LINEAR}.gate_lower_bound", -6.0), "lower_bound"),
    (edit(f"{LINEAR}.gate_lower_bound", 1.0), "lower_bound"),
    (edit(f"{LINEAR}.short_conv_kernel_size", 3), "conv_size"),
    (edit(f"{TEXT}.mla_use_nope", False), "mla_use_nope"),
    (edit(f"{TEXT}.num_expert_group", 8), "num_expert_group"),
    (edit(f"{TEXT}.moe_router_activation_func", "softmax"), "moe_router_activation_func"),
    (edit(f"{TEXT}.tie_word_embeddings", True), "tie_word_embeddings"),
    (edit(f"{TEXT}.num_key_value_heads", 2), "num_key_value_heads"),
    (edit(f"{TEXT}.hidden_act", "gelu"), "hidden_act"),
    (edit(f"{TEXT}.perilune_typo", 1), "perilune_typo"),
    (edit("perilune_typo", 1), "perilune_typo"),
    (edit(f"{TEXT}.quantization_config.perilune_scale_rule", "nearest"), "perilune_scale_rule"),
    (edit(f"{TEXT}.quantization_config.format", "int4"), "format"),
    (edit(f"{TEXT}.quantization_config.config_groups.group_0.weights.group_size", 16), "group_size"),
    (edit(f"{TEXT}.rms_norm_eps", 0.0), "rms_norm_eps"),
    (edit(f"{TEXT}.rms_norm_eps", "x"), "rms_norm_eps"),
    (edit(f"{TEXT}.num_experts_per_token", "a"), "top_k"),
    (edit(f"{TEXT}.num_hidden_layers", 10**9), "layers"),
    (edit(f"{TEXT}.quantization_config", 5), "quantization_config"),
    (edit(f"{TEXT}.quantization_config.config_groups", [1]), "group_size"),
    (edit(f"{TEXT}.eos_token_id", "x"), "eos_token_id"),
    (edit(f"{TEXT}.first_k_dense_replace", "x"), "dense_layers"),
    (edit(f"{TEXT}.activation_situ_beta", "x"), "activation.beta"),
    (edit(f"{LINEAR}.gate_lower_bound", "x"), "lower_bound"),
    (edit(f"{LINEAR}.use_full_rank_gate", "yes"), "full_rank_gate"),
]


@pytest.mark.parametrize(("change", "named"), BAD, ids=[f"{i}-{b[1]}" for i, b in enumerate(BAD)])
def test_bad_config_is_one_error_that_names_the_field(change, named: str) -> None:
    data = golden()
    change(data)
    with pytest.raises(Error, match=named) as caught:
        ModelConfig.from_hf(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", '"x"'])
def test_bad_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(Error, match=r"config\.json"):
        ModelConfig.from_pretrained(tmp_path)


def test_missing_file_names_the_presets(tmp_path: Path) -> None:
    with pytest.raises(Error, match="nano"):
        ModelConfig.from_pretrained(tmp_path / "absent")
