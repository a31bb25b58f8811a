"""What a step asks of the host: operations over many tensors at once, reductions side by side, few reads.

Bits are compared with one operation a tensor; the counts are of operations that reach a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from perilune.train.masters import Masters
from perilune.train.muon import Muon, orthogonalize
from perilune.train.optim import clip_gradients
from perilune.train.pieces import pieces
from perilune.train.qk_clip import peaks
from perilune.train.ranks import _reduce

# None launches anything on a GPU.
SILENT = ("view", "expand", "split", "empty", "detach", "transpose", "unsafe_view", "promote_types")


class Launches(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not any(silent in name for silent in SILENT):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def launches(call: Callable[[], object]) -> int:
    with Launches() as counted:
        call()
    return counted.names.total()


class Heap(nn.Module):
    """Matrices of three shapes, one of them tall, with gradients."""

    def __init__(self, times: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        shapes = [(8, 24), (24, 8), (2, 8, 16)] * times
        self.weights = nn.ParameterList(torch.randn(shape).to(dtype) for shape in shapes)
        for weight in self.weights:
            weight.grad = torch.randn(weight.shape).to(dtype)


def test_pieces_keep_order_size_and_dtype() -> None:
    tensors = [torch.zeros(n, dtype=dtype) for n, dtype in ((4, torch.int32), (4, torch.int32), (3, torch.int32))]
    tensors += [torch.zeros(1), torch.zeros(20), torch.zeros(2)]
    found = list(pieces(tensors, 8))
    assert [[x.numel() for x in piece] for piece in found] == [[4, 4], [3], [1], [20], [2]]
    assert [id(x) for piece in found for x in piece] == [id(x) for x in tensors]
    assert list(pieces([], 8)) == []


def test_gradients_and_weights_move_bit_by_bit() -> None:
    net = Heap(3)
    grads = [weight.grad for weight in net.weights]
    masters = Masters(net)
    masters.take_gradients()
    params = list(masters.params.values())
    assert all(weight.grad is None for weight in net.weights)
    for param, grad in zip(params, grads, strict=True):
        assert param.grad is not None
        assert grad is not None
        assert torch.equal(param.grad, grad.float())
    with torch.no_grad():
        for param in params:
            param.add_(torch.randn_like(param))
    masters.write_back()
    assert all(torch.equal(w, p.bfloat16()) for w, p in zip(net.weights, params, strict=True))
    # One that has no gradient in the next step keeps none of the last.
    net.weights[0].grad = grads[0]
    masters.take_gradients()
    assert [p.grad is not None for p in params] == [True] + [False] * (len(params) - 1)


def test_muon_is_one_matrix_after_the_other_bit_by_bit() -> None:
    net = Heap(2, torch.float32)
    lr, momentum, decay = 0.1, 0.9, 0.2
    want = [weight.detach().clone() for weight in net.weights]
    averages = [torch.zeros_like(weight) for weight in want]
    optimizer = Muon(net.weights, lr, momentum, decay)
    for _ in range(3):
        optimizer.step()
        for i, weight in enumerate(net.weights):
            grad = weight.grad
            assert grad is not None
            averages[i] = averages[i] * momentum + grad
            update = torch.add(grad, averages[i], alpha=momentum)
            # A batch of the same matrices, since the batch may matter to the last bit of a product.
            alike = [j for j, w in enumerate(net.weights) if w.shape == weight.shape]
            if i == alike[-1]:
                stack = [torch.add(net.weights[j].grad, averages[j], alpha=momentum) for j in alike]
                turned = orthogonalize(torch.cat([x.reshape(-1, *x.shape[-2:]) for x in stack]))
                size = -lr * 0.2 * max(update.shape[-2:]) ** 0.5
                for j, part in zip(alike, turned.split(len(turned) // len(alike)), strict=True):
                    want[j] = (want[j] * (1 - lr * decay)).add_(part.reshape(want[j].shape), alpha=size)
        for weight, same in zip(net.weights, want, strict=True):
            assert torch.equal(weight, same)


def test_more_parameters_need_no_more_launches() -> None:
    counts = []
    for times in (2, 8):
        net = Heap(times)
        masters = Masters(net)
        optimizer = Muon(masters.params.values())
        took = launches(masters.take_gradients)
        grads = {p: p.grad for p in masters.params.values()}
        optimizer.step()  # makes the momenta
        for param, grad in grads.items():
            param.grad = grad
        counts.append((took, launches(optimizer.step), launches(masters.write_back)))
    assert counts[0] == counts[1]
    assert counts[0][0] == counts[0][2] == 1


@pytest.mark.gpu
def test_clipping_on_a_gpu_is_that_of_a_cpu() -> None:
    # Both sum in float32, a tensor in another order: a few units in the last place.
    net, twin = Heap(20, torch.float32), Heap(20, torch.float32)
    for weight, other in zip(net.weights, twin.weights, strict=True):
        assert weight.grad is not None
        other.data, other.grad = other.data.cuda(), weight.grad.cuda()
    copies = [1 + i % 2 for i in range(len(net.weights))]
    want = clip_gradients(net.weights, 0.5, copies)
    with Launches() as counted:
        norm = clip_gradients(twin.weights, 0.5, copies)
    assert norm.item() == pytest.approx(want.item(), rel=1e-6)
    for weight, other in zip(net.weights, twin.weights, strict=True):
        torch.testing.assert_close(other.grad.cpu(), weight.grad, rtol=2e-6, atol=0)
    assert counted.names.total() < 40


def test_small_tensors_are_reduced_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(tensor.numel())
        reduce(tensor, *rest, **options)
        tensor.mul_(2)  # as if another rank had the same

    monkeypatch.setattr(dist, "all_reduce", counted)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        values = [torch.arange(6).view(2, 3), torch.arange(4).view(2, 2).t(), torch.tensor([1.5]), torch.tensor(7)]
        want = [2 * value for value in values]
        _reduce(iter(values), dist.group.WORLD, dist.ReduceOp.SUM)
    finally:
        dist.destroy_process_group()
    assert calls == [10, 1, 1]
    assert all(torch.equal(value, other) for value, other in zip(values, want, strict=True))


def test_largest_logits_of_all_layers_are_read_once() -> None:
    logits = {3: torch.tensor([1.0, 4.5]), 7: torch.tensor([-2.0, -1.25])}
    with Launches() as counted:
        assert peaks(logits) == {3: 4.5, 7: -1.25}
    assert counted.names["_local_scalar_dense"] == 0
    assert peaks({}) == {}
