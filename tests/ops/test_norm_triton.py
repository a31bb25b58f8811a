"""The normalisation kernels against float64 autograd, in Triton's interpreter and on a GPU.

fp32: 1e-6 forward, 1e-5 gradients (relative Frobenius). bf16: 1e-2, two roundings of 2^-9 in the output and one in a
gradient, whose terms may cancel; the interpreter truncates where a GPU rounds, which is up to twice as much.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from triton_cpu import CUDA, DEVICE

from perilune.ops.norm import implementation
from perilune.ops.norm import triton as kernels

EPS = 1e-3
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
gpu = pytest.mark.gpu
Tensors = list[torch.Tensor]
Op = Callable[..., Tensors]


def _rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


# name -> (ours, the formula), both of (x, w, other) and giving a list of outputs.
CASES: dict[str, tuple[Op, Op]] = {
    "rms": (lambda x, w, _: [kernels.rms_norm(x, w, EPS)], lambda x, w, _: [_rms(x, w)]),
    "gated": (
        lambda x, w, g: [kernels.gated_rms_norm(x, w, g, EPS)],
        lambda x, w, g: [_rms(x, w) * torch.sigmoid(g)],
    ),
    "added": (lambda x, w, a: list(kernels.add_rms_norm(x, a, w, EPS)), lambda x, w, a: [x + a, _rms(x + a, w)]),
}


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """([x, w, other], slopes); NaN lies behind x."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(DEVICE, dtype)

    x = torch.full((shape[0] + 1, *shape[1:]), torch.nan, device=DEVICE, dtype=dtype)
    x[:-1] = draw(*shape)
    return [x[:-1], 1 + 0.3 * draw(shape[-1]), draw(*shape)], [draw(*shape), draw(*shape)]


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def _check(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ours, formula = CASES[name]
    inputs, slopes = _inputs(shape, dtype)
    leaves = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    outputs, wanted = ours(*leaves), formula(*exact)
    for a, b in zip(outputs, wanted, strict=True):
        assert a.dtype == dtype
        assert _error(a, b) < LIMITS[dtype] / (10 if dtype == torch.float32 else 1)
    used = 2 if name == "rms" else 3
    got = torch.autograd.grad(outputs, leaves[:used], slopes[: len(outputs)])
    want = torch.autograd.grad(wanted, exact[:used], [s.double() for s in slopes[: len(wanted)]])
    for a, b in zip(got, want, strict=True):
        assert _error(a, b) < LIMITS[dtype]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(5, 33), (3, 4, 128), (1, 5000), (0, 8), (300, 16), (33, 1)])
def test_values_and_gradients(name: str, shape: tuple[int, ...]) -> None:
    _check(name, shape, torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_bf16(name: str) -> None:
    _check(name, (7, 96), torch.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_more_tiles_than_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", 2)
    _check(name, (700, 40), torch.float32)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", [33, 128])
def test_a_rows_bits_depend_on_that_row_alone(name: str, width: int) -> None:
    (x, w, other), slopes = _inputs((300, width), torch.float32)

    def run(rows: slice) -> Tensors:
        leaf = x[rows].clone().requires_grad_()
        outputs = CASES[name][0](leaf, w, other[rows])
        return [*outputs, torch.autograd.grad(outputs, leaf, [s[rows] for s in slopes[: len(outputs)]])[0]]

    full = run(slice(None))
    for rows in (slice(0, 1), slice(299, 300), slice(17, 160)):
        assert all(torch.equal(a, b[rows]) for a, b in zip(run(rows), full, strict=True))


def test_one_output_of_two_and_strided_rows() -> None:
    (x, w, added), (d, _) = _inputs((6, 40), torch.float32)
    leaf = x.clone().requires_grad_()
    total, y = kernels.add_rms_norm(leaf, added, w, EPS)
    assert torch.equal(torch.autograd.grad(total, leaf, d, retain_graph=True)[0], d)
    exact = x.double().requires_grad_()
    (got,), (want,) = torch.autograd.grad(y, leaf, d), torch.autograd.grad(_rms(exact + added, w), exact, d.double())
    assert _error(got, want) < 1e-5
    wide = torch.full((6, 80), torch.nan, device=DEVICE)
    wide[:, ::2] = x
    assert torch.equal(kernels.rms_norm(wide[:, ::2], w, EPS), kernels.rms_norm(x, w, EPS))


def test_huge_gates_stay_finite() -> None:
    x, w = torch.ones(2, 16, device=DEVICE, requires_grad=True), torch.ones(16, device=DEVICE)
    gate = torch.full((2, 16), -1e4, device=DEVICE)
    gate[1] = 1e4
    gate.requires_grad_()
    y = kernels.gated_rms_norm(x, w, gate, 1e-6)
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    assert all(d.isfinite().all() for d in torch.autograd.grad(y.sum(), (x, gate)))


def test_the_device_decides() -> None:
    x = torch.zeros(2, 8, device=DEVICE)
    assert implementation(x) == ("triton" if CUDA else "reference")
    assert implementation(x.double()) == "reference"


@gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(300, 7168), (70, 3584), (33, 1536), (33, 512), (50, 96, 128), (9, 2304)])
def test_gpu_shipped_widths(name: str, shape: tuple[int, ...]) -> None:
    _check(name, shape, torch.bfloat16)


@gpu
def test_gpu_rounding_order() -> None:
    """The interpreter truncates to bf16 instead of rounding."""
    (x, w, gate), _ = _inputs((40, 64), torch.bfloat16)
    normal = torch.nn.functional.rms_norm(x.float(), (64,), eps=EPS)
    # Where another order of the sum falls on the other side of a rounding boundary.
    assert (kernels.rms_norm(x, w, EPS) != normal.to(torch.bfloat16) * w).double().mean() < 0.01
    fused = (normal * w.float() * torch.sigmoid(gate.float())).bfloat16()
    assert (kernels.gated_rms_norm(x, w, gate, EPS) != fused).double().mean() < 0.01


@gpu
@pytest.mark.parametrize("name", CASES)
def test_gpu_same_bits_again(name: str) -> None:
    inputs, slopes = _inputs((3000, 7168), torch.bfloat16)

    def run() -> Tensors:
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = CASES[name][0](*leaves)
        return [*outputs, *torch.autograd.grad(outputs, leaves[:2], slopes[: len(outputs)])]

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))
