"""What fits, and models by name; without loading anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perilune import Error, ModelConfig
from perilune.cli.serve import run
from perilune.serve.server.fit import fit
from perilune.serve.server.hub import folder_of
from perilune.sizes import VISION, count

H200 = 141 * 10**9


def test_kimi_k3_does_not_fit_on_eight_and_the_sum_is_shown() -> None:
    config = ModelConfig.from_pretrained("kimi-k3")
    with pytest.raises(Error, match="does not fit") as refused:
        fit(config, H200, ranks=8)
    numbers = [float(n.replace(",", "")) for n in re.findall(r"([\d,.]+) GB", str(refused.value))]
    weights, states, step, cache, need, memory, budget = numbers
    sizes = count(config)
    text = sum(part.bytes for part in sizes.components if part.name not in VISION)
    assert weights == pytest.approx(text / 8 / 1e9, abs=0.01)
    assert states == pytest.approx(64 * sizes.kda_state_with_conv_bytes / 8 / 1e9, abs=0.01)
    assert need == pytest.approx(weights + states + step + cache, abs=0.03)
    assert (memory, budget) == (141.0, pytest.approx(126.9))
    devices = int(re.search(r"At least (\d+) such devices", str(refused.value))[1])
    assert fit(config, H200, ranks=devices, slots=8).arena > 0


def test_what_fits_adds_up() -> None:
    config = ModelConfig.from_pretrained("kimi-linear-48b-a3b")
    found = fit(config, H200, share=0.9, slots=64)
    assert found.weights + found.states + found.step + found.arena == int(H200 * 0.9)
    assert found.weights == pytest.approx(98.2e9, rel=0.02)
    assert fit(config, H200, ranks=2).arena > found.arena
    assert fit(config, 2 * H200, element=4).weights == pytest.approx(2 * found.weights, rel=1e-3)


def test_packed_experts_stay_packed_whatever_the_number_format() -> None:
    config = ModelConfig.from_pretrained("kimi-k3")
    stored, wide = (fit(config, 10**14, element=element).weights for element in (None, 4))
    parts = {part.name: part for part in count(config).components}
    others = sum(part.parameters for name, part in parts.items() if name not in (*VISION, "routed experts"))
    assert wide == parts["routed experts"].bytes + 4 * others
    assert stored < wide < 1.2 * stored


def test_too_many_requests_are_told_apart_from_too_large_a_model() -> None:
    config = ModelConfig.from_pretrained("nano")
    with pytest.raises(Error, match="Fewer requests at once"):
        fit(config, 100_000_000, slots=10_000)


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    """There are no weights in the folder: the config alone says no."""
    preset = Path(__file__).parents[3] / "perilune" / "presets" / "kimi-k3.json"
    (tmp_path / "config.json").write_bytes(preset.read_bytes())
    with pytest.raises(Error, match="the model does not fit: each of 1 device needs 1,"):
        run([str(tmp_path), "--device", "cpu"])


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "/no/such/folder", "../up"])
def test_what_is_neither_a_folder_nor_a_name(name: str) -> None:
    with pytest.raises(Error, match="model is"):
        folder_of(name)


def test_a_name_of_the_hub_comes_from_the_cache_of_an_offline_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HF_HUB_OFFLINE is set for all tests; the layout is the hub's own cache."""
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert folder_of("owner/name", cache=str(tmp_path)) == snapshot
    with pytest.raises(Error, match="cannot be reached"):
        folder_of("owner/other", cache=str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--data-parallel-size", "0"], "--data-parallel-size is 0"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size is 0"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization is 1.5"),
        (["--port", "70000"], "--port is 70000"),
        (["--kv-offloading-size", "nan"], "--kv-offloading-size is nan"),
        (["--tool-call-parser", "hermes"], "hermes"),
        (["--no-such-flag"], "no-such-flag"),
    ],
)
def test_flags_that_cannot_be(flags: list[str], named: str) -> None:
    with pytest.raises(Error) as refused:
        run(["owner/name", *flags])
    assert named in str(refused.value)
