"""Trainer, file and config mean the same quantised modules, compared as sets before a weight is read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from models import tiny_model
from safetensors.torch import load_file, save_file

from perilune import Error, ModelConfig
from perilune.config import QuantConfig
from perilune.config_hf import mxfp4_quantization_config
from perilune.model import load, quantized_parameters, save
from perilune.model.names import entries
from perilune.model.quantized import check_quantized


def _config(quantized: bool = True) -> ModelConfig:
    quant = QuantConfig() if quantized else None
    return dataclasses.replace(ModelConfig.from_pretrained("nano"), quant=quant, hf_present=None, hf_extra={})


def _stored(config: ModelConfig) -> set[str]:
    return {name for entry in entries(config) for name in entry.stored()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small packed checkpoint."""
    model = tiny_model()
    model.config = dataclasses.replace(model.config, quant=QuantConfig(), hf_present=None, hf_extra={})
    save(model, tmp_path / "model")
    return tmp_path / "model"


def test_equal_sets_pass_with_and_without_quantisation() -> None:
    for config in (_config(), _config(False)):
        ignore = mxfp4_quantization_config()["ignore"]
        check_quantized("it", entries(config), _stored(config), ignore)
    assert quantized_parameters(_config(False)) == frozenset()
    assert {name.rpartition(".")[2] for name in quantized_parameters(_config())} == {"gate_up_E2FL", "down_ELF"}


@pytest.mark.parametrize("rule", ["re:.*gate", "re:.*mlp.gate", "re:.*mlp.gate.*", "mlp.gate", "gate", "re:gate"])
def test_no_pattern_for_the_router_swallows_an_expert(rule: str) -> None:
    """The experts' modules are w1, w2 and w3: no name of a router is part of theirs."""
    check_quantized("it", entries(_config()), _stored(_config()), [rule])


@pytest.mark.parametrize("rule", ["re:.*block_sparse_moe", "re:.*experts", "re:.*w1$"])
def test_a_pattern_that_leaves_experts_out_is_refused(rule: str) -> None:
    with pytest.raises(
        Error, match=r"has .*experts\.0\.w1.* in MXFP4, which .* in quantization_config.ignore leaves out"
    ):
        check_quantized("it", entries(_config()), _stored(_config()), [rule])


def test_both_differences_are_listed() -> None:
    config = _config()
    stored = _stored(config)
    expert = next(n for n in sorted(stored) if n.endswith("w1.weight_packed")).removesuffix(".weight_packed")
    router = next(n for n in sorted(stored) if n.endswith("gate.weight")).removesuffix(".weight")
    stored -= {f"{expert}.weight_packed", f"{expert}.weight_scale", f"{router}.weight"}
    stored |= {f"{expert}.weight", f"{router}.weight_packed", f"{router}.weight_scale"}
    with pytest.raises(Error, match="disagree on which modules are MXFP4") as caught:
        check_quantized("it", entries(config), stored, [])
    assert f"only in the file: {router}; only in the config: {expert}" in str(caught.value)


def test_a_config_without_quantisation_meets_a_packed_file() -> None:
    with pytest.raises(Error, match=r"only in the file: .*experts\.0\.w1, .* more; only in the config: none"):
        check_quantized("it", entries(_config(False)), _stored(_config()), [])


def test_load_compares(folder: Path) -> None:
    assert load(folder).config.quant is not None
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in sorted(tensors) if n.endswith("w2.weight_packed")).removesuffix("_packed")
    del tensors[f"{name}_packed"], tensors[f"{name}_scale"]
    save_file(tensors | {name: torch.zeros(64, 32)}, folder / "model.safetensors")
    with pytest.raises(Error, match=f"only in the file: none; only in the config: {name.removesuffix('.weight')}"):
        load(folder)


def test_load_reads_the_ignore_list(folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    found = [level["quantization_config"] for level in (data, data["text_config"]) if "quantization_config" in level]
    for quant in found:
        quant["ignore"].append("re:.*experts.*")
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(Error, match=r"which 're:\.\*experts\.\*' in quantization_config.ignore leaves out"):
        load(folder)
