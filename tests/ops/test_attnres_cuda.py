"""mix.cu on the CPU: compiled as C++ with cuda_on_cpu.h and run thread by thread, against float64 autograd.

Tolerances as in test_attnres_triton.py for bf16 sources. On a GPU the same launches run in test_attnres_triton.py.
"""

from __future__ import annotations

import ctypes
import functools
from types import SimpleNamespace

import pytest
import torch
from sources_on_cpu import FUSED, check, compiled, rewritten, skip_without_compiler

from perilune.ops.attnres import cuda, reference

EPS, OUT_EPS = 1e-3, 1e-5
BODIES = {
    "narrow": "return narrow_host(low, high);",
    "address": "return 0;",
    "wait": "barrier_wait(&barrier, parity);",
    "arrive": "barrier_arrive(&barrier, 0);",
    "expect": "barrier_arrive(&barrier, bytes);",
    "copy": "bulk_copy(to, from, bytes, &barrier);",
    "meet": "gather(together, LANES);",
    "begin": "barrier_init(&barrier, arrivals);",
    "publish": "",
}
WORDS = """
static Meeting together;
struct uint4 { unsigned x, y, z, w; };
#define __logf logf
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float __shfl_sync(unsigned, float x, int from) {
  int warp = threadIdx.x >> 5;
  lanes[warp][threadIdx.x & 31] = x;
  __syncwarp();
  float y = lanes[warp][from];
  __syncwarp();
  return y;
}
"""
ENTRY = """
extern "C" int run(const char *name, void *arguments, int grid, int threads, int seed) {
  const Arguments &a = *static_cast<Arguments *>(arguments);
#ifdef FORWARD
  return run_grid([&] { forward(a); }, {grid, 1}, threads, SHARED_BYTES, seed);
#elif defined(BACKWARD)
  return run_grid([&] { backward(a); }, {grid, 1}, threads, SHARED_BYTES, seed);
#elif defined(COMPLETED)
  return run_grid([&] { completed(a); }, {grid, 1}, threads, SHARED_BYTES, seed);
#else
  return run_grid([&] { merge(a); }, {grid, 1}, threads, SHARED_BYTES, seed);
#endif
}
"""
Tensors = list[torch.Tensor]


@functools.cache
def _library(defines: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    text = rewritten(cuda.SOURCE.read_text(), BODIES, 128, "shared_memory")
    return compiled("cuda_on_cpu.h", f"{WORDS}{text}{ENTRY}", defines, FUSED)


@pytest.fixture(autouse=True)
def cuda_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda.py on CPU tensors and a device of three multiprocessors, so that a block takes several tokens."""
    skip_without_compiler()

    def launch(name: str, defines: tuple[tuple[str, str], ...], arguments: object, device: object, grid: int) -> None:
        threads = cuda.threads(int(dict(defines)["WIDTH"]))
        if not grid:
            return
        library = _library((*defines, (name.upper(), "1")))
        check(library.run(name.encode(), ctypes.byref(arguments), grid, threads, 1))

    monkeypatch.setattr(cuda, "_launch", launch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=3))


def _inputs(n: int, tokens: int, width: int, weights: torch.dtype) -> tuple[Tensors, Tensors, Tensors]:
    """(w_n, w_q, w_o), the sources and the slopes; NaN lies around every row that is read."""
    g = torch.Generator().manual_seed(0)

    def draw(scale: float) -> torch.Tensor:
        around = torch.full((tokens + 2, width), torch.nan, dtype=torch.bfloat16)
        around[1:-1] = scale * torch.randn(tokens, width, generator=g)
        return around[1:-1]

    vectors = [torch.randn(width, generator=g) for _ in range(3)]
    w = [(1 + 0.3 * vectors[0]), vectors[1] * width**-0.5, (1 + 0.3 * vectors[2])]
    return [x.to(weights) for x in w], [draw(i + 1.0) for i in range(n)], [draw(1.0) for _ in range(n + 1)]


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize(
    ("n", "tokens", "width", "weights"),
    [(1, 4, 64, torch.bfloat16), (3, 7, 520, torch.float32), (9, 8, 1032, torch.bfloat16)],
)
def test_values_and_gradients(n: int, tokens: int, width: int, weights: torch.dtype) -> None:
    w, sources, (d, *later) = _inputs(n, tokens, width, weights)
    s_TN, r_TN = torch.full((2, tokens, n), torch.nan)
    r_out_T = torch.full((tokens,), torch.nan)
    y = cuda.forward(sources, *w, EPS, OUT_EPS, s_TN, r_TN, r_out_T)
    exact = [x.double().requires_grad_() for x in (*w, *sources)]
    want, _ = reference.mix_norm(exact[3:], exact[0], exact[1], EPS, exact[2], OUT_EPS)
    assert _error(y, want) < 1e-2
    for used in (later, None):
        d_rows, d_w_PD, d_out_w_PD = cuda.backward(sources, *w, d, s_TN, r_TN, r_out_T, used)
        outputs, slopes = [want], [d.double()]
        if used:
            outputs, slopes = [want, *exact[3:]], [d.double(), *(x.double() for x in used)]
        d_n, d_q, *others = torch.autograd.grad(outputs, exact, slopes, retain_graph=True)
        for got, wanted in zip([d_out_w_PD.sum(0), *d_rows], others, strict=True):
            assert _error(got, wanted) < 1e-2
        if n > 1:
            assert _error(d_w_PD.sum(0) * w[1], d_n) < 1e-2
            assert _error(d_w_PD.sum(0) * w[0], d_q) < 1e-2


def test_a_tokens_bits_depend_on_that_token_alone() -> None:
    w, sources, (d, *later) = _inputs(3, 7, 520, torch.float32)

    def run(rows: slice) -> Tensors:
        parts = [x[rows].clone() for x in (*sources, d, *later)]
        kept = *torch.empty(2, len(parts[0]), 3), torch.empty(len(parts[0]))
        y = cuda.forward(parts[:3], *w, EPS, OUT_EPS, *kept)
        return [y, *cuda.backward(parts[:3], *w, parts[3], *kept, parts[4:])[0]]

    full = run(slice(None))
    for rows in (slice(0, 1), slice(6, 7), slice(2, 6), slice(3, 3)):
        assert all(torch.equal(a, b[rows]) for a, b in zip(run(rows), full, strict=True))


@pytest.mark.parametrize(("n", "tokens", "width", "mixers"), [(3, 5, 520, 6), (8, 4, 1000, 9)])
def test_two_passes(n: int, tokens: int, width: int, mixers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, _, w_o), (*bank, live), _ = _inputs(n + 1, tokens, width, torch.bfloat16)
    w_n, w_q = ([_inputs(0, 0, width, torch.bfloat16)[0][i] * (m + 1) for m in range(mixers)] for i in range(2))
    # One group of four after the other on a device that has room for a few blocks, or all at once.
    results = []
    for room in (4, 12):
        properties = SimpleNamespace(multi_processor_count=room)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, properties=properties: properties)
        results.append(cuda.mix_completed(bank, w_n, w_q, EPS))
    for one, other, a, b in zip(*results, w_n, w_q, strict=True):
        assert torch.equal(one.h_TD, other.h_TD)
        assert torch.equal(one.lse_T, other.lse_T)
        x = cuda.merge_norm(one, live, a, b, EPS, w_o, OUT_EPS)
        exact = [s.double() for s in (*bank, live)]
        want, _ = reference.mix_norm(exact, a.double(), b.double(), EPS, w_o.double(), OUT_EPS)
        # One rounding more than in one pass.
        assert _error(x, want) < 1.2e-2


def test_why_not_says_what_is_missing() -> None:
    w, sources, _ = _inputs(2, 3, 64, torch.bfloat16)
    assert cuda.why_not(sources, w) == "cpu is not a Hopper GPU"
