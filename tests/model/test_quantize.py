"""Post-training quantisation against compressed-tensors' own decoder, and its report against float64."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from models import tiny_model
from safetensors.torch import load_file

from perilune import Error
from perilune.cli import main
from perilune.config import QuantConfig
from perilune.model import Transformer, load, quantize, save
from perilune.ops.mx import RULES


def _weights(model: Transformer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith(("gate_up_E2FL", "down_ELF"))}


@pytest.mark.parametrize("rule", RULES)
def test_report_and_stored_codes(rule: str, tmp_path: Path) -> None:
    model = tiny_model()
    before = _weights(model)
    found = quantize(model, QuantConfig(scale_rule=rule))  # type: ignore[arg-type]
    after = _weights(model)
    assert [each.name for each in found] == list(before)
    for each in found:
        change_E = (after[each.name] - before[each.name]).double().flatten(1).norm(dim=1)
        norm_E = before[each.name].double().flatten(1).norm(dim=1)
        assert each.relative == pytest.approx(float(change_E.norm() / norm_E.norm()), rel=1e-9)
        assert each.worst == pytest.approx(float((change_E / norm_E).max()), rel=1e-9)
        assert each.worst_expert == int((change_E / norm_E).argmax())
        assert 0.08 < each.relative < 0.16
        assert (each.clipped > 0) == (rule in ("even", "floor"))
        assert 0 < each.zeros < 0.2
    save(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    codes = [name for name in stored if name.endswith("weight_packed")]
    assert len(codes) == 3 * sum(p.shape[0] for n, p in before.items() if n.endswith("down_ELF"))
    for name in codes:
        rows, half = stored[name].shape
        scale = stored[name.replace("_packed", "_scale")]
        theirs = unpack_fp4_from_uint8(stored[name], rows, 2 * half, dtype=torch.float32).view(rows, -1, 32)
        theirs = (theirs * decompress_mx_scale(scale).float().unsqueeze(-1)).flatten(1)
        layer, expert, which = (
            int(name.split(".layers.")[1].split(".")[0]),
            int(name.split(".")[-3]),
            name.split(".")[-2],
        )
        stacked = after[f"layers.{layer}.ffn.{'down_ELF' if which == 'w2' else 'gate_up_E2FL'}"][expert]
        ours = {"w1": stacked[:rows], "w2": stacked, "w3": stacked[rows:]}[which]
        assert torch.equal(ours, theirs), name


def test_twice_is_refused_and_odd_sizes_too() -> None:
    model = tiny_model()
    quantize(model, QuantConfig())
    with pytest.raises(Error, match="quantised already, by scale_rule 'even'; asked for is 'ceil'"):
        quantize(model, QuantConfig(scale_rule="ceil"))
    config = tiny_model().config
    odd = dataclasses.replace(config, moe=dataclasses.replace(config.moe, expert_size=48))
    with pytest.raises(Error, match=r"moe\.expert_size is 48; must be a multiple of quant\.group_size = 32"):
        quantize(Transformer(odd), QuantConfig())


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tiny_model(), tmp_path / "in")
    (tmp_path / "in" / "tokenizer.model").write_text("words")
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--rule", "rceil"]) == 0
    said = capsys.readouterr().out
    assert "layers.1.ffn.gate_up_E2FL" in said
    assert " MB -> " in said
    assert (tmp_path / "out" / "tokenizer.model").read_text() == "words"
    again = load(tmp_path / "out", packed=True)
    assert again.config.quant is not None
    assert again.config.quant.scale_rule == "rceil"
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "in")]) == 2
    assert "rounding cannot be undone" in capsys.readouterr().err
    assert main(["quantize", str(tmp_path / "out"), str(tmp_path / "twice")]) == 2
    assert "quantised already" in capsys.readouterr().err
