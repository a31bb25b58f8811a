"""Chunked cross-entropy against torch's own on all logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from perilune.errors import Error
from perilune.train.loss import cross_entropy


def case(dtype: torch.dtype, tokens: int = 37, width: int = 24, vocab: int = 53) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=gen, dtype=torch.float64).to(dtype).requires_grad_()
    w = torch.randn(vocab, width, generator=gen, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=gen)
    mask = torch.rand(tokens, generator=gen) < 0.7
    return x, w, targets, mask


@pytest.mark.parametrize("chunk", [1, 5, 37, 100])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_equals_torch(chunk: int, dtype: torch.dtype, bound: float) -> None:
    # bound: a few roundings of the dtype relative to the largest gradient
    x, w, targets, mask = case(dtype)
    loss, count = cross_entropy(x, w, targets, mask, max_logits=chunk * 53)
    (0.5 * loss / count).backward()
    xr, wr, _, _ = case(torch.float64)
    ref = functional.cross_entropy(xr @ wr.T, torch.where(mask, targets, -100), reduction="sum", ignore_index=-100)
    (0.5 * ref / mask.sum()).backward()
    assert count.item() == mask.sum().item()
    assert abs(loss.item() / ref.item() - 1) < bound
    for got, want in ((x.grad, xr.grad), (w.grad, wr.grad)):
        assert got is not None
        assert want is not None
        assert got.dtype == dtype
        assert (got - want).norm() <= bound * want.norm()


def test_masked_targets_are_not_read() -> None:
    x, w, targets, mask = case(torch.float32)
    loss, _ = cross_entropy(x, w, targets, mask)
    poisoned, _ = cross_entropy(x, w, torch.where(mask, targets, -(10**9)), mask)
    assert torch.equal(loss, poisoned)


def test_masked_rows_get_no_gradient() -> None:
    x, w, targets, mask = case(torch.float32)
    cross_entropy(x, w, targets, mask)[0].backward()
    assert x.grad is not None
    assert not x.grad[~mask].any()
    assert x.grad[mask].any(dim=1).all()


def test_never_more_logits_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = torch.log_softmax

    def spy(x: torch.Tensor, dim: int) -> torch.Tensor:
        sizes.append(x.numel())
        return real(x, dim=dim)

    monkeypatch.setattr(torch, "log_softmax", spy)
    x, w, targets, _ = case(torch.float32)
    cross_entropy(x, w, targets, max_logits=400)[0].backward()
    assert len(sizes) > 1
    assert max(sizes) <= 400


def test_bfloat16_gradient_sums_in_float32() -> None:
    # One token a chunk: a bf16 running sum over 2000 equal contributions would stall long before the true sum.
    x = torch.ones(2000, 1, dtype=torch.bfloat16)
    w = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    cross_entropy(x, w, torch.zeros(2000, dtype=torch.int64), max_logits=2)[0].backward()
    assert w.grad is not None
    assert w.grad.flatten().tolist() == [-1000.0, 1000.0]


def test_wrong_shapes() -> None:
    x, w, targets, mask = case(torch.float32)
    with pytest.raises(Error, match="targets_T"):
        cross_entropy(x, w, targets[1:], mask)
    with pytest.raises(Error, match="weight_VD"):
        cross_entropy(x, w[:, 1:], targets, mask)
