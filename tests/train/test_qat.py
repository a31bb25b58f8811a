"""Quantisation-aware training: what is multiplied, what is updated, what is exported and served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from train_tiny import VOCAB, invented_text, tiny_model

from perilune import Error
from perilune.chat import train_bpe
from perilune.model import load, quantized_parameters
from perilune.ops.mx import RULES, fake_quantize
from perilune.ops.sequences import Sequences
from perilune.train.config import DataConfig, OptimConfig, QatConfig, TrainConfig
from perilune.train.masters import Masters
from perilune.train.trainer import Trainer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf: dict[str, Any] = tiny_model()
    hf["text_config"] |= {"moe_intermediate_size": 32, "routed_expert_hidden_size": 32}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(hf))
    text = invented_text(0, 2000)
    (tmp_path / "text.txt").write_text(text)
    train_bpe([text], VOCAB).save(tmp_path / "tokenizer")
    return tmp_path


def _config(folder: Path, out: str, **more: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "out": str(folder / out),
        "model": str(folder / "model"),
        "tokenizer": str(folder / "tokenizer"),
        "steps": 4,
        "eval_every": 0,
        "checkpoint_every": 2,
        "device": "cpu",
        "data": DataConfig(train=(str(folder / "text.txt"),), batch_tokens=96, sequence_tokens=48, shuffle_pieces=1),
        "optim": OptimConfig(lr=3e-3, warmup=0.0),
        "qat": QatConfig(enabled=True),
    }
    return TrainConfig(**(settings | more))


def _experts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p for n, p in model.named_parameters() if n.endswith(("gate_up_E2FL", "down_ELF"))}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", ["even", "rceil"])
def test_weights_are_the_rounded_masters_after_every_step(folder: Path, rule: Any, dtype: Any) -> None:
    trainer = Trainer(_config(folder, "run", qat=QatConfig(enabled=True, scale_rule=rule), dtype=dtype))
    moved = 0
    try:
        assert _experts(trainer.model).keys() == quantized_parameters(trainer.model.config)
        for _ in range(3):
            before = {name: master.clone() for name, master in trainer.masters.params.items()}
            for name, weight in _experts(trainer.model).items():
                master = trainer.masters.params[name]
                assert master.dtype == torch.float32
                assert torch.equal(weight.float(), fake_quantize(master, "mxfp4", rule))
            trainer.train_step()
            moved += sum(not torch.equal(before[n], trainer.masters.params[n]) for n in _experts(trainer.model))
    finally:
        trainer.close()
    assert moved == 3 * len(_experts(trainer.model))


def test_the_gradient_of_a_rounded_weight_is_its_masters(folder: Path) -> None:
    """The reference: autograd through `fake_quantize`, whose gradient is straight-through."""
    trainer = Trainer(_config(folder, "run"))
    trainer.close()
    model, masters = trainer.model, trainer.masters
    tokens_T, sequences = torch.arange(40) % VOCAB, Sequences.from_lengths((40,))
    model(tokens_T, sequences).square().mean().backward()
    masters.take_gradients()
    leaves = {n: masters.params[n].detach().clone().requires_grad_() for n in quantized_parameters(model.config)}
    rounded = {n: fake_quantize(leaf, "mxfp4") for n, leaf in leaves.items()}
    out = torch.func.functional_call(model, rounded, (tokens_T, sequences))
    for (name, leaf), d in zip(
        leaves.items(), torch.autograd.grad(out.square().mean(), list(leaves.values())), strict=True
    ):
        assert torch.equal(masters.params[name].grad, d), name
        assert leaf.grad is None


def test_what_was_trained_is_what_is_served(folder: Path) -> None:
    trainer = Trainer(_config(folder, "run"))
    result = trainer.run()
    tokens_T, sequences = torch.arange(60) * 11 % VOCAB, Sequences.from_lengths((33, 27))
    with torch.no_grad():
        trained = trainer.model(tokens_T, sequences)
        dense, packed = load(result.checkpoint), load(result.checkpoint, packed=True)
        assert dense.config.quant is not None
        assert dense.config.quant.activations == "inputs"
        assert torch.equal(dense(tokens_T, sequences), trained)
        # Products of one expert at a time instead of grouped ones: another order of sums in fp32.
        assert (packed(tokens_T, sequences) - trained).abs().max() <= 1e-5


def test_a_resumed_run_gives_the_same_bits(folder: Path) -> None:
    whole = Trainer(_config(folder, "whole"))
    whole.run()
    half = Trainer(_config(folder, "half", steps=4))
    half.train_step()
    half.train_step()
    half.save()
    half.close()
    again = Trainer(_config(folder, "half", steps=4))
    assert again.step == 2
    again.run()
    for name, master in whole.masters.params.items():
        assert torch.equal(master, again.masters.params[name]), name
    for (name, a), (_, b) in zip(whole.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_without_qat_a_quantised_start_is_exported_unquantised(folder: Path) -> None:
    result = Trainer(_config(folder, "first")).run()
    config = _config(folder, "second", init_from=str(result.checkpoint), qat=QatConfig(), steps=1)
    trainer = Trainer(config)
    assert trainer.model.config.quant is None
    assert not trainer.masters.quantized
    second = trainer.run()
    assert load(second.checkpoint).config.quant is None


@pytest.mark.parametrize("rule", RULES)
def test_another_rule_is_refused_with_both_named(folder: Path, rule: Any) -> None:
    result = Trainer(_config(folder, "first", steps=1)).run()
    config = _config(folder, "second", init_from=str(result.checkpoint), qat=QatConfig(enabled=True, scale_rule=rule))
    if rule == "even":
        trainer = Trainer(config)
        trainer.close()
        assert trainer.model.config.quant == load(result.checkpoint).config.quant
        return
    with pytest.raises(Error, match=f"qat.scale_rule is '{rule}', but .* is quantised by 'even'"):
        Trainer(config)


def test_rows_that_blocks_do_not_fill_are_named(folder: Path) -> None:
    trainer = Trainer(_config(folder, "run", qat=QatConfig()))
    trainer.close()
    ffn = trainer.model.layers[1].ffn
    ffn.down_ELF = torch.nn.Parameter(ffn.down_ELF.detach()[..., :24])
    with pytest.raises(Error, match=r"layers\.1\.ffn\.down_ELF has rows of 24 values on this rank; .* multiple of 32"):
        Masters(trainer.model, {"layers.1.ffn.down_ELF"})
