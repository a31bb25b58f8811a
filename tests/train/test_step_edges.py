"""A training step at its edges: parameters without gradients or numbers, dtypes beside each other, states elsewhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from perilune import Error
from perilune.memory import Memory, MemoryStore, Plan
from perilune.memory.optimizer import States
from perilune.ops import names
from perilune.ops.moe import expert_load
from perilune.ops.upload import upload
from perilune.train.config import MemoryConfig, OptimConfig, TrainConfig
from perilune.train.masters import Masters
from perilune.train.muon import Muon, orthogonalize
from perilune.train.optim import clip_gradients
from perilune.train.ranks import _reduce
from perilune.train.trainer import Trainer

CPU = torch.device("cpu")
SHAPES = [(8, 24), (24, 8), (2, 8, 16), (8, 24), (0, 8, 16), (1, 1)]
# lr, momentum, weight decay, heads: of two parameters each.
HYPER = [(0.1, 0.9, 0.0, 1), (0.02, 0.5, 0.3, 2), (2e-3, 0.95, 0.1, 1)]


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def gradients(step: int) -> list[Tensor | None]:
    """A third of the parameters have none, others from step to step."""
    generator = torch.Generator().manual_seed(100 + step)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [None if (i + step) % 3 == 0 else grad for i, grad in enumerate(made)]


def muon(states: States | None = None) -> tuple[list[nn.Parameter], Muon]:
    params = [nn.Parameter(value) for value in weights()]
    groups = [
        {"params": params[2 * i : 2 * i + 2], "lr": lr, "momentum": momentum, "weight_decay": decay, "heads": heads}
        for i, (lr, momentum, decay, heads) in enumerate(HYPER)
    ]
    options: dict[str, Any] = {} if states is None else {"chunks": states.chunks}
    return params, Muon(groups, ns_dtype=torch.float64, **options)


def train(params: list[nn.Parameter], optimizer: Muon, steps: range) -> list[Tensor]:
    for step in steps:
        for param, grad in zip(params, gradients(step), strict=True):
            param.grad = grad
        optimizer.step()
    return [param.detach().clone() for param in params]


def by_hand(steps: int) -> list[Tensor]:
    params = weights()
    averages = [torch.zeros_like(param) for param in params]
    for step in range(steps):
        for i, grad in enumerate(gradients(step)):
            if grad is None:
                continue
            lr, momentum, decay, heads = HYPER[i // 2]
            rows, columns = SHAPES[i][-2] // heads, SHAPES[i][-1]
            averages[i] = momentum * averages[i] + grad
            update = (grad + momentum * averages[i]).reshape(-1, rows, columns)
            turned = [orthogonalize(matrix[None], dtype=torch.float64)[0] for matrix in update]
            step_of = torch.stack(turned).view(SHAPES[i]) if turned else update.view(SHAPES[i])
            params[i] = params[i] * (1 - lr * decay) - lr * 0.2 * max(rows, columns) ** 0.5 * step_of
    return params


@pytest.mark.parametrize("chunk", [None, 1, 3000, 1 << 20])
@pytest.mark.parametrize("in_files", [False, True])
def test_muon_with_holes_is_one_matrix_after_the_other(chunk: int | None, in_files: bool, tmp_path: Path) -> None:
    """float64: 1e-12, since a batch may change the last bits of a product. States elsewhere change no bit."""
    states = None if chunk is None else States(CPU, tmp_path if in_files else None, chunk)
    got = train(*muon(states), range(5))
    for a, b in zip(got, by_hand(5), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(got, train(*muon(), range(5)), strict=True))


@pytest.mark.parametrize("chunk", [None, 1])
def test_muon_goes_on_from_its_state_bit_by_bit(chunk: int | None) -> None:
    want = train(*muon(), range(6))
    first, optimizer = muon()
    train(first, optimizer, range(3))
    states = None if chunk is None else States(CPU, None, chunk)
    params, again = muon(states)
    for param, value in zip(params, first, strict=True):
        param.data.copy_(value)
    again.load_state_dict(optimizer.state_dict())
    if states is not None:
        states.settle(again)
    assert all(torch.equal(a, b) for a, b in zip(train(params, again, range(3, 6)), want, strict=True))


def test_muon_without_gradients_does_nothing() -> None:
    params, optimizer = muon()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, weights(), strict=True))
    assert not optimizer.state


class Mixed(nn.Module):
    """Neighbours of other dtypes, one empty, one turned, one whose gradient is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 32).bfloat16())
        self.b = nn.Parameter(torch.randn(3))
        self.c = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))
        self.d = nn.Parameter(torch.zeros(0, 4).bfloat16())
        self.e = nn.Parameter(torch.randn(5).half())
        self.f = nn.Parameter(torch.randn(2, 32))
        self.g = nn.Parameter(torch.randn(4, 6).bfloat16().t())
        for name, param in self.named_parameters():
            param.grad = None if name == "b" else torch.randn(param.shape).to(param.dtype)
        self.g.grad = torch.randn(1, 1).bfloat16().expand(6, 4)


def test_masters_of_mixed_dtypes() -> None:
    net = Mixed()
    given = {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
    masters = Masters(net, {"a", "f"})
    masters.take_gradients()
    for name, grad in given.items():
        master = masters.params[name]
        assert (master.grad is None) == (grad is None), name
        assert grad is None or torch.equal(master.grad, grad.to(master.dtype)), name
    with torch.no_grad():
        for master in masters.params.values():
            master.add_(1.0)
    before = net.g.detach().clone()
    masters.write_back(set())
    masters.write_back({"d", "b"})
    assert torch.equal(net.g, before)
    masters.write_back()
    for name in "deg":
        param = net.get_parameter(name)
        assert torch.equal(param, masters.params[name].to(param.dtype)), name


class OnGpu(Tensor):
    """A tensor of the CPU that is taken for a GPU's."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("dress", [lambda x: x, lambda x: x.as_subclass(OnGpu)], ids=["cpu", "gpu"])
def test_clipping_of_mixed_dtypes(order: int, dress: Callable[[Tensor], Tensor]) -> None:
    """float32 sums of ten numbers: 1e-6; bfloat16 gradients are rounded to 2^-9."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32][::order]
    params = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in zip((3, 2, 5, 0), dtypes, strict=True)]
    for param in params:
        param.grad = dress(torch.randn(param.shape).to(param.dtype))
    before = [param.grad.clone() for param in params if param.grad is not None]
    copies = [1, 2, 1, 3]
    want = sum(float(g.double().square().sum()) / n for g, n in zip(before, copies, strict=True)) ** 0.5
    norm = clip_gradients(params, 0.5, copies)
    assert float(norm) == pytest.approx(want, rel=1e-6)
    for param, grad in zip(params, before, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad.double(), grad.double() * (0.5 / want), rtol=2**-8, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_no_number_changes_nothing(bad: float) -> None:
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(2).bfloat16())]
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    assert params[2].grad is not None
    params[2].grad[1] = bad
    assert not clip_gradients(params, 0.1).isfinite()
    assert params[0].grad is not None
    assert params[0].grad.tolist() == [2.0] * 3
    assert params[2].grad[0] == 2.0
    with pytest.raises(Error, match="no parameter has a gradient"):
        clip_gradients([nn.Parameter(torch.zeros(2))], 1.0)


def _values(rank: int) -> list[Tensor]:
    """Runs of one dtype, some of one tensor; one without numbers, one turned, one that is a single number."""
    made = [torch.arange(6).view(2, 3), torch.zeros(0, dtype=torch.int64), torch.tensor(7), torch.ones(2, 2)]
    made += [torch.arange(6.0).view(2, 3).t(), torch.zeros(0), torch.tensor(2.5, dtype=torch.float64)]
    return [(value + rank * (-1) ** i).to(value.dtype) for i, value in enumerate(made)]


def _enter(rank: int, ranks: int, meet: str, found: Any) -> None:
    dist.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=ranks)
    sums, peaks = _values(rank), _values(rank)
    _reduce(iter(sums), dist.group.WORLD, dist.ReduceOp.SUM)
    _reduce(iter(peaks), dist.group.WORLD, dist.ReduceOp.MAX)
    _reduce([], dist.group.WORLD, dist.ReduceOp.MAX)
    found.put((rank, [value.tolist() for value in sums], [value.tolist() for value in peaks]))
    dist.destroy_process_group()


def test_reductions_side_by_side_over_three_processes(tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    found = context.Queue()
    processes = [context.Process(target=_enter, args=(r, 3, str(tmp_path / "meet"), found)) for r in range(3)]
    for process in processes:
        process.start()
    got = [found.get(timeout=90) for _ in processes]
    for process in processes:
        process.join(10)
    every = [torch.stack(values) for values in zip(*(_values(rank) for rank in range(3)), strict=True)]
    for _, sums, peaks in got:
        assert sums == [values.sum(0).tolist() for values in every]
        assert peaks == [values.amax(0).tolist() for values in every]


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_a_run_with_states_elsewhere_goes_on_as_if_it_had_not_stopped(
    where: Any, tiny_run: TrainConfig, tmp_path: Path
) -> None:
    """bfloat16 weights, so masters; Muon and AdamW. Bit by bit."""
    optim = OptimConfig(lr=0.01, clip=0.1)

    def run(out: str, memory: MemoryConfig, steps: int) -> tuple[list[float], dict[str, Tensor]]:
        config = dataclasses.replace(
            tiny_run, out=str(tmp_path / out), memory=memory, optim=optim, dtype="bfloat16", checkpoint_every=2
        )
        trainer = Trainer(config)
        try:
            losses = [trainer.train_step()["loss"] for _ in range(steps)]
            trainer.save()
            return losses, {name: value.detach().clone() for name, value in trainer.masters.params.items()}
        finally:
            trainer.close()

    straight, want = run("straight", MemoryConfig(), 4)
    elsewhere = MemoryConfig(optimizer=where, nvme=str(tmp_path) if where == "nvme" else None)
    first, _ = run("parts", elsewhere, 2)
    second, got = run("parts", elsewhere, 2)
    assert first + second == straight
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_the_largest_layer_is_that_of_one_micro_batch() -> None:
    """What may be under way is measured in layers; micro-batches of one step do not make a layer larger."""
    largest = []
    for micro_batches in (1, 3):
        memory = Memory(Plan.of({"*": "host"}, required=False), (), MemoryStore())
        with memory.step():
            for _ in range(micro_batches):
                x = torch.ones(100, requires_grad=True)
                for index, size in ((0, 100), (1, 50)):
                    names.layer(index)
                    x = names.keep("act", x[:size] * 2.0)
                    x = x * x
                names.layer(None)
                x.sum().backward()
            largest.append(memory._order.largest)
    assert largest == [400, 400]


def test_numbers_of_the_host() -> None:
    given: list[tuple[Any, torch.dtype]] = [
        ([], torch.int32),
        (np.zeros((0, 4), np.int64), torch.int32),
        (np.array([True, False]), torch.bool),
        (np.arange(12).reshape(3, 4).T, torch.int32),
        (3, torch.float64),
    ]
    for values, dtype in given:
        made = upload(values, dtype, CPU)
        assert made.dtype == dtype
        assert np.array_equal(made.numpy(), np.asarray(values))


@pytest.mark.parametrize("dress", [lambda x: x, lambda x: x.as_subclass(OnGpu)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_loads_are_counted_in_int64(dress: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    load_E = expert_load(dress(torch.tensor([[0, 3], [3, 1]]).to(dtype)), 5)
    assert load_E.dtype == torch.int64
    assert load_E.tolist() == [1, 1, 0, 2, 0]
    assert expert_load(dress(torch.zeros(0, 2, dtype=dtype)), 2).tolist() == [0, 0]
