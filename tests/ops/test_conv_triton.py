"""The short convolution's kernels against conv1d in float64, in Triton's interpreter and on a GPU.

fp32: 2e-6 (relative Frobenius), four products and a sigmoid of rounded inputs. bf16: 4e-3, one rounding of 2^-9.
"""

from __future__ import annotations

import pytest
import torch
from test_conv import CUTS, oracle
from triton_cpu import CUDA, DEVICE

from perilune import Sequences
from perilune.ops.conv import implementation
from perilune.ops.conv import triton as kernels

LIMITS = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
gpu = pytest.mark.gpu
Tensors = list[torch.Tensor]


def _inputs(lengths: list[int], channels: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """([u, w, window], slopes of y and of the window after)."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(DEVICE)

    T, N = sum(lengths), len(lengths)
    u, w, window = draw(T, channels).to(dtype), draw(channels, 4), draw(N, 3, channels).to(dtype)
    return [u, w, window], [draw(T, channels).to(dtype), draw(N, 3, channels).to(dtype)]


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def _check(lengths: list[int], channels: int, dtype: torch.dtype, window: bool, after: bool) -> None:
    sequences = Sequences.from_lengths(lengths, device=DEVICE)
    inputs, slopes = _inputs(lengths, channels, dtype)
    used = 3 if window else 2

    def both(run: object, double: bool) -> Tensors:
        u, w, held = (x.double().requires_grad_() if double else x.clone().requires_grad_() for x in inputs)
        if not window:
            held = torch.zeros_like(held) if double else None
        outputs = run(u, w, sequences, held)  # type: ignore[operator]
        loss = sum((y.double() * s.double()).sum() for y, s in zip(outputs[: 1 + after], slopes, strict=False))
        grads = torch.autograd.grad(loss, (u, w, held)[:used], allow_unused=True, materialize_grads=True)
        return [x.detach() for x in (*outputs, *grads)]

    for ours, exact in zip(both(kernels.short_conv, False), both(oracle, True), strict=True):
        assert _error(ours, exact) <= LIMITS[dtype]


@pytest.mark.parametrize("lengths", [[7], [1], [1, 0, 5, 70, 2, 3, 30], [0, 0], [128, 3, 126]])
@pytest.mark.parametrize("window", [False, True])
def test_values_and_gradients(lengths: list[int], window: bool) -> None:
    _check(lengths, 10, torch.float32, window, after=True)


@pytest.mark.parametrize("window", [False, True])
def test_the_window_after_is_not_used(window: bool) -> None:
    _check([5, 2, 130], 9, torch.float32, window, after=False)


def test_bf16_and_channels_past_a_block() -> None:
    _check([7, 1], 300, torch.bfloat16, window=True, after=True)


def _bits(lengths: list[int], channels: int, sizes: list[int], dtype: torch.dtype) -> None:
    """Each document alone, and the first one in pieces of `sizes`, give the bits of all together."""
    sequences = Sequences.from_lengths(lengths, device=DEVICE)
    (u, w, window), (slope, _) = _inputs(lengths, channels, dtype)
    leaf = u.clone().requires_grad_()
    y, after = kernels.short_conv(leaf, w, sequences, window)
    (d_u,) = torch.autograd.grad(y, leaf, slope)
    for n, (begin, end) in enumerate(zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True)):
        part = u[begin:end].clone().requires_grad_()
        cut = Sequences.from_lengths([end - begin], device=DEVICE)
        alone, last = kernels.short_conv(part, w, cut, window[n : n + 1])
        assert torch.equal(alone, y[begin:end])
        assert torch.equal(last[0], after[n])
        assert torch.equal(torch.autograd.grad(alone, part, slope[begin:end])[0], d_u[begin:end])
    state, parts, done = window[:1], [], 0
    for size in sizes:
        rows = Sequences.from_lengths([size], [done], DEVICE)
        part, state = kernels.short_conv(u[done : done + size], w, rows, state)
        parts.append(part)
        done += size
    assert torch.equal(torch.cat(parts), y[:done])


def test_any_cut_and_any_neighbours_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TOKENS", 8)
    monkeypatch.setattr(kernels, "SPAN", 13)
    _bits([50, 1, 2, 7], 7, [1, 2, 3, 14, 30], torch.float32)


@gpu
def test_gpu_any_cut_and_any_neighbours_change_no_bit() -> None:
    _bits([1000, 1, 2, 70, 300], 36864, [1, 2, 3, 64, 130, 800], torch.bfloat16)


def test_a_poisoned_document_stays_alone() -> None:
    (u, w, window), (slope, _) = _inputs([5, 2, 6], 4, torch.float32)
    u[5:7], window[1] = torch.nan, torch.nan
    leaf, held = u.requires_grad_(), window.requires_grad_()
    y, after = kernels.short_conv(leaf, w, Sequences.from_lengths([5, 2, 6], device=DEVICE), held)
    d_u, d_window = torch.autograd.grad((y * slope.nan_to_num()).sum(), (leaf, held))
    for x in (y, d_u):
        assert x[:5].isfinite().all()
        assert x[7:].isfinite().all()
    assert after[[0, 2]].isfinite().all()
    assert d_window[[0, 2]].isfinite().all()


def test_strided_rows_and_huge_inputs() -> None:
    (u, w, _), _ = _inputs([9], 6, torch.float32)
    wide = torch.full((9, 20), torch.nan, device=DEVICE)
    wide[:, 3:9] = u
    sequences = Sequences.from_lengths([9], device=DEVICE)
    assert torch.equal(
        kernels.short_conv(wide[:, 3:9], w, sequences, None)[0], kernels.short_conv(u, w, sequences, None)[0]
    )
    big = torch.full((9, 2), -1e4, device=DEVICE, requires_grad=True)
    y, _ = kernels.short_conv(big, torch.ones(2, 4, device=DEVICE), sequences, None)
    assert y.isfinite().all()
    assert torch.autograd.grad(y.sum(), big)[0].isfinite().all()


def test_the_device_decides() -> None:
    u, w = torch.zeros(2, 8, device=DEVICE), torch.zeros(8, 4, device=DEVICE)
    assert implementation(u, w) == ("triton" if CUDA else "reference")
    assert implementation(u, w.double()) == "reference"


@gpu
@pytest.mark.parametrize("lengths", CUTS)
@pytest.mark.parametrize("window", [False, True])
def test_gpu_shipped_width(lengths: list[int], window: bool) -> None:
    _check(lengths, 36864, torch.bfloat16, window, after=window)


@gpu
def test_gpu_same_bits_again() -> None:
    (u, w, _), (slope, _) = _inputs([3000, 70], 36864, torch.bfloat16)
    sequences = Sequences.from_lengths([3000, 70], device=DEVICE)

    def run() -> Tensors:
        leaves = [u.clone().requires_grad_(), w.clone().requires_grad_()]
        y, _ = kernels.short_conv(*leaves, sequences, None)
        return [y, *torch.autograd.grad(y, leaves, slope)]

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))
