"""Logits of random checkpoints in the released layout against the released reference code's.

The golden logits were computed in float32 with absolute maximum 6; two independent float32 implementations differ by
about 6e-5, so 2e-4 leaves rounding room and catches any wrong constant (k3-eps: the MLA norms' own epsilon).
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from models import GOLDENS
from safetensors.torch import load_file

from perilune import Sequences, Transformer
from perilune.model import EXACT, load, save

TOLERANCE = 2e-4


def difference(model: Transformer, name: str) -> float:
    golden = load_file(GOLDENS / name / "golden.safetensors")
    ids_NT, expected = golden["input_ids"], golden["logits"]
    sequences = Sequences.from_lengths([ids_NT.shape[1]] * ids_NT.shape[0])
    with torch.inference_mode():
        logits = model(ids_NT.flatten(), sequences).view(expected.shape)
    assert logits.dtype == torch.float32
    return (logits - expected).abs().max().item()


@pytest.mark.parametrize("name", ["k3-tiny", "k3-eps"])
def test_logits_equal_the_golden_ones(name: str) -> None:
    assert difference(load(GOLDENS / name, dtype=torch.float32), name) <= TOLERANCE


@pytest.mark.parametrize("name", ["k3-tiny", "k3-eps"])
def test_saved_and_loaded_again(name: str, tmp_path: Path) -> None:
    save(load(GOLDENS / name, dtype=torch.float32), tmp_path / "copy", max_shard_bytes=200_000)
    assert (tmp_path / "copy" / "model.safetensors.index.json").exists()
    assert difference(load(tmp_path / "copy", dtype=torch.float32), name) <= TOLERANCE


def test_exact_parts_give_the_same_logits() -> None:
    assert difference(load(GOLDENS / "k3-tiny", dtype=torch.float32, parts=EXACT), "k3-tiny") <= TOLERANCE


def test_float64_agrees_with_float32_golden() -> None:
    golden = load_file(GOLDENS / "k3-tiny" / "golden.safetensors")
    model = load(GOLDENS / "k3-tiny", dtype=torch.float64)
    with torch.inference_mode():
        logits = model(golden["input_ids"][0], Sequences.from_lengths([150]))
    assert logits.dtype == torch.float64
    assert (logits - golden["logits"][0]).abs().max() <= TOLERANCE


def test_the_wrong_mla_epsilon_is_seen() -> None:
    model = load(GOLDENS / "k3-eps", dtype=torch.float32)
    for layer in model.config.mla.layers:
        model.layers[layer].attn.eps = model.config.rms_norm_eps
    assert difference(model, "k3-eps") > 10 * TOLERANCE


def test_taps_are_the_block_sums() -> None:
    model = load(GOLDENS / "k3-tiny", dtype=torch.float32)
    tokens = torch.arange(10)
    with torch.inference_mode():
        hidden = model.hidden(tokens, Sequences.from_lengths([10]), taps=(0, 1, -1))
        plain = model.hidden(tokens, Sequences.from_lengths([10]))
    assert torch.equal(hidden.x_TD, plain.x_TD)
    assert torch.equal(hidden.taps[0], model.embed(tokens))
    assert set(hidden.taps) == {0, 1, -1}
    assert all(tap.shape == (10, 64) for tap in hidden.taps.values())
    assert not torch.equal(hidden.taps[1], hidden.taps[-1])
    with pytest.raises(ValueError, match="taps"):
        model.hidden(tokens, Sequences.from_lengths([10]), taps=(9,))
    assert dataclasses.is_dataclass(hidden)
