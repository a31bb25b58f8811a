"""The short convolution against torch's conv1d in float64, and its bitwise properties."""

from __future__ import annotations

import pytest
import torch

from perilune import Error, Sequences
from perilune.ops.conv import short_conv


def oracle(
    u_TC: torch.Tensor, w_CW: torch.Tensor, sequences: Sequences, window_N3C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One document at a time, by conv1d in float64."""
    outputs, windows = [u_TC[:0].double()], []
    for n in range(sequences.count):
        tokens = u_TC[sequences.offsets[n] : sequences.offsets[n + 1]]
        x = torch.cat((window_N3C[n], tokens)).double()
        if len(tokens):
            z = torch.nn.functional.conv1d(x.t()[None], w_CW.double()[:, None], groups=w_CW.shape[0])[0].t()
            outputs.append(z / (1 + torch.exp(-z)))
        windows.append(x[-3:])
    return torch.cat(outputs), torch.stack(windows)


CUTS = [[7], [1], [1, 0, 5, 300, 2, 3, 600], [0, 0], [256, 259, 253]]


@pytest.mark.parametrize("lengths", CUTS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_values_and_gradients(lengths: list[int], dtype: torch.dtype, limit: float) -> None:
    """Relative Frobenius error; four products and a sigmoid of rounded inputs."""
    sequences, C = Sequences.from_lengths(lengths), 10
    inputs = [torch.randn(sequences.total, C), torch.randn(C, 4), torch.randn(sequences.count, 3, C)]
    slopes = [torch.randn(sequences.total, C), torch.randn(sequences.count, 3, C)]

    def both(f: object, kind: torch.dtype) -> list[torch.Tensor]:
        u, w, window = (x.to(kind).requires_grad_() for x in inputs)
        outputs = f(u, w, sequences, window)  # type: ignore[operator]
        loss = sum((y * s.to(y.dtype)).sum() for y, s in zip(outputs, slopes, strict=True))
        gradients = torch.autograd.grad(loss, (u, w, window), allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
        return [x.detach() for x in (*outputs, *gradients)]

    for ours, reference in zip(both(short_conv, dtype), both(oracle, torch.float64), strict=True):
        assert ours.shape == reference.shape
        assert (ours.double() - reference).norm() <= limit * reference.norm() + 1e-300


def test_gradients_agree_with_finite_differences() -> None:
    sequences = Sequences.from_lengths([2, 0, 3])
    shapes = [(5, 2), (2, 4), (3, 3, 2)]
    u, w, window = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    assert torch.autograd.gradcheck(lambda u, w, window: short_conv(u, w, sequences, window), (u, w, window))


def test_tap_3_weighs_the_current_token() -> None:
    u, w = torch.randn(5, 3), torch.zeros(3, 4)
    w[:, 3] = 1.0
    y, _ = short_conv(u, w, Sequences.from_lengths([5]))
    assert torch.allclose(y, torch.nn.functional.silu(u), rtol=1e-6)


def test_no_window_means_zeros_before_the_document() -> None:
    u, w, sequences = torch.randn(9, 6), torch.randn(6, 4), Sequences.from_lengths([4, 5])
    absent, zeros = short_conv(u, w, sequences), short_conv(u, w, sequences, torch.zeros(2, 3, 6))
    assert all(torch.equal(x, y) for x, y in zip(absent, zeros, strict=True))


@pytest.mark.parametrize("C", [7, 96])
def test_any_cut_and_any_neighbours_change_no_bit(C: int) -> None:
    lengths = [600, 1, 2, 37]
    sequences = Sequences.from_lengths(lengths)
    u, w, window = torch.randn(640, C), torch.randn(C, 4), torch.randn(4, 3, C)
    y, after = short_conv(u, w, sequences, window)
    for n, (begin, end) in enumerate(zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True)):
        alone, last = short_conv(u[begin:end], w, Sequences.from_lengths([end - begin]), window[n : n + 1])
        assert torch.equal(alone, y[begin:end])
        assert torch.equal(last[0], after[n])
    for sizes in ([1] * 20, [1, 2, 3, 4, 90], [255, 256, 89]):
        state, parts, done = window[:1], [], 0
        for size in sizes:
            part, state = short_conv(u[done : done + size], w, Sequences.from_lengths([size], [done]), state)
            parts.append(part)
            done += size
        assert torch.equal(torch.cat(parts), y[:done])
        assert torch.equal(state[0], torch.cat((window[0], u[:done]))[-3:])


def test_a_poisoned_document_stays_alone() -> None:
    lengths = [5, 2, 6]
    u, w = torch.randn(13, 4), torch.randn(4, 4)
    u[5:7] = float("nan")
    leaf = u.requires_grad_()
    y, after = short_conv(leaf, w, Sequences.from_lengths(lengths))
    (du,) = torch.autograd.grad(y.sum(), leaf)
    for x in (y, du):
        assert x[:5].isfinite().all()
        assert x[7:].isfinite().all()
    assert after[[0, 2]].isfinite().all()


def test_bf16_is_computed_in_fp32_and_huge_inputs_stay_finite() -> None:
    sequences = Sequences.from_lengths([50])
    u, w = torch.randn(50, 8).bfloat16(), torch.randn(8, 4)
    y, after = short_conv(u, w, sequences)
    assert (y.dtype, after.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(y, short_conv(u.float(), w, sequences)[0].bfloat16())
    big = torch.full((6, 2), -1e4).requires_grad_()
    y, _ = short_conv(big, torch.ones(2, 4), Sequences.from_lengths([6]))
    (du,) = torch.autograd.grad(y.sum(), big)
    assert y.isfinite().all()
    assert du.isfinite().all()


@pytest.mark.parametrize(
    ("u", "w", "window", "named"),
    [
        (torch.zeros(5), torch.zeros(3, 4), None, "u has shape"),
        (torch.zeros(6, 3), torch.zeros(3, 4), None, "6 tokens"),
        (torch.zeros(5, 3), torch.zeros(3, 1, 4), None, "w has shape"),
        (torch.zeros(5, 3), torch.zeros(3, 3), None, "w has shape"),
        (torch.zeros(5, 3), torch.zeros(3, 4), torch.zeros(1, 4, 3), "window has shape"),
    ],
)
def test_refusals_name_the_argument(u: torch.Tensor, w: torch.Tensor, window: torch.Tensor | None, named: str) -> None:
    with pytest.raises(Error, match=named):
        short_conv(u, w, Sequences.from_lengths([5]), window)
