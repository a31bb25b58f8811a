"""A reference model in the gradients' memory: the logits of a resident one, bit by bit, in no more memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory_models import World, small_config
from torch import nn

from perilune import Error, Transformer
from perilune.memory import reference as borrow_module
from perilune.memory.arena import rounded
from perilune.memory.census import Census
from perilune.memory.reference import borrow
from perilune.model import initialize

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def units_of(model: Transformer) -> list[nn.Module]:
    return [part for layer in model.layers for part in (layer.attn, layer.ffn)]  # type: ignore[misc]


def frozen(dtype: torch.dtype = torch.float32) -> Transformer:
    model = initialize(Transformer(small_config()), 7).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for buffer in model.buffers():
            buffer.copy_(torch.randn_like(buffer))
    return model


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zeroed", [False, True])
def test_logits_of_a_resident_reference(
    zeroed: bool, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice in a row, on memory that was poisoned, and training goes on as if nothing had been."""
    if device == "cuda":
        # Copies that come late, so that a missing event shows.
        copy = borrow_module._copy
        monkeypatch.setattr(borrow_module, "_copy", lambda a, b: (torch.cuda._sleep(2_000_000), copy(a, b))[1])
    world, reference = World(), frozen(dtype)
    tokens, sequences = world.tokens.to(device), world.sequences.to(device)
    before = {name: value.clone() for name, value in tensors(reference).items()}
    want = frozen_like(before, dtype).to(device)(tokens, sequences)
    world.model.to(device)
    if zeroed:
        for parameter in world.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    for parameter in reference.parameters():
        parameter.data = parameter.data.pin_memory() if device == "cuda" else parameter.data
    with borrow(world.model.parameters(), reference, units_of(reference)) as model:
        assert not torch.is_grad_enabled()
        for _ in range(2):
            got = model(tokens, sequences)
            assert torch.equal(got, want)
    assert torch.is_grad_enabled()
    for parameter in world.model.parameters():
        assert (parameter.grad is not None) == zeroed
        assert parameter.grad is None or not parameter.grad.any()
    for name, value in tensors(reference).items():
        assert value.device == CPU
        assert torch.equal(value, before[name])


def frozen_like(values: dict[str, torch.Tensor], dtype: torch.dtype) -> Transformer:
    model = Transformer(small_config()).to(dtype)
    with torch.no_grad():
        for name, value in tensors(model).items():
            value.copy_(values[name])
    return model.requires_grad_(False)


class Counting(Census):
    """A census that looks after every call of a unit."""

    def watch(self, model: Transformer) -> list[int]:
        seen: list[int] = []
        for unit in units_of(model):
            unit.register_forward_hook(lambda *_: seen.append(self.alive()))
        return seen


@pytest.mark.parametrize("trained", [1.0, 0.3])
def test_no_more_memory_than_the_gradients_and_one_unit(trained: float) -> None:
    """By a census of storages, against a resident model: what is more is the gradients' memory and one unit at most.

    trained: how much of the model's parameters have gradients here, as if they were cut over ranks.
    """
    world, reference = World(), frozen()
    params = [p.detach()[: max(1, int(trained * len(p)))].clone().requires_grad_() for p in world.model.parameters()]
    gradients = sum(p.nbytes for p in params)
    unit = max(sum(rounded(x.nbytes) for x in tensors(part).values()) for part in units_of(reference))
    rest = sum(rounded(x.nbytes) for x in tensors(reference).values()) - sum(
        rounded(x.nbytes) for part in units_of(reference) for x in tensors(part).values()
    )
    counts = []
    for resident in (True, False):
        model = frozen()
        with torch.no_grad(), Counting(CPU) as census:
            seen = census.watch(model)
            if resident:
                model(world.tokens, world.sequences)
            else:
                with borrow(params, model, units_of(model)) as borrowed:
                    borrowed(world.tokens, world.sequences)
                left = census.alive()
        counts.append(seen)
    extra = max(b - a for a, b in zip(*counts, strict=True))
    assert gradients <= extra <= gradients + max(unit, rest)
    assert left == 0
    if trained == 1.0:
        assert extra == gradients


def test_pending_gradients_are_an_error() -> None:
    world, reference = World(), frozen()
    world.step(None)
    before = [p.grad.clone() for p in world.model.parameters() if p.grad is not None]
    names = [name for name, _ in world.model.named_parameters()]
    with (
        pytest.raises(Error, match=r"borrow: the gradient of norm_D is not zero; step, or clear"),
        borrow(world.model.parameters(), reference, units_of(reference), names),
    ):
        pass
    after = [p.grad for p in world.model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_too_little_memory_is_an_error_and_leaves_everything_as_it_was() -> None:
    world, reference = World(), frozen()
    before = {name: value.clone() for name, value in tensors(reference).items()}
    small = [torch.zeros(300, requires_grad=True)]

    def run(units: list[nn.Module]) -> Any:
        with borrow(small, reference, units) as model:
            return model(world.tokens, world.sequences)

    with pytest.raises(Error, match=r"borrow: \d+ bytes of weights that are needed together, the largest"):
        run(units_of(reference))
    assert all(torch.equal(value, before[name]) for name, value in tensors(reference).items())
    reference.to("meta")
    with pytest.raises(Error, match="a weight of the reference is on meta; they must be in host memory"):
        run([])


def test_an_exception_inside_gives_everything_back() -> None:
    world, reference = World(), frozen()
    data = {name: value.data_ptr() for name, value in tensors(reference).items()}
    with (
        pytest.raises(Error, match="tokens holds id 99"),
        borrow(world.model.parameters(), reference, units_of(reference)) as model,
    ):
        model(torch.full((75,), 99), world.sequences)
    assert {name: value.data_ptr() for name, value in tensors(reference).items()} == data
    assert all(p.grad is None for p in world.model.parameters())
    loss, gradients = world.step(None)
    assert loss.isfinite()
    assert gradients
