"""A training run with its experts spread over processes is the run of one process.

float64 throughout, Newton-Schulz included: what differs is the order in which an expert's rows of two micro-batches
are added up, about 1e-15 a step; 4 steps of Muon keep that below 1e-9.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from perilune.chat import train_bpe
from perilune.errors import Error
from perilune.parallel import mesh
from perilune.train.config import TrainConfig, from_dict
from perilune.train.log import read_metrics

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from train_tiny import VOCAB, invented_text, tiny_model

STEPS = 4


def settings(root: Path, out: str, steps: int = STEPS) -> dict[str, Any]:
    return {
        "out": str(root / out),
        "model": str(root / "model"),
        "tokenizer": str(root / "tokenizer"),
        "steps": steps,
        "accumulate": 2,
        "eval_every": 2,
        "checkpoint_every": 2,
        "device": "cpu",
        "dtype": "float64",
        "data": {
            "train": [str(root / "train")],
            "held_out": [str(root / "held-out")],
            "batch_tokens": 96,
            "sequence_tokens": 60,
        },
        "optim": {"lr": 0.01, "ns_dtype": "float64", "qk_clip": 0.05},
        "parallel": {"policy": "exact", "timeout": 30.0},
    }


def prepare(root: Path) -> None:
    for name, seeds in {"train": range(4), "held-out": range(100, 101)}.items():
        (root / name).mkdir()
        for seed in seeds:
            (root / name / f"{seed}.txt").write_text(invented_text(seed, words=200))
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text(json.dumps(tiny_model()))
    train_bpe([invented_text(i) for i in range(4)], VOCAB).save(root / "tokenizer")


def spawn(work: Any, ranks: int, *args: Any, limit: float = 100, answers: int | None = None) -> list[Any]:
    """work(rank, *args) in `ranks` processes started as torchrun would -> what each returned, or its traceback.

    answers: of so many ranks, the first to give one; the others are ended.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_enter, args=(work, rank, ranks, port, args, results), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    got = {}
    try:
        for _ in range(answers or ranks):
            rank, result = results.get(timeout=limit)
            got[rank] = result
    finally:
        for process in processes:
            if answers is None:
                process.join(5)
            process.kill()
            process.join(5)
    return [got[rank] for rank in sorted(got)]


def _enter(work: Any, rank: int, ranks: int, port: int, args: tuple[Any, ...], results: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    try:
        results.put((rank, work(rank, *args)))
    except Exception:
        results.put((rank, traceback.format_exc()))
    finally:
        mesh.stop()


def run(rank: int, values: dict[str, Any]) -> dict[str, Any]:
    """The run's weights by name, whole, and its evaluation."""
    from perilune.train import Trainer

    trainer = Trainer(from_dict(values))
    before = {name: tuple(p.shape) for name, p in trainer.model.named_parameters() if "gate_up" in name}
    trainer.run()
    # No step is left: the same model is evaluated and written once more.
    result = trainer.run()
    weights = {name: value.detach().cpu().double().numpy() for name, value in trainer.model.state_dict().items()}
    assert result.evaluation is not None
    if trainer.team.mesh.shards > 1:
        for call in (trainer.train_step, trainer.save):
            with pytest.raises(Error, match="have been joined"):
                call()
    return {"weights": weights, "nats": result.evaluation.nats, "held": before}


def refused(rank: int, *runs: dict[str, Any]) -> list[str]:
    from perilune.train import Trainer

    messages = []
    for values in runs:
        try:
            Trainer(from_dict(values))
            messages.append("went on")
        except Error as error:
            messages.append(str(error))
    return messages


def broken(rank: int, values: dict[str, Any]) -> str:
    """Rank 1 fails after its third step, of which no checkpoint is; what each rank sees."""
    from perilune.train import Trainer

    trainer = Trainer(from_dict(values))

    def fall(row: dict[str, Any]) -> None:
        if rank == 1 and row["step"] == 3:
            raise Error("rank 1 fell over")

    try:
        trainer.run(fall)
    except (Error, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on alone"


def unused(rank: int) -> dict[str, Any]:
    """Gradients after they were added up, of parameters that both ranks, the second, and none have used."""
    from perilune.train.config import ParallelConfig
    from perilune.train.team import Team

    team = Team(ParallelConfig(timeout=30.0), torch.device("cpu"))
    params = {name: torch.ones(2, requires_grad=True) for name in ("both", "second", "none", "ffn.gate_up_E2FL")}
    params["both"].grad = torch.full((2,), 1.0 + rank)
    params["second"].grad = torch.ones(2) if rank == 1 else None
    team.add_gradients(params)
    return {name: None if p.grad is None else p.grad.tolist() for name, p in params.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spread")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def alone(root: Path) -> dict[str, Any]:
    return run(0, settings(root, "alone"))


def rows(root: Path, out: str, key: str) -> list[Any]:
    return [row[key] for row in read_metrics(root / out / "metrics.jsonl") if key in row]


def test_two_processes_train_as_one(root: Path, alone: dict[str, Any]) -> None:
    both = spawn(run, 2, settings(root, "two"))
    for result in both:
        assert not isinstance(result, str), result
        assert result["nats"] == pytest.approx(alone["nats"], rel=1e-9)
        for name, value in alone["weights"].items():
            got, want = torch.from_numpy(result["weights"][name]), torch.from_numpy(value)
            assert (got - want).abs().max() <= 1e-9 * want.abs().max().clamp(min=1), name
        # 4 of the 8 experts each.
        assert {shape[0] for shape in result["held"].values()} == {4}
    for key in ("loss", "grad_norm", "max_logit"):
        assert rows(root, "two", key) == pytest.approx(rows(root, "alone", key), rel=1e-9)
    for key in ("tokens", "counted", "flops", "clipped_heads", "load"):
        assert rows(root, "two", key) == rows(root, "alone", key)
    told = rows(root, "two", "experts")
    assert len(told) == STEPS
    assert all(step["after"] <= 1.02 for step in told)
    assert max(step["before"] for step in told) > 1.05
    assert sum(step["copies"] for step in told) > 0
    assert rows(root, "alone", "experts") == []


def test_a_rank_that_falls_over_ends_the_others_and_one_process_continues(root: Path, alone: dict[str, Any]) -> None:
    got = spawn(broken, 2, settings(root, "broken"))
    assert got[1] == "Error: rank 1 fell over"
    assert "Error" in got[0]
    later = run(0, settings(root, "broken"))
    assert later["held"]["layers.1.ffn.gate_up_E2FL"][0] == 8
    for name, want in alone["weights"].items():
        a, b = torch.from_numpy(later["weights"][name]), torch.from_numpy(want)
        assert (a - b).abs().max() <= 1e-9 * b.abs().max().clamp(min=1), name
    assert rows(root, "broken", "loss") == pytest.approx(rows(root, "alone", "loss"), rel=1e-9)


def test_a_run_that_cannot_be_shared_is_refused_on_every_rank(root: Path) -> None:
    (root / "taken").write_text("a file where the folder should be")
    odd, exact_quantiles = settings(root, "odd") | {"accumulate": 3}, settings(root, "odd") | {"balance": {"bins": 0}}
    first, second = spawn(refused, 2, odd, settings(root, "taken"), exact_quantiles)
    assert first[0] == second[0] == "accumulate is 3; must be a multiple of the 2 processes of the run"
    assert "cannot be written" in first[1]
    assert second[1] == f"rank 0: {first[1]}"
    assert first[2] == second[2] == "balance.bins is 0; a run of several processes needs bins > 0"


def test_a_parameter_that_no_rank_uses_has_no_gradient() -> None:
    """As on one rank: an optimizer leaves it alone, where zeros would be decayed."""
    want = {"both": [3.0, 3.0], "second": [1.0, 1.0], "none": None, "ffn.gate_up_E2FL": None}
    assert spawn(unused, 2) == [want, want]


@pytest.mark.slow
def test_replicas_of_two_sets_of_experts_train_as_one(root: Path) -> None:
    values = settings(root, "one-of-4") | {"accumulate": 4, "steps": 3}
    one = run(0, values)
    spread = values | {"out": str(root / "sets"), "parallel": values["parallel"] | {"ep": 2}}
    for result in spawn(run, 4, spread):
        assert not isinstance(result, str), result
        for name, want in one["weights"].items():
            a, b = torch.from_numpy(result["weights"][name]), torch.from_numpy(want)
            assert (a - b).abs().max() <= 1e-9 * b.abs().max().clamp(min=1), name
        assert {shape[0] for shape in result["held"].values()} == {4}
    assert rows(root, "sets", "grad_norm") == pytest.approx(rows(root, "one-of-4", "grad_norm"), rel=1e-9)


@pytest.mark.gpu
def test_two_gpus_train_over_either_transport(root: Path) -> None:
    """bf16: losses within rounding of each other and of one GPU; weights are whole and finite."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    losses = {}
    for name, ranks in (("one", 1), ("collective", 2), ("symmetric", 2)):
        values = settings(root, f"gpu-{name}") | {"device": "cuda", "dtype": "bfloat16"}
        values["parallel"] = {"policy": "exact", "timeout": 60.0}
        if ranks == 2:
            values["parallel"]["transport"] = name
        results = spawn(run, ranks, values)
        assert not isinstance(results[0], str), results[0]
        assert all(torch.from_numpy(value).isfinite().all() for value in results[0]["weights"].values())
        losses[name] = rows(root, f"gpu-{name}", "loss")
    assert losses["collective"] == pytest.approx(losses["one"], rel=1e-2)
    assert losses["symmetric"] == pytest.approx(losses["one"], rel=1e-2)


def test_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(Error, match=r"parallel\.ep is 4; must divide the 6 processes"):
        mesh.start(torch.device("cpu"), shards=4)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(Error, match="WORLD_SIZE is 'many'"):
        mesh.processes()
    monkeypatch.delenv("WORLD_SIZE")
    assert mesh.start(torch.device("cpu")) == mesh.Mesh()
    assert dataclasses.replace(TrainConfig()).parallel.ep == 0
