"""Memory plans in runs of several processes: the losses and gradients of no plan, bit by bit, in every layout.

Replays repeat the collectives of what they compute again; all ranks do so in one order, or they would hang. FP8 plans
give the same first loss, and what follows from gradients within the error of FP8.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from perilune import Error
from perilune.cli import main
from perilune.config import ModelConfig
from perilune.train.checkpoint import list_checkpoints
from perilune.train.config import from_dict
from perilune.train.optim import clip_gradients
from perilune.train.plan import plan

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from test_expert_training import prepare, settings, spawn

STEPS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"ep": 1},
    "zero2": {"ep": 1, "zero": 2},
    "zero3": {"ep": 1, "zero": 3},
    "ep2": {"ep": 2},
    "cp2": {"cp": 2, "ep": 1},
    "tp2": {"tp": 2, "ep": 1},
    "pp2": {"pp": 2},
    "pp2 virtual 2": {"pp": 2, "virtual": 2, "schedule": "Interleaved1F1B"},
    "cp2 ep2 zero3": {"cp": 2, "zero": 3},
}
# What every run of the tests does; it has most kinds of collectives.
QUICK = "cp2 ep2 zero3"
LOSSLESS = {
    "full-recompute": {"plan": "full-recompute"},
    "moved": {"plan": "moved.toml"},
    "fit": {"plan": "fit", "budget": 600_000},
}
# Recipes with collectives (the convolution's halo under cp), everything else away.
MOVED = '[plan]\n"norm" = "recompute"\n"kda.qkv" = "recompute"\n"mla.k*" = "recompute"\n"*" = "host"\n'
PEER = '[plan]\n"norm" = "recompute"\n"*" = "peer"\n'


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    prepare(folder)
    (folder / "moved.toml").write_text(MOVED)
    (folder / "gates.toml").write_text('[plan]\n"*.gate" = "fp8"\n')
    (folder / "peer.toml").write_text(PEER)
    return folder


def values_of(root: Path, name: str, parallel: dict[str, Any], memory: dict[str, Any], device: str = "cpu") -> Any:
    values = settings(root, name.replace(" ", "-"), 6) | {"accumulate": 4, "eval_every": 0, "checkpoint_every": 0}
    if memory.get("plan", "").endswith(".toml"):
        memory = memory | {"plan": str(root / memory["plan"])}
    return values | {
        "device": device, "parallel": {"policy": "exact", "timeout": 60.0} | parallel, "memory": memory
    }  # fmt: skip


def train(rank: int, runs: dict[str, dict[str, Any]], steps: int = STEPS) -> dict[str, Any]:
    """Of each run: its losses and norms, gradients of the first step, and what the store of peers counted."""
    from perilune.train import Trainer

    out = {}
    for name, values in runs.items():
        trainer = Trainer(from_dict(values))
        grads: dict[str, Any] = {}

        def keep(params: Any, *rest: Any, trainer: Any = trainer, grads: dict[str, Any] = grads) -> torch.Tensor:
            if not grads:
                grads |= {n: p.grad.cpu().numpy() for n, p in trainer.masters.params.items() if p.grad is not None}
            return clip_gradients(params, *rest)

        with mock.patch("perilune.train.trainer.clip_gradients", keep):
            rows = [trainer.train_step()]
            # What an evaluation leaves behind is nobody's (Megatron 3043).
            trainer.evaluate()
            rows += [trainer.train_step() for _ in range(steps - 1)]
        memory = trainer.activations.memory
        counted = None if memory is None or memory.peer is None else (memory.peer.most, memory.peer.moved)
        told = [(row["loss"], row["grad_norm"], row["load"], row.get("experts")) for row in rows]
        out[name] = {"rows": told, "grads": grads, "peer": counted, "rules": _rules(memory)}
        trainer.close()
    return out


def _rules(memory: Any) -> list[str]:
    return [] if memory is None else [f"{rule.pattern} {rule.placement}" for rule in memory.plan.rules]


def same(got: dict[str, Any], want: dict[str, Any], where: str) -> None:
    assert got["rows"] == want["rows"], where
    assert got["grads"].keys() == want["grads"].keys(), where
    for name, value in want["grads"].items():
        assert (got["grads"][name] == value).all(), (where, name)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != QUICK)) for n in LAYOUTS])
def test_plans_do_not_change_a_run_of_two_ranks(name: str, root: Path) -> None:
    compare(name, root, "cpu")


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["pp2", "ep2", "zero3"])
def test_plans_do_not_change_a_run_of_two_gpus(name: str, root: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    compare(name, root, "cuda")


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_replays_write_symmetric_memory_again(root: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    parallel = {"ep": 2, "transport": "symmetric"}
    plans = {"none": {}, "full-recompute": {"plan": "full-recompute"}, "moved": {"plan": "moved.toml"}}
    runs = {
        name: values_of(root, f"symmetric {name}", parallel, memory, "cuda") | {"dtype": "bfloat16"}
        for name, memory in plans.items()
    }
    for rank, got in enumerate(spawn(train, 2, runs, limit=100)):
        assert not isinstance(got, str), got
        for name in plans:
            same(got[name], got["none"], f"{name}, rank {rank}")


def compare(name: str, root: Path, device: str) -> None:
    budget = {"budget": 1_200_000} if "virtual" in LAYOUTS[name] else {}
    plans = {"none": {}, "fp8": {"plan": "gates.toml"}} | LOSSLESS
    plans["fit"] = plans["fit"] | budget
    runs = {
        plan: values_of(root, f"{name} {plan} {device}", LAYOUTS[name], memory, device)
        for plan, memory in plans.items()
    }
    results = spawn(train, 2, runs, limit=200)
    for rank, got in enumerate(results):
        assert not isinstance(got, str), got
        for plan_name in LOSSLESS:
            same(got[plan_name], got["none"], f"{name}, {plan_name}, rank {rank}")
        assert got["fp8"]["rows"][0][0] == got["none"]["rows"][0][0]
        assert got["fp8"]["rows"][1][0] == pytest.approx(got["none"]["rows"][1][0], rel=1e-3)
    rules = [got["fit"]["rules"] for got in results]
    assert all(rules)
    if LAYOUTS[name].get("pp", 1) == 1:
        assert rules[0] == rules[1]


PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pp": 2}),
    "pp4": (4, {"pp": 4}),
    "pp2 virtual 2": (2, {"pp": 2, "virtual": 2, "schedule": "Interleaved1F1B"}),
    "pp2 cp2": (4, {"pp": 2, "cp": 2, "ep": 1}),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "pp2")) for n in PIPELINES])
def test_activations_on_later_stages_do_not_change_a_run(name: str, root: Path) -> None:
    """And they really lie there: the fullest room is used to within a tensor or two."""
    ranks, parallel = PIPELINES[name]
    memories = {"none": {}, "peer": {"plan": "peer.toml"}, "fp8+peer": {"plan": "packed.toml"}}
    (root / "packed.toml").write_text(PEER.replace('"peer"', '"fp8+peer"'))
    runs = {f"{name} {plan}": values_of(root, f"{name} {plan} at", parallel, m) for plan, m in memories.items()}
    results = spawn(train, ranks, runs, limit=200)
    none, peer, packed = runs
    for rank, got in enumerate(results):
        assert not isinstance(got, str), got
        same(got[peer], got[none], f"{name}, rank {rank}")
        assert got[packed]["rows"][0][0] == got[none]["rows"][0][0]
    found = loans_of(root, name)
    places = ranks // parallel["pp"]
    for rank, got in enumerate(results):
        lent = sum(loan.bytes for loan in found if loan.borrower == rank // places)
        assert got[peer]["peer"][0] <= lent
        assert got[peer]["peer"][0] >= 0.7 * lent, (name, rank, got[peer]["peer"], lent)


def loans_of(root: Path, name: str) -> Any:
    ranks, parallel = PIPELINES[name]
    config = from_dict(values_of(root, "unused", parallel, {}))
    return plan(config, ModelConfig.from_pretrained(config.model), ranks).loans


K3 = {"model": "kimi-k3", "dtype": "bfloat16", "accumulate": 256, "data": {"batch_tokens": 8192}}


@pytest.mark.parametrize(
    ("values", "gpus"),
    [
        (K3 | {"parallel": {"pp": 8, "ep": 32}}, 256),
        (K3 | {"accumulate": 1024, "parallel": {"pp": 16, "ep": 32}}, 512),
        (K3 | {"accumulate": 1024, "parallel": {"pp": 8, "ep": 64, "virtual": 2, "schedule": "Interleaved1F1B"}}, 512),
        ({"model": "mini", "accumulate": 32, "parallel": {"pp": 4, "ep": 1}}, 4),
        ({"model": "mini", "accumulate": 32, "parallel": {"pp": 2, "ep": 1, "tp": 2}}, 4),
    ],
)
def test_the_predicted_peak_is_flat_within_5_percent(values: dict[str, Any], gpus: int) -> None:
    config = from_dict(values)
    found = plan(config, ModelConfig.from_pretrained(config.model), gpus)
    before = [rank.total for rank in found.ranks]
    assert max(before) > 1.05 * sum(before) / len(before)
    held = found.levelled
    assert sum(held) == sum(before)
    assert max(held) <= 1.05 * min(held)
    # A loan never exceeds what waits while another micro-batch goes backward.
    for rank in found.ranks:
        assert sum(loan.bytes for loan in found.loans if loan.borrower == rank.stage) <= rank.activations


def lose(rank: int, values: dict[str, Any]) -> str:
    """The last stage kills itself in the third step, after a checkpoint of the second; what the first one says."""
    from perilune.train import Trainer

    trainer = Trainer(from_dict(values))
    trainer.train_step()
    trainer.train_step()
    trainer.save()
    if rank == 1:
        trainer.team.pipeline.modules[-1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        trainer.train_step()
    except (Error, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.mark.timeout(120)
def test_a_lender_that_dies_in_a_step_leaves_the_last_checkpoint(root: Path) -> None:
    from perilune.train import Trainer

    values = values_of(root, "killed", {"pp": 2, "timeout": 10.0}, {"plan": "peer.toml"})
    (message,) = spawn(lose, 2, values, limit=80, answers=1)
    assert "Error: " in message
    assert [path.name for path in list_checkpoints(root / "killed" / "steps")] == ["step-00000002"]
    alone = values | {"parallel": {}, "memory": {}}
    trainer = Trainer(from_dict(alone))
    assert trainer.step == 2
    trainer.train_step()
    trainer.close()


def test_peers_need_stages_and_whole_backward_passes(root: Path) -> None:
    from perilune.train import Trainer

    with pytest.raises(Error, match=r"sends tensors to a peer; needs parallel\.pp > 1"):
        Trainer(from_dict(values_of(root, "alone", {}, {"plan": "peer.toml"})))
    parallel = {"pp": 2, "virtual": 2, "schedule": "ZBVZeroBubble"}
    with pytest.raises(Error, match=r"memory\.plan is 'k3'; must be 'none' with parallel\.schedule 'ZBVZeroBubble'"):
        from_dict(values_of(root, "split", parallel, {"plan": "k3"}))


def test_the_command_prints_the_loans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, texts = tmp_path / "run.toml", {}
    for pp in (1, 2):
        file.write_text(f'model = "mini"\naccumulate = 8\n[parallel]\npp = {pp}\nep = 1\n')
        assert main(["plan", str(file), "--gpus", "2"]) == 0
        texts[pp] = capsys.readouterr().out
    assert "peer" not in texts[1]
    lines = r"of stage 0 on stage 1 +\d+\.\d MB\n  a rank's total: .* to .* without, (.*) to \1 with them"
    assert re.search(lines, texts[2]), texts[2]
