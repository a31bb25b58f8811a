"""The plan of a run: numbers by hand for Kimi-K3, and the command. Against real runs: tests/parallel/test_layouts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from perilune.cli import main
from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.train.config import DataConfig, ParallelConfig, TrainConfig
from perilune.train.plan import plan

K3 = ModelConfig.from_pretrained("kimi-k3")


def run(accumulate: int = 256, tokens: int = 8192, **parallel: object) -> TrainConfig:
    data = DataConfig(batch_tokens=tokens, sequence_tokens=tokens)
    options = ParallelConfig(**parallel)  # type: ignore[arg-type]
    return TrainConfig(model="kimi-k3", dtype="bfloat16", accumulate=accumulate, data=data, parallel=options)


def test_states_of_all_ranks_are_those_of_the_model() -> None:
    """Without sharding, over stages: every parameter once a stage's rank, experts once in 32."""
    found = plan(run(pp=8, ep=32), K3, 256)
    assert found.parameters == 2_779_484_393_568
    experts = 92 * 896 * 3 * 3072 * 3584
    rest = found.parameters - experts
    assert sum(rank.parameters for rank in found.ranks) == rest + experts // 32
    # 2 bytes and a float32 copy of each weight but the few that are float32 anyway.
    assert sum(rank.weights for rank in found.ranks) == pytest.approx(6 * (rest + experts // 32), rel=1e-3)
    assert sum(rank.gradients for rank in found.ranks) == 4 * (rest + experts // 32)


def test_context_and_pipeline_by_hand() -> None:
    found = plan(run(accumulate=8, tokens=1 << 20, pp=8, cp=64, ep=0, order="contiguous"), K3, 512)
    # 96 heads over 64 ranks: at most 2 heads; forward 63 ranks x 2 heads x (M, B) and 94 heads of S back.
    states = (63 * 2 * 2 + 94) * 128 * 128 * 4 + (63 * 2 + 94) * 128 * 128 * 4
    fullest = found.ranks.index(found.fullest)
    places = [93 * i // 8 for i in range(9)]
    kda = sum(not K3.is_mla(layer) for layer in range(places[fullest], places[fullest + 1]))
    assert found.collectives["KDA states"] == states * kda * found.micro_batches
    rows = (1 << 20) // 64
    assert found.hops == tuple((1 + blocks) * rows * 7168 * 2 for blocks in range(1, 8))
    assert found.bubble == pytest.approx(7 / (7 + found.micro_batches))
    longer = plan(run(accumulate=8, tokens=1 << 21, pp=8, cp=64, ep=0, order="contiguous"), K3, 512)
    assert longer.collectives["KDA states"] == found.collectives["KDA states"]
    assert longer.collectives["latent rows"] == 2 * found.collectives["latent rows"]


def test_sharding_moves_states_and_not_the_sum() -> None:
    shape = ModelConfig.from_pretrained("mini")
    base = dataclasses.replace(run(accumulate=8, ep=1), model="mini")
    plain = plan(base, shape, 8).ranks[0]
    for zero in (1, 2, 3):
        cut = plan(dataclasses.replace(base, parallel=ParallelConfig(ep=1, zero=zero)), shape, 8).ranks[0]  # type: ignore[arg-type]
        assert cut.optimizer == pytest.approx(plain.optimizer / 8, rel=0.02)
        assert cut.gradients == pytest.approx(plain.gradients / (1 if zero == 1 else 8), rel=0.02)
        # zero 3 gathers two modules at a time beside the root, 1 and 2 everything.
        assert (cut.gathered < plain.weights / 4) == (zero == 3)


def test_refusals_name_the_field() -> None:
    with pytest.raises(Error, match=r"parallel\.tp is 5; must divide kda\.num_heads = 96"):
        plan(run(accumulate=10, tp=5), K3, 10)
    with pytest.raises(Error, match=r"parallel\.ep is 5; must divide the 896 experts"):
        plan(run(accumulate=10, ep=5), K3, 10)
    with pytest.raises(Error, match="accumulate is 6; must be a multiple of the 4 groups"):
        plan(run(accumulate=6, ep=1), K3, 4)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "mini"\ndtype = "bfloat16"\naccumulate = 8\n[parallel]\nzero = 3\ncp = 2\n')
    assert main(["plan", str(file), "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    for word in ("shard 4 x cp 2", "fits", "gather weights", "KDA states", "latent rows", "Muon"):
        assert word in text
    assert main(["plan", str(file), "--gpus", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sizes"] == [1, 1, 4, 2, 1]
    assert main(["plan", str(file), "--memory", "much"]) == 2
    assert "memory is 'much'; must be a number and GB or GiB" in capsys.readouterr().err
    assert main(["plan", str(file), "--gpus", "3"]) == 2
    assert "parallel.cp is 2; must divide the 3 processes of the run" in capsys.readouterr().err
