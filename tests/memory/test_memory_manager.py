"""Every plan gives the forward bits, lossless ones the gradient bits, and a step leaves nothing behind."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from memory_models import CPU, World

from perilune import Error
from perilune.memory import PRESETS, FileStore, Memory, MemoryStore, Plan, load_plan
from perilune.memory.census import Census
from perilune.ops.names import keep, layer, region

LOSSLESS = {
    "none": {},
    "full-recompute": PRESETS["full-recompute"],
    "everything recomputed": {"*": "recompute"},
    "everything to the host": {"*": "host"},
    "everything to files": {"*": "nvme"},
    "k3": PRESETS["k3"],
    "elements recomputed": {n: p for n, p in PRESETS["k3"].items() if p == "recompute"},
    "core recomputed, the rest moved": {"kda.core": "recompute", "norm": "recompute", "*": "host"},
    "one layer apart": {"layers.1.*": "keep", "layers.2.kda.*": "nvme", "*": "host"},
}
LOSSY = {"everything fp8": {"*": "fp8"}, "everything fp8 on the host": {"*": "fp8+host"}}


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture
def stores(tmp_path: Path) -> tuple[MemoryStore, FileStore]:
    return MemoryStore(), FileStore(tmp_path)


@pytest.mark.parametrize("name", [*LOSSLESS, *LOSSY])
def test_forward_bits_and_gradients(name: str, world: World, stores: tuple[MemoryStore, FileStore]) -> None:
    loss, gradients = world.step(None)
    memory = Memory(Plan.of((LOSSLESS | LOSSY)[name], required=False), world.weights, *stores)
    for _ in range(2):
        got, found = world.step(memory)
        assert torch.equal(got, loss)
        assert found.keys() == gradients.keys()
        equal = [torch.equal(found[n], g) for n, g in gradients.items()]
        assert all(equal) if name in LOSSLESS else not all(equal)
        assert stores[0].held == stores[1].held == 0


def test_the_experts_keep_their_dispatch_input_only(world: World) -> None:
    memory = Memory(load_plan("none"), world.weights)
    world.step(memory)
    rows = {name for name in memory.rows if name.startswith("layers.2.moe")}
    assert rows == {"layers.2.moe.z", "layers.2.moe.y", "layers.2.moe.normed"}
    tokens, latent = 75, 16
    assert memory.rows["layers.2.moe.z"].before == tokens * latent * 4


def test_the_experts_can_keep_their_products(world: World) -> None:
    """Their re-dispatch is a region like others, but by default computed again: the same bits when it is kept."""
    loss, gradients = world.step(None)
    unnamed = []
    for table in ({}, {"moe.h": "recompute"}, {"layers.2.moe.h": "keep"}):
        memory = Memory(Plan.of(table), world.weights)
        got, found = world.step(memory)
        assert torch.equal(got, loss)
        assert all(torch.equal(found[n], g) for n, g in gradients.items())
        unnamed.append(memory.rows["(unnamed)"].device)
    rows, width = 75 * 2, 2 * 16
    assert [size - unnamed[0] for size in unnamed] == [0, 0, rows * width * 4]
    with pytest.raises(Error, match=r"moe\.h' matches no name that can be host"):
        world.step(Memory(Plan.of({"moe.h": "host"}), world.weights, MemoryStore()))


def test_control_tensors_and_weights_are_never_touched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a plan says, no store and no codec sees integers, weights or anything without a name."""
    seen: list[torch.Tensor] = []
    store = MemoryStore()
    put = store.put
    monkeypatch.setattr(store, "put", lambda flat: (seen.append(flat), put(flat))[1])
    world.step(Memory(Plan.of({"*": "host"}), world.weights, store))
    weights = {w.untyped_storage().data_ptr() for w in world.weights}
    assert seen
    assert all(x.is_floating_point() for x in seen)
    assert not weights & {x.untyped_storage().data_ptr() for x in seen}


def test_a_name_has_a_way_to_be_computed_again_or_has_none() -> None:
    w = torch.ones(4, requires_grad=True)

    def step() -> None:
        with Memory(Plan.of({"x": "recompute"}), [w]).step():
            keep("x", w * 2, torch.mul, w, 2)
            keep("x", w * 3)

    with pytest.raises(Error, match="x is given without a way"):
        step()


def test_views_of_weights_cannot_be_named() -> None:
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    with Memory(Plan(), [w]).step(), pytest.raises(Error, match="w is a weight, or a view of one"):
        keep("w", w.t())
    # A linear layer saves w.t(), which is no Parameter: it stays what it is.
    memory = Memory(Plan.of({"y": "fp8"}), [w])
    with memory.step():
        y = keep("y", x @ w.t())
        (gradient,) = torch.autograd.grad((y * y).sum(), y)
    assert memory.rows["y"].count == 1
    assert (gradient - 2 * y).norm() <= 2 * 2**-4 * y.norm()


def test_fp8_is_for_floating_point() -> None:
    x = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
    with Memory(Plan.of({"x": "fp8"}, required=False)).step(), pytest.raises(Error, match=r"x is torch\.complex64"):
        keep("x", x * 1)


def test_a_name_that_comes_after_the_operation_saved_its_output() -> None:
    x = torch.randn(100, requires_grad=True)
    store = MemoryStore()
    with Memory(Plan.of({"y": "host"}), [x], store).step():
        # exp saves its own output before anybody can name it.
        y = keep("y", x.exp())
        assert store.held == y.nbytes
        (y * y).sum().backward()
        assert store.held == 0
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach().exp() * x.detach().exp())


def test_a_recipe_lives_as_long_as_its_tensor() -> None:
    """A tensor that is used in the next layer only is computed again as well."""
    w = torch.randn(64, 64, requires_grad=True)
    left = {}
    for plan in ({}, {"a": "recompute"}):
        with Census(CPU) as census, Memory(Plan.of(plan), [w]).step():
            layer(0)
            h = keep("h", w * 2)
            a = keep("a", h.sin(), torch.sin, h)
            layer(1)
            loss = (a @ w).sum()
            del h, a
            left[len(plan)] = (census.alive() - loss.nbytes) // w.nbytes
            (gradient,) = torch.autograd.grad(loss, w)
        assert gradient.isfinite().all()
    assert left == {0: 2, 1: 1}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_regions_with_any_number_of_products(count: int) -> None:
    """No counter is shared between the pass and its repetition (an odd number of products once broke such a one)."""
    weights = [torch.randn(5, 5, requires_grad=True) for _ in range(count)]
    x = torch.randn(3, 5)

    def body(x: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = keep("inside", x @ w).tanh()
        return x

    def gradients(plan: Plan) -> list[torch.Tensor]:
        with Memory(plan, weights).step():
            loss = sum(region("body", body, x * (i + 1)).square().sum() for i in range(3))
            return list(torch.autograd.grad(loss, weights))

    for kept, again in zip(gradients(Plan()), gradients(Plan.of({"body": "recompute"})), strict=True):
        assert torch.equal(kept, again)


def test_recomputing_attention_frees_what_the_projection_would_hold() -> None:
    """The output of a region is an input of what follows: with its name moved, nothing of it is left."""
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    left = {}
    for plan in ({}, {"core": "recompute"}, {"core": "recompute", "o": "recompute"}):
        with Census(CPU) as census, Memory(Plan.of(plan), [x, w]).step():
            inner = x * 2
            o = region("core", lambda a: a.sin().cos().exp(), inner)
            keep("o", o, lambda a: a.sin().cos().exp(), inner)
            loss = (o @ w).sum()
            layer(None)
            del o, inner
            left[len(plan)] = (census.alive() - loss.nbytes) // x.nbytes
            loss.backward()
    # Kept: inputs of sin, of cos, and exp's output. Recomputed: the region's input and output; then the input alone.
    assert left == {0: 3, 1: 2, 2: 1}


def test_micro_batches_in_any_order(world: World) -> None:
    """Pipelines run several forward passes before their backward passes, in the same or in the opposite order."""
    world.model.zero_grad(set_to_none=True)
    (reference,) = torch.autograd.grad(world.forward(), world.model.lm_head.weight)
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        store = MemoryStore()
        with Memory(Plan.of({"norm": "recompute", "*": "host"}), world.weights, store).step():
            losses = [world.forward() for _ in range(3)]
            for i in order:
                assert torch.equal(torch.autograd.grad(losses[i], world.model.lm_head.weight)[0], reference)
                losses[i] = None  # type: ignore[call-overload]
                gc.collect()
            assert store.held == 0


def test_nothing_is_left_after_an_exception_or_an_evaluation(world: World) -> None:
    store = MemoryStore()
    memory = Memory(Plan.of({"*": "host"}), world.weights, store)
    loss, gradients = world.step(memory)
    held = []

    def broken() -> None:
        with memory.step():
            held.append(world.forward())
            assert store.held > 0
            raise RuntimeError("forward broke")

    with pytest.raises(RuntimeError, match="forward broke"):
        broken()
    assert store.held == 0
    with pytest.raises(Error, match="the backward pass came after its step had ended"):
        held[0].backward()
    with torch.no_grad():
        world.forward()
    with memory.step(), torch.no_grad():
        world.forward()
    assert store.held == 0
    again, found = world.step(memory)
    assert torch.equal(again, loss)
    assert all(torch.equal(found[n], g) for n, g in gradients.items())


def test_an_unmatched_pattern_stops_before_the_backward_pass(world: World) -> None:
    world.model.zero_grad(set_to_none=True)
    with pytest.raises(Error, match=r"'kda.norm' matches no name that can be recompute; nearest: .*kda.normed"):
        world.step(Memory(Plan.of({"kda.norm": "recompute"}), world.weights))
    assert all(p.grad is None for p in world.model.parameters())


def test_a_change_in_place_is_noticed() -> None:
    x = torch.randn(3, requires_grad=True)
    with Memory(Plan()).step():
        y = x * 2
        loss = (y * y).sum()
        y.detach().zero_()
        with pytest.raises(Error, match="changed in place"):
            loss.backward()


def test_host_memory_short_says_so(world: World) -> None:
    store = MemoryStore(limit=10_000)
    with pytest.raises(Error, match=r"memory.host_bytes is 10000"):
        world.step(Memory(Plan.of({"*": "host"}), world.weights, store))
    assert store.held == 0


def test_a_step_inside_of_a_step_is_refused_and_leaves_the_outer_one_alone() -> None:
    w, store = torch.randn(8, 8, requires_grad=True), MemoryStore()
    memory = Memory(Plan.of({"h": "host"}), [w], store)
    with memory.step():
        h = keep("h", w @ w)
        loss = (h * h).sum()
        for inner in (memory, Memory(Plan(), [w])):
            with pytest.raises(Error, match="a memory plan is active already"), inner.step():
                pass
        (gradient,) = torch.autograd.grad(loss, w)
    h = w @ w
    assert torch.equal(gradient, torch.autograd.grad((h * h).sum(), w)[0])
    assert memory.rows["h"].stored == w.nbytes


@pytest.mark.parametrize("plan", [{}, {"*": "host"}, {"a": "recompute"}, {"out": "recompute", "*": "recompute"}])
def test_gradients_of_gradients(plan: dict[str, str]) -> None:
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(8, 8, generator=generator) for _ in range(2))
    w.requires_grad_()

    def penalty() -> torch.Tensor:
        h = keep("h", x @ w, torch.matmul, x, w)
        a = keep("a", h.tanh(), torch.tanh, h)
        y = region("out", lambda a: (a @ w).exp().sum(), a)
        (gradient,) = torch.autograd.grad(y, w, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), w)[0]

    with Memory(Plan.of(plan), [w, x], MemoryStore()).step():
        found = penalty()
    assert torch.equal(found, penalty())
