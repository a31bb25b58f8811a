"""The host store on a real GPU: the same bits, pinned buffers, and the predicted bytes in the allocator."""

from __future__ import annotations

import gc

import pytest
import torch

from perilune.memory import Memory, Plan
from perilune.memory.fit import fit, working_set
from perilune.memory.profile import device_bytes, predict, profile
from perilune.ops.names import keep, layer

pytestmark = pytest.mark.gpu

LAYERS, ROWS, WIDTH = 6, 4096, 1024


@pytest.fixture(scope="module")
def weights() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, device="cuda", requires_grad=True) for _ in range(LAYERS)]


def forward(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for i, w in enumerate(weights):
        layer(i)
        h = keep("h", x @ (w / WIDTH**0.5))
        x = keep("a", h.sin(), torch.sin, h)
    layer(None)
    return x.square().mean()


@pytest.mark.parametrize("table", [{"*": "host"}, {"a": "recompute", "h": "host"}, {"a": "host"}])
@pytest.mark.parametrize("in_flight", [1 << 20, 1 << 30])
def test_bits_and_pinned_buffers(table: dict[str, str], in_flight: int, weights: list[torch.Tensor]) -> None:
    from perilune.memory.pinned import PinnedStore

    x = torch.randn(ROWS, WIDTH, device="cuda")
    reference = torch.autograd.grad(forward(x, weights), weights)
    store = PinnedStore(torch.device("cuda"), in_flight=in_flight)
    memory = Memory(Plan.of(table, required=False), [*weights, x], store)
    for _ in range(20):
        with memory.step():
            loss = forward(x, weights)
            # Whoever gets memory that was freed too early writes into it.
            for _ in range(8):
                torch.full((ROWS, WIDTH), float("nan"), device="cuda")
            found = torch.autograd.grad(loss, weights)
        assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))
        assert store.held == 0
    buffers = [buffer.bytes for buffer in store._free]
    assert buffers
    assert all(buffer.is_pinned() for buffer in buffers)


def test_fit_bounds_the_peak(weights: list[torch.Tensor]) -> None:
    """Weights, gradients, working set and what the plan keeps: the allocator's peak stays within the budget."""
    from perilune.memory.pinned import PinnedStore

    x, device = torch.randn(ROWS, WIDTH, device="cuda"), torch.device("cuda")
    for w in weights:
        w.grad = torch.zeros_like(w)
    noted = profile(lambda: forward(x, weights), [*weights, x], device)
    around = torch.cuda.memory_allocated() + working_set(lambda: forward(x, weights), [*weights, x], noted, device)
    budget = around + device_bytes(predict(noted, Plan())) // 2
    plan = fit(noted, budget, 50e9, around=around)
    assert plan.rules
    memory = Memory(plan, [*weights, x], PinnedStore(device, in_flight=1 << 24))
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with memory.step():
            forward(x, weights).backward()
        assert torch.cuda.max_memory_allocated() <= budget
    for w in weights:
        w.grad = None


def test_predicted_bytes_are_the_allocators(weights: list[torch.Tensor]) -> None:
    x = torch.randn(ROWS, WIDTH, device="cuda")
    noted = profile(lambda: forward(x, weights), [*weights, x], torch.device("cuda"))
    for table in ({}, {"a": "recompute"}, {"h": "fp8"}):
        gc.collect()  # what another test has left in a cycle would go in between
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with Memory(Plan.of(table), [*weights, x]).step():
            loss = forward(x, weights)
            kept = torch.cuda.memory_allocated() - before
            del loss
        predicted = device_bytes(predict(noted, Plan.of(table)))
        assert abs(kept - predicted) <= 0.03 * predicted
