"""Gradients and optimizer states outside the device: the same bits as on it, within the memory that was promised."""

from __future__ import annotations

import errno
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perilune import Error
from perilune.memory import optimizer as state_module
from perilune.memory.gradients import HostGradients
from perilune.memory.optimizer import States
from perilune.train.config import from_dict
from perilune.train.muon import Muon

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
sys.path.insert(0, str(Path(__file__).parent))

from test_expert_training import prepare, spawn
from test_peer_training import same, train, values_of

CPU = torch.device("cpu")
SLOW = ("zero3", "pp2", "dp2", "tp2")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def layers(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30, bias=False), nn.Tanh(), nn.Linear(30, 8)).to(
        device
    )


def passes(model: nn.Module, step: int, count: int = 5) -> None:
    """Backward passes of some micro-batches; the last layer is left out of the last one."""
    for i in range(count):
        generator = torch.Generator().manual_seed(10 * step + i)
        x = torch.randn(16, 40, generator=generator).to(next(model.parameters()))
        used = model if i + 1 < count else model[:4]  # type: ignore[index]
        used(x).square().sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_bits_of_the_device(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the thread's delays; sums of one step are not touched by the next."""
    delays, add = random.Random(0), HostGradients._add

    def late(self: HostGradients, work: Any) -> None:
        time.sleep(delays.choice((0, 0, 0.002)))
        add(self, work)

    monkeypatch.setattr(HostGradients, "_add", late)
    here, there = layers(device).to(dtype), layers(device).to(dtype)
    host = HostGradients(dict(there.named_parameters()))
    taken: list[dict[str, torch.Tensor]] = []
    for step in range(3):
        passes(here, step)
        passes(there, step)
        assert all(p.grad is None for p in there.parameters())
        found = host.take()
        for name, parameter in here.named_parameters():
            assert parameter.grad is not None
            assert found[name].device == parameter.device
            assert torch.equal(found[name], parameter.grad), (step, name)
        taken.append({n: g.clone() for n, g in found.items()})
        assert all(torch.equal(taken[-1][n], g) for n, g in found.items())
        here.zero_grad()
    # A parameter without a gradient has none, and after the end gradients stay where they are made.
    there[0](torch.ones(1, 40, dtype=dtype, device=device)).sum().backward()
    assert set(host.take()) == {"0.weight", "0.bias"}
    host.close()
    passes(there, 0)
    assert all(p.grad is not None for p in there.parameters())


def test_no_more_than_two_gradients_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, add = layers(), HostGradients._add
    most = []

    def slow(self: HostGradients, work: Any) -> None:
        most.append(self._under_way)
        time.sleep(0.005)
        add(self, work)

    monkeypatch.setattr(HostGradients, "_add", slow)
    host = HostGradients(dict(model.named_parameters()))
    passes(model, 0)
    host.take()
    assert max(most) <= 2 * 60 * 40 * 4
    assert max(most) > 60 * 40 * 4
    host.close()


def test_a_failure_of_the_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: HostGradients, work: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(HostGradients, "_add", fail)
    model = layers()
    host = HostGradients({"weight": model[2].weight})  # type: ignore[dict-item]
    model[2](torch.ones(1, 60)).sum().backward()
    with pytest.raises(Error, match=r"memory\.gradients: adding up on the host failed: no room"):
        host.take()


def optimizers(model: nn.Module, states: States | None) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    muon = Muon(matrices, lr=0.01) if states is None else Muon(matrices, lr=0.01, chunks=states.chunks)
    groups = [
        {"params": others[:1], "weight_decay": 0.1},
        {"params": others[1:]},
        {"params": list(model[2].parameters())},
    ]  # type: ignore[index]
    return [muon, torch.optim.AdamW(groups, lr=0.01)]


def step(all_of_them: list[torch.optim.Optimizer], states: States | None) -> None:
    for optimizer in all_of_them:
        if states is None or isinstance(optimizer, Muon):
            optimizer.step()
        else:
            states.step(optimizer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [1, 10_000, 1 << 20])
@pytest.mark.parametrize("where", ["host", "nvme"])
def test_states_outside_give_the_same_steps(where: str, chunk: int, device: str, tmp_path: Path) -> None:
    here, there = layers(device), layers(device)
    states = States(torch.device(device), tmp_path if where == "nvme" else None, chunk)
    pairs = [(here, optimizers(here, None), None), (there, optimizers(there, states), states)]
    for number in range(4):
        for model, all_of_them, outside in pairs:
            model.zero_grad()
            passes(model, number)
            if number == 2:
                # Some have no gradient in this step.
                model[0].bias.grad = None
                model[2].weight.grad = None
            step(all_of_them, outside)
        for (name, a), b in zip(here.named_parameters(), there.parameters(), strict=True):
            assert torch.equal(a, b), (number, name)
    for a_optimizer, b_optimizer in zip(pairs[0][1], pairs[1][1], strict=True):
        for group_a, group_b in zip(a_optimizer.param_groups, b_optimizer.param_groups, strict=True):
            for p, q in zip(group_a["params"], group_b["params"], strict=True):
                a_state, b_state = a_optimizer.state[p], b_optimizer.state[q]
                assert a_state.keys() == b_state.keys()
                for key, value in a_state.items():
                    assert torch.equal(value.cpu(), b_state[key]), key
                    if value.dim():
                        assert b_state[key].device == CPU
                        # Not lost on the way: pinned memory is what makes the copies run beside.
                        assert b_state[key].is_pinned() == (device == "cuda" and where == "host")
    # Two chunks at a time, of which each is as large as `chunk` or the largest parameter's states.
    largest = 2 * 60 * 40 * 4
    assert 0 < states.most <= 2 * max(chunk, largest)
    assert states._here == 0
    assert not list(tmp_path.iterdir())


def test_an_error_in_a_step_leaves_the_states_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    model, states = layers(), States(CPU, None, 1)
    _, adam = optimizers(model, states)
    passes(model, 0)
    states.step(adam)
    before = {key: value.clone() for state in adam.state.values() for key, value in state.items() if value.dim()}
    groups = [list(group["params"]) for group in adam.param_groups]

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(adam, "step", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        states.step(adam)
    assert [list(group["params"]) for group in adam.param_groups] == groups
    assert states._away == {}
    after = {key: value for state in adam.state.values() for key, value in state.items() if value.dim()}
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_a_full_disk_is_an_error_before_a_step_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(state_module.os, "posix_fallocate", full)
    message = rf"memory\.nvme is '{tmp_path}': No space left on device; 40 bytes of optimizer state do not fit"
    with pytest.raises(Error, match=message):
        States(CPU, tmp_path)._home(torch.ones(10))
    assert not list(tmp_path.iterdir())
    with pytest.raises(Error, match=r"memory\.nvme is .*must be a folder that exists"):
        States(CPU, tmp_path / "absent")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gradients")
    prepare(folder)
    return folder


def outside(root: Path) -> dict[str, dict[str, Any]]:
    return {
        "none": {},
        "gradients": {"gradients": "host"},
        "host": {"optimizer": "host"},
        "nvme": {"optimizer": "nvme", "nvme": str(root), "gradients": "host", "plan": "full-recompute"},
    }


def test_a_run_is_the_same_and_continues_from_any_other(root: Path) -> None:
    runs = {name: values_of(root, f"one {name}", {}, memory) for name, memory in outside(root).items()}
    got = train(0, runs, 4)
    for name in runs:
        same(got[name], got["none"], name)
    # Saved by one and continued by another: the same rows.
    from perilune.train import Trainer

    order = [*outside(root).values(), {}]
    losses = []
    for memory in order:
        trainer = Trainer(from_dict(values_of(root, "changing", {}, memory)))
        losses.append(trainer.train_step()["loss"])
        trainer.save()
        trainer.close()
    alone = train(0, {"alone": values_of(root, "alone", {}, {})}, len(order))["alone"]
    assert losses == [row[0] for row in alone["rows"]]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["zero2", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_ranks_are_the_same(name: str, root: Path) -> None:
    from test_peer_training import LAYOUTS

    runs = {n: values_of(root, f"{name} {n} out", LAYOUTS[name], memory) for n, memory in outside(root).items()}
    for rank, got in enumerate(spawn(train, 2, runs, 3, limit=150)):
        assert not isinstance(got, str), got
        for n in runs:
            same(got[n], got["none"], f"{name}, {n}, rank {rank}")


@pytest.mark.parametrize(
    ("memory", "parallel", "message"),
    [
        ({"gradients": "host"}, {"zero": 1}, r"memory\.gradients is 'host'; must be 'device' with parallel\.zero 1"),
        ({"optimizer": "nvme"}, {}, r"memory\.optimizer is 'nvme'; needs a folder in memory\.nvme"),
        ({"optimizer": "disk"}, {}, r"memory\.optimizer is 'disk'; allowed: 'device', 'host', 'nvme'"),
    ],
)
def test_settings_that_are_refused(memory: Any, parallel: Any, message: str, root: Path) -> None:
    with pytest.raises(Error, match=message):
        from_dict(values_of(root, "refused", parallel, memory))
