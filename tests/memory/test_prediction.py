"""What a plan is predicted to keep is what the step keeps, name by name, and what a census of storages finds."""

from __future__ import annotations

import weakref

import pytest
import torch
from memory_models import CPU, World
from test_memory_manager import LOSSLESS, LOSSY

from perilune import Error
from perilune.memory import Memory, MemoryStore, Plan
from perilune.memory.census import Census
from perilune.memory.fit import fit, resident
from perilune.memory.profile import Profile, device_bytes, predict, predict_both, profile
from perilune.ops.names import keep, layer


@pytest.fixture(scope="module")
def world() -> World:
    made = World()
    made.step(None)
    return made


@pytest.fixture(scope="module")
def noted(world: World) -> Profile:
    return profile(world.forward, world.weights, CPU)


def counted(world: World, memory: Memory) -> int:
    """Bytes that live between the passes; the host store's are among them here."""
    with Census(CPU) as census, memory.step():
        loss = world.forward()
        return census.alive() - loss.nbytes


@pytest.mark.parametrize("name", [n for n in (LOSSLESS | LOSSY) if "nvme" not in (LOSSLESS | LOSSY)[n].values()])
def test_predicted_is_measured(name: str, world: World, noted: Profile) -> None:
    plan = Plan.of((LOSSLESS | LOSSY)[name], required=False)
    rows = predict(noted, plan)
    memory = Memory(plan, world.weights, MemoryStore())
    assert counted(world, memory) == device_bytes(rows) + sum(row.stored for row in rows.values())
    assert memory.rows == rows


def test_what_experts_keep_if_told_to(world: World, noted: Profile) -> None:
    plan = Plan.of({"layers.2.moe.h": "keep", "layers.1.ffn": "recompute", "layers.1.moe.h": "keep"}, False)
    rows = predict(noted, plan)
    memory = Memory(plan, world.weights)
    assert counted(world, memory) == device_bytes(rows)
    assert memory.rows == rows


def test_plans_order_as_they_should(noted: Profile) -> None:
    size = {name: device_bytes(predict(noted, Plan.of(table, False))) for name, table in (LOSSLESS | LOSSY).items()}
    assert size["full-recompute"] < 0.2 * size["none"]
    assert size["everything to the host"] < size["everything fp8"] < size["none"]
    assert size["elements recomputed"] < size["none"]


@pytest.mark.parametrize("share", [1.0, 0.7, 0.4, 0.15])
def test_fit_keeps_within_its_budget(share: float, world: World, noted: Profile) -> None:
    whole = device_bytes(predict(noted, Plan()))
    plan = fit(noted, int(share * whole), link=1e9)
    assert resident(noted, plan) <= share * whole
    assert bool(plan.rules) == (share < 1)
    loss, gradients = world.step(None)
    got, found = world.step(Memory(plan, world.weights, MemoryStore()))
    assert torch.equal(got, loss)
    assert all(torch.equal(found[n], g) for n, g in gradients.items())


def test_fit_weighs_time(noted: Profile) -> None:
    """An endless link is cheaper than any computation, none at all dearer."""
    most = device_bytes(predict(noted, Plan())) * 3 // 4
    placed = {rate: {str(r.placement) for r in fit(noted, most, rate).rules} for rate in (1e30, 1e-30)}
    assert "host" in placed[1e30]
    assert "recompute" in placed[1e-30]
    # What is there around the plan takes from the budget.
    assert fit(noted, most + 1000, 1e9, around=1000).rules
    with pytest.raises(Error, match="the least that can be reached"):
        fit(noted, most, 1e9, around=most)
    assert len(fit(noted, most, 1e30, host=False).rules) > 0


class Elsewhere(MemoryStore):
    """Notes which puts are fetched, in order, and the bytes that have been fetched and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.puts, self.fetched, self.back = list[int](), list[int](), dict[int, torch.Tensor]()
        self._alive: list[weakref.ref[torch.Tensor]] = []

    def put(self, flat: torch.Tensor) -> torch.Tensor:
        ticket = super().put(flat)
        self.puts.append(ticket.data_ptr())
        return ticket

    def prefetch(self, ticket: torch.Tensor) -> None:
        key = ticket.data_ptr()
        if key not in self.back:
            self.fetched.append(self.puts.index(key))
            self.back[key] = ticket.clone()
            self._alive.append(weakref.ref(self.back[key]))

    def get(self, ticket: torch.Tensor) -> torch.Tensor:
        self.prefetch(ticket)
        return self.back.pop(ticket.data_ptr())

    def alive(self) -> int:
        return sum(x.nbytes for x in (reference() for reference in self._alive) if x is not None)


def test_what_all_layers_want_stays_once_it_is_back() -> None:
    """The sums of blocks of attention residuals: the last layer asks for them first, and earlier ones still need them.

    They were put first, but what is wanted next is what was saved next to them, not what was put before them.
    """
    layers, width = 8, 1000
    weights = [torch.full((width,), 1.0 + i, requires_grad=True) for i in range(layers)]

    def forward() -> torch.Tensor:
        blocks, x = list[torch.Tensor](), torch.ones(width)
        for i, w in enumerate(weights):
            layer(i)
            x = keep("h", x * w)
            x = keep("a", x.sin())
            for block in blocks:
                x = x + block * block
            x = x * w
            if i < 3:
                blocks.append(keep("block", x.cos()))
        layer(None)
        return (x * sum(block * block for block in blocks)).sum()

    noted, plan, store = profile(forward, weights, CPU), Plan.of({"*": "host"}), Elsewhere()
    for placement in ("fp8+host", "fp8"):  # come back whole
        assert predict_both(noted, Plan.of({"block": placement, "*": "host"}))[1] == 3 * 4 * width
    assert predict_both(noted, Plan.of({"block": "keep", "*": "host"}))[1] == 0
    memory, most = Memory(plan, weights, store), [0]
    memory.watch = lambda asked: most.append(store.alive() if asked else 0)
    with memory.step():
        forward().backward()
    assert predict_both(noted, plan)[1] == 3 * 4 * width
    expected = resident(noted, plan) - device_bytes(predict(noted, plan))
    # The tensor that is in use is of the working set.
    assert expected - 4 * width <= max(most) - 4 * width <= expected
    first = store.fetched[: 3 + layers // 2]
    blocks = {3, 5, 7}  # of what was put: they are when the next layer saves them
    assert blocks < set(first)
    assert all(i in blocks or i > len(store.puts) // 2 for i in first), first


def test_what_cannot_be_reached(noted: Profile) -> None:
    with pytest.raises(Error, match=r"budget is 10 bytes; the least that can be reached is \d+"):
        fit(noted, 10, 1e9)


def test_scaled(noted: Profile) -> None:
    plan = Plan.of({"*": "host"})
    once, twice = predict(noted, plan), predict(noted.scaled(2), plan)
    assert {n: 2 * r.stored for n, r in once.items()} == {n: r.stored for n, r in twice.items()}
