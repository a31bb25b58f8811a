"""A tensor that changes in place is an error or makes no difference, wherever the change stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from perilune import Error
from perilune.memory import FileStore, Memory, MemoryStore, Plan
from perilune.ops.names import keep

Body = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def before_its_name(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = (x @ w).mul_(2)
    keep("h", h, lambda x, w: (x @ w).mul_(2), x, w)
    return (h * h).sum()


def before_it_is_saved(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = keep("h", x @ w, torch.matmul, x, w)
    h.mul_(2)
    return (h * h).sum()


def between_two_saves(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = keep("h", x @ w, torch.matmul, x, w)
    # Not part of the loss, so plain autograd does not mind.
    aside = h * h
    h.add_(1)
    return (h * h).sum() + 0 * aside.detach().sum()


def between_a_save_and_its_name(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = (x @ w).exp()
    h.add_(1)
    keep("h", h, lambda x, w: (x @ w).exp().add_(1), x, w)
    return h.sum()


def after_the_last_save(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = keep("h", x @ w, torch.matmul, x, w)
    loss = (h * h).sum()
    h.detach().add_(1)
    return loss


def of_what_a_recipe_needs(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    u = keep("u", x @ w)
    h = keep("h", u.sin(), torch.sin, u)
    u.detach().add_(1)
    return (h * h).sum()


BODIES = (
    before_its_name,
    before_it_is_saved,
    between_two_saves,
    between_a_save_and_its_name,
    after_the_last_save,
    of_what_a_recipe_needs,
)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("placement", ["keep", "recompute", "host", "nvme"])
def test_the_gradient_of_no_change_or_an_error(body: Body, placement: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(8, 8, generator=generator) for _ in range(2))

    def gradient(memory: Memory | None, w: torch.Tensor) -> torch.Tensor | None:
        try:
            if memory is None:
                return torch.autograd.grad(body(w, x), w)[0]
            with memory.step():
                return torch.autograd.grad(body(w, x), w)[0]
        except (Error, RuntimeError) as error:
            text = str(error)
        return None if "changed in place" in text or "modified by an inplace operation" in text else w * torch.nan

    plain = gradient(None, w.clone().requires_grad_())
    if body is after_the_last_save:
        # A copy is made when a tensor is saved: right where plain autograd is an error.
        plain = 2 * x.T @ (x @ w)
    if body is of_what_a_recipe_needs:
        plain = x.T @ ((x @ w).cos() * 2 * (x @ w).sin())
    w = w.clone().requires_grad_()
    memory = Memory(Plan.of({"h": placement}, required=False), [w, x], MemoryStore(), FileStore(tmp_path))
    found = gradient(memory, w)
    assert found is None or (plain is not None and torch.equal(found, plain))
    if body is before_its_name:
        assert found is not None
