"""ModelConfig: exact Hugging Face round trip, presets, and errors that name the field."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from perilune import Error, ModelConfig
from perilune.config import PRESETS, Gate, QuantConfig
from perilune.config_hf import FIXED, LINEAR_FIELDS, TEXT_FIELDS, TOKENS

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
QUANT = "text_config.quantization_config"
GROUP = f"{QUANT}.config_groups.group_0"
BAD = [
    (edit("model_type", "llama"), "model_type"),
    (edit(TEXT, KeyError), "text_config"),
    (edit(LINEAR, KeyError), "linear_attn_config"),
    (edit(f"{TEXT}.hidden_size", KeyError), "hidden_size"),
    (edit(f"{TEXT}.hidden_size", 0), "hidden_size"),
    (edit(f"{TEXT}.hidden_size", "64"), "hidden_size"),
    (edit(f"{TEXT}.num_hidden_layers", 15), "num_hidden_layers"),
    (edit(f"{LINEAR}.kda_layers", [1, 2]), "kda_layers"),
    (edit(f"{LINEAR}.full_attn_layers", [0, 4]), "full_attn_layers"),
    (edit(f"{TEXT}.num_experts_per_token", 17), "num_experts_per_token"),
    (edit(f"{TEXT}.moe_intermediate_size", 48), "moe_intermediate_size"),
    (edit(f"{LINEAR}.gate_lower_bound", -6.0), "gate_lower_bound"),
    (edit(f"{LINEAR}.gate_lower_bound", 1.0), "gate_lower_bound"),
    (edit(f"{LINEAR}.short_conv_kernel_size", 3), "short_conv_kernel_size"),
    (edit(f"{TEXT}.mla_use_nope", False), "mla_use_nope"),
    (edit(f"{TEXT}.num_expert_group", 8), "num_expert_group"),
    (edit(f"{TEXT}.moe_router_activation_func", "softmax"), "moe_router_activation_func"),
    (edit(f"{TEXT}.tie_word_embeddings", True), "tie_word_embeddings"),
    (edit("tie_word_embeddings", True), "tie_word_embeddings"),
    (edit(f"{QUANT}.ignore", [5]), "ignore"),
    (edit(f"{QUANT}.ignore", "re:x"), "ignore"),
    (edit(f"{QUANT}.ignore", ["re:("]), r"ignore has 're:\('"),
    (edit(f"{GROUP}.weights.num_bits", 8), "num_bits"),
    (edit(f"{GROUP}.weights.type", "int"), "type"),
    (edit(f"{GROUP}.weights.group_size", [32]), "group_size"),
    (edit(f"{GROUP}.input_activations", {"num_bits": 8}), "input_activations"),
    (edit(f"{TEXT}.num_key_value_heads", 2), "num_key_value_heads"),
    (edit(f"{TEXT}.hidden_act", "gelu"), "hidden_act"),
    (edit(f"{TEXT}.perilune_typo", 1), "perilune_typo"),
    (edit("perilune_typo", 1), "perilune_typo"),
    (edit(f"{TEXT}.quantization_config.perilune_scale_rule", "nearest"), "perilune_scale_rule"),
    (edit(f"{TEXT}.quantization_config.format", "int4"), "format"),
    (edit(f"{TEXT}.quantization_config.config_groups.group_0.weights.group_size", 16), "group_size"),
    (edit(f"{TEXT}.rms_norm_eps", 0.0), "rms_norm_eps"),
    (edit(f"{TEXT}.rms_norm_eps", "x"), "rms_norm_eps"),
    (edit(f"{TEXT}.num_experts_per_token", "a"), "num_experts_per_token"),
    (edit(f"{TEXT}.num_hidden_layers", 10**9), "num_hidden_layers"),
    (edit(f"{TEXT}.quantization_config", 5), "quantization_config"),
    (edit(f"{TEXT}.quantization_config.config_groups", [1]), "config_groups"),
    (edit(f"{TEXT}.eos_token_id", "x"), "eos_token_id"),
    (edit(f"{TEXT}.first_k_dense_replace", "x"), "first_k_dense_replace"),
    (edit(f"{TEXT}.activation_situ_beta", "x"), "activation_situ_beta"),
    (edit(f"{LINEAR}.gate_lower_bound", "x"), "gate_lower_bound"),
    (edit(f"{LINEAR}.use_full_rank_gate", "yes"), "use_full_rank_gate"),
]


@pytest.mark.parametrize(("change", "named"), BAD, ids=[f"{i}-{b[1]}" for i, b in enumerate(BAD)])
def test_bad_config_is_one_error_that_names_the_field(change, named: str) -> None:
    data = golden()
    change(data)
    with pytest.raises(Error, match=named) as caught:
        ModelConfig.from_hf(data)
    assert "\n" not in str(caught.value)


# What each field must not be, besides the numbers that fit no memory: 2.0 is no count, True no number, NaN no size.
NEVER = ("x", [], {}, [[1]], {"a": 1}, float("nan"), float("inf"), -1.5, True, 10**400)
MAY_BE = {"mla_use_output_gate": [True], "latent_moe_use_norm": [True], "moe_renormalize": [True]}
MAY_BE |= {"use_full_rank_gate": [True], "gate_lower_bound": [-1.5], "mla_use_nope": [True]}
# A list of ids: the first of them; none: no such token.
MAY_BE |= {key: [[]] for key in TOKENS}


@pytest.mark.parametrize("level", [TEXT, LINEAR])
def test_wrong_types_and_huge_numbers_name_the_field(level: str) -> None:
    fields = {**TEXT_FIELDS, **FIXED, **dict.fromkeys(TOKENS)} if level == TEXT else LINEAR_FIELDS
    for key in fields:
        for value in NEVER:
            data = golden()
            edit(f"{level}.{key}", copy.deepcopy(value))(data)
            if value in MAY_BE.get(key, []):
                ModelConfig.from_hf(data)
                continue
            # A huge token id is one that never comes.
            if key in TOKENS and value == 10**400:
                continue
            with pytest.raises(Error, match=rf"\b{key}\b") as caught:
                ModelConfig.from_hf(data)
            assert "\n" not in str(caught.value)


def test_counts_are_whole_and_fit_32_bits() -> None:
    for key, value in [(key, value) for key in golden()[TEXT] for value in (2.0, 2**31)]:
        if type(golden()[TEXT][key]) is int and key not in (*FIXED, *TOKENS):
            data = golden()
            data[TEXT][key] = value
            with pytest.raises(Error, match=f"^{key} is {value}; must"):
                ModelConfig.from_hf(data)


def test_nulls_stay_where_they_are() -> None:
    data = golden()
    data[TEXT]["num_key_value_heads"] = None
    data[TEXT]["quantization_config"]["perilune_scale_rule"] = None
    data["quantization_config"] = None
    assert ModelConfig.from_hf(copy.deepcopy(data)).to_hf() == data


def test_other_sizes_leave_no_field_of_the_file_behind() -> None:
    config = ModelConfig.from_hf(golden())
    config = dataclasses.replace(config, mla=dataclasses.replace(config.mla, num_heads=8))
    assert ModelConfig.from_hf(config.to_hf()).mla.num_heads == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [("format", "int4"), ("group_size", 16), ("group_size", 0), ("scale_rule", "up"), ("activations", "some")],
)
def test_a_quantisation_made_in_python_is_checked(field: str, value: object) -> None:
    quant = dataclasses.replace(QuantConfig(), **{field: value})
    with pytest.raises(Error, match=f"quant.{field} is {value!r}; allowed: "):
        dataclasses.replace(ModelConfig.from_pretrained("mini"), quant=quant)


@pytest.mark.parametrize("content", ["{", "[]", '"x"', "[" * 100_000])
def test_bad_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(Error, match=r"config\.json"):
        ModelConfig.from_pretrained(tmp_path)


def test_missing_file_names_the_presets(tmp_path: Path) -> None:
    with pytest.raises(Error, match="nano"):
        ModelConfig.from_pretrained(tmp_path / "absent")
