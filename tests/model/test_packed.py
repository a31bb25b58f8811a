"""A model whose experts stay packed: the numbers, the bytes, and the folder of the one that unpacked them.

Both multiply by the same decoded weights; grouped and single products add in another order, 1e-5 in fp32.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from models import tiny_model

from perilune import Error
from perilune.config import ModelConfig, QuantConfig
from perilune.model import EXACT, Transformer, load, save
from perilune.model.parts import DEFAULT
from perilune.ops.mx import RULES, fake_quantize
from perilune.ops.norm import rms_norm
from perilune.ops.sequences import Sequences

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
EXPERTS = ("gate_up_E2FL", "down_ELF")


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "config.json"}


def _logits(model: Transformer, tokens: int = 40) -> torch.Tensor:
    ids_T = torch.arange(tokens) * 7 % model.config.vocab_size
    with torch.no_grad():
        return model(ids_T, Sequences.from_lengths((tokens - 11, 11)))


def _quantised(quant: QuantConfig) -> Transformer:
    plain = tiny_model()
    model = Transformer(dataclasses.replace(plain.config, quant=quant))
    model.load_state_dict(plain.state_dict())
    return model


def test_same_logits_and_bytes_as_unpacked(tmp_path: Path) -> None:
    dense, packed = load(GOLDENS / "k3-eps"), load(GOLDENS / "k3-eps", packed=True)
    want = _logits(dense)
    assert (_logits(packed) - want).abs().max() <= 1e-5 * want.abs().max()
    exact = [_logits(model.with_parts(EXACT)) for model in (dense, packed)]
    assert torch.equal(*exact), "one product an expert in both"
    sizes = [sum(t.nbytes for t in (*m.parameters(), *m.buffers())) for m in (dense, packed)]
    weights = sum(p.nbytes for n, p in dense.named_parameters() if n.endswith(EXPERTS))
    assert sizes[0] - sizes[1] == weights - weights // dense.lm_head.weight.itemsize * 17 // 32
    for name, model in (("dense", dense), ("packed", packed)):
        save(model, tmp_path / name)
    assert _files(tmp_path / "dense").keys() == _files(tmp_path / "packed").keys()
    save(load(tmp_path / "packed"), tmp_path / "again")
    assert _files(tmp_path / "again") == _files(tmp_path / "packed")


def test_a_dense_checkpoint_has_nothing_to_pack(tmp_path: Path) -> None:
    save(tiny_model(), tmp_path)
    model = load(tmp_path, packed=True)
    assert set(EXPERTS) <= {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    with pytest.raises(Error, match=r"packed is true but config\.quant is None"):
        Transformer(model.config, packed=True)


@pytest.mark.parametrize("rule", RULES)
def test_what_is_saved_is_the_fake_quantised_model(rule: str, tmp_path: Path) -> None:
    """Exported codes decode to what training with that rule multiplies by, bit for bit."""
    model = _quantised(QuantConfig(scale_rule=rule, activations="inputs"))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(EXPERTS):
                fake_quantize(weight, "mxfp4", rule, out=weight)
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config.quant is not None
    assert (again.config.quant.scale_rule, again.config.quant.activations) == (rule, "inputs")
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(_logits(again), _logits(model))


def test_quantised_inputs_change_the_numbers_and_pass_gradients() -> None:
    plain, inputs = (_quantised(QuantConfig(activations=a)) for a in ("none", "inputs"))
    layer, twin = plain.layers[1].ffn, inputs.layers[1].ffn
    x_TD = torch.randn(64, plain.config.hidden_size)
    with torch.no_grad():
        y_TD, routing = layer(x_TD, plain.parts)
        z_TL = fake_quantize(layer.latent_down(x_TD), "mxfp8")
        y_TL = DEFAULT.mixture(z_TL, routing, layer.weights(), layer.activation)
        want_TD = layer.latent_up(rms_norm(y_TL, layer.latent_norm, layer.eps)) + layer.shared(x_TD, DEFAULT)
        got_TD = twin(x_TD, inputs.parts)[0]
    assert torch.equal(got_TD, want_TD)
    assert not torch.equal(got_TD, y_TD)
    x_TD = inputs.hidden(torch.arange(30), Sequences.from_lengths((30,))).x_TD
    x_TD.square().sum().backward()
    for name, weight in inputs.named_parameters():
        assert weight.grad is not None or "res" in name or "lm_head" in name, name


def test_unknown_fields_are_refused() -> None:
    config = tiny_model().config
    for wrong, match in (
        ({"scale_rule": "EVEN"}, r"quant\.scale_rule is 'EVEN'; allowed: even, floor, rceil, ceil"),
        ({"activations": "fp8"}, r"quant\.activations is 'fp8'; allowed: none, inputs, all"),
    ):
        with pytest.raises(Error, match=match):
            dataclasses.replace(config, quant=QuantConfig(**wrong))  # type: ignore[arg-type]
    assert isinstance(config, ModelConfig)
