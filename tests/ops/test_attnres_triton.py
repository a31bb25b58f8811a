"""The attention-residual kernels against the formula under float64 autograd, in Triton's interpreter and on a GPU.

fp32 inputs: 3e-5 relative Frobenius, as sums of up to 8192 fp32 terms and scores of size 30 give. bf16 inputs: 1e-2,
from three roundings of the output (mixture, norm, weight; 2^-9 each and 7e-3 together where sources cancel) and one of
each gradient.
"""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from triton_cpu import CUDA, DEVICE

from perilune.ops.attnres import reference
from perilune.ops.attnres import triton as kernels
from perilune.ops.attnres import triton_inference as inference

EPS, OUT_EPS = 1e-3, 1e-5
LIMITS = {torch.float32: 3e-5, torch.bfloat16: 1e-2}
gpu = pytest.mark.gpu
Tensors = list[torch.Tensor]


def _formula(sources: Tensors, w_n: torch.Tensor, w_q: torch.Tensor, w_o: torch.Tensor | None) -> torch.Tensor:
    x_nTD = torch.stack(sources)
    s_nT = torch.einsum("d,ntd->nt", w_n * w_q, x_nTD / (x_nTD.pow(2).mean(-1, keepdim=True) + EPS).sqrt())
    h_TD = torch.einsum("nt,ntd->td", s_nT.softmax(0), x_nTD)
    return h_TD if w_o is None else w_o * h_TD / (h_TD.pow(2).mean(-1, keepdim=True) + OUT_EPS).sqrt()


def _inputs(n: int, tokens: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensors, Tensors]:
    """([w_n, w_q, w_o, source 0, ...], slopes of the output and of each source). NaN lies around every source."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(DEVICE, dtype)

    weights = [1 + 0.3 * draw(width), draw(width) * width**-0.5, 1 + 0.3 * draw(width)]
    sources = []
    for i in range(n):
        around = torch.full((tokens + 2, width), torch.nan, device=DEVICE, dtype=dtype)
        around[1:-1] = (i + 1) * draw(tokens, width)
        sources.append(around[1:-1])
    return [*weights, *sources], [draw(tokens, width) for _ in range(n + 1)]


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def _check(n: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    """Output and every gradient, with later uses of all sources."""
    inputs, slopes = _inputs(n, tokens, width, dtype)
    ours = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    w_n, w_q, w_o, *sources = ours
    x, chained = kernels.mix_norm(sources, w_n, w_q, EPS, w_o, OUT_EPS)
    y = _formula(exact[3:], *exact[:3])
    assert x.dtype == dtype
    assert _error(x, y) < LIMITS[dtype] or tokens == 0
    got = torch.autograd.grad([x, *chained], ours, slopes)
    want = torch.autograd.grad([y, *exact[3:]], exact, [s.double() for s in slopes])
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        # One source has weight 1 whatever the query: the scores' gradients are roundings of zero.
        if tokens and not (n == 1 and i < 2):
            assert _error(a, b) < LIMITS[dtype], i
        assert a.isfinite().all()


@pytest.mark.parametrize(
    ("n", "tokens", "width"),
    [(1, 3, 16), (2, 33, 24), (3, 1, 33), (4, 5, 100), (5, 2, 7), (6, 2, 32), (7, 2, 40), (8, 2, 17), (9, 3, 300)],
)
def test_values_and_gradients(n: int, tokens: int, width: int) -> None:
    _check(n, tokens, width, torch.float32)


def test_bf16_and_no_tokens() -> None:
    _check(3, 4, 100, torch.bfloat16)
    _check(2, 0, 24, torch.float32)


def test_more_tokens_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    _check(2, 8, 16, torch.float32)


@gpu
def test_gpu_rounding_order_is_that_of_mix_and_rms_norm() -> None:
    """The interpreter truncates to bf16 instead of rounding."""
    (w_n, w_q, w_o, *sources), _ = _inputs(4, 6, 200, torch.bfloat16)
    ours, _ = kernels.mix_norm(sources, w_n, w_q, EPS, w_o, OUT_EPS)
    theirs, _ = reference.mix_norm(sources, w_n, w_q, EPS, w_o, OUT_EPS)
    # Only where fp32 sums in another order fall on the other side of a rounding boundary.
    assert (ours != theirs).double().mean() < 0.02
    assert _error(ours, theirs) < 1e-3


def test_mix_without_the_norm() -> None:
    inputs, (d, *_) = _inputs(3, 5, 40)
    ours = [x.requires_grad_() for x in (*inputs[:2], *inputs[3:])]
    exact = [x.detach().double().requires_grad_() for x in ours]
    h, y = kernels.mix(ours[2:], ours[0], ours[1], EPS), _formula(exact[2:], exact[0], exact[1], None)
    assert _error(h, y) < 3e-5
    for a, b in zip(torch.autograd.grad(h, ours, d), torch.autograd.grad(y, exact, d.double()), strict=True):
        assert _error(a, b) < 3e-5


def _chain(sources: Tensors, weights: Tensors, module: object, chained: bool) -> torch.Tensor:
    """Four mixers over one bank and a stream, as in a block of a model."""
    w_n, w_q, w_o = weights
    *bank, live = sources
    for _ in range(4):
        x, again = module.mix_norm([*bank, live], w_n, w_q, EPS, w_o, OUT_EPS)  # type: ignore[attr-defined]
        if chained:
            *bank, live = again
        live = live + x.tanh()
    return live


def test_a_chain_of_uses_adds_the_gradients_up() -> None:
    inputs, (d, *_) = _inputs(4, 5, 40)
    leaves = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = torch.autograd.grad(_chain(exact[3:], exact[:3], reference, False), exact, d.double())
    for chained in (True, False):
        got = torch.autograd.grad(_chain(leaves[3:], leaves[:3], kernels, chained), leaves, d)
        for a, b in zip(got, want, strict=True):
            assert _error(a, b) < 1e-4


def test_nothing_wide_is_kept_beside_the_sources() -> None:
    inputs, _ = _inputs(4, 6, 40)
    w_n, w_q, w_o, *sources = (x.requires_grad_() for x in inputs)
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _, again = kernels.mix_norm(sources, w_n, w_q, EPS, w_o, OUT_EPS)
        kernels.mix_norm(again, w_n, w_q, EPS, w_o, OUT_EPS)
    own = {t.data_ptr() for t in (w_n, w_q, w_o, *sources)}
    # Scores and inverse norms of each source, and of the mixture, in both calls.
    assert sum(t.numel() * t.element_size() for at, t in kept.items() if at not in own) == 2 * 6 * (2 * 4 + 1) * 4


def test_inside_a_checkpoint() -> None:
    inputs, (d, *_) = _inputs(3, 5, 40)
    leaves = [x.requires_grad_() for x in inputs]

    def block(*x: torch.Tensor) -> torch.Tensor:
        return _chain(list(x[3:]), list(x[:3]), kernels, True)

    plain = torch.autograd.grad(block(*leaves), leaves, d)
    again = torch.autograd.grad(torch.utils.checkpoint.checkpoint(block, *leaves, use_reentrant=False), leaves, d)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_only_what_is_asked_for_and_used() -> None:
    (w_n, w_q, w_o, *sources), (d, later, *_) = _inputs(3, 5, 40)
    sources[1].requires_grad_()
    x, again = kernels.mix_norm(sources, w_n, w_q, EPS, w_o, OUT_EPS)
    exact = [s.detach().double() for s in sources]
    exact[1].requires_grad_()
    y = _formula(exact, w_n.double(), w_q.double(), w_o.double())
    (alone,) = torch.autograd.grad(x, sources[1], d, retain_graph=True)
    (want,) = torch.autograd.grad(y, exact[1], d.double())
    assert _error(alone, want) < 3e-5
    # A source that is used later without the mixture, and one use among several.
    (passed,) = torch.autograd.grad(again[1], sources[1], later, retain_graph=True)
    assert torch.equal(passed, later)
    (both,) = torch.autograd.grad([x, again[1]], sources[1], [d, later])
    assert _error(both, want + later.double()) < 3e-5
    with torch.no_grad():
        assert torch.equal(kernels.mix_norm(sources, w_n, w_q, EPS, w_o, OUT_EPS)[0], x)


@pytest.mark.parametrize("n", [1, 4, 9])
def test_a_tokens_bits_depend_on_that_token_alone(n: int) -> None:
    (w_n, w_q, w_o, *sources), slopes = _inputs(n, 12, 40)
    d, *later = slopes

    def run(rows: slice) -> Tensors:
        part = [x[rows].clone().requires_grad_() for x in sources]
        x, again = kernels.mix_norm(part, w_n, w_q, EPS, w_o, OUT_EPS)
        return [x, *torch.autograd.grad([x, *again], part, [d[rows], *(e[rows] for e in later)])]

    full = run(slice(None))
    for rows in (slice(0, 1), slice(11, 12), slice(3, 9)):
        assert all(torch.equal(a, b[rows]) for a, b in zip(run(rows), full, strict=True))


@pytest.mark.parametrize(("n", "tokens", "mixers"), [(1, 3, 1), (3, 2, 3), (8, 2, 11), (2, 0, 2)])
def test_two_passes_without_gradients(n: int, tokens: int, mixers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, _, w_o, *sources), _ = _inputs(n + 1, tokens, 40)
    *bank, live = sources
    g = torch.Generator().manual_seed(1)
    w_n, w_q = ([torch.randn(40, generator=g).to(DEVICE) for _ in range(mixers)] for _ in range(2))
    results = []
    for few in (0, 264):
        monkeypatch.setattr(inference, "FEW_TOKENS", few)
        partials = inference.mix_completed(bank, w_n, w_q, EPS)
        assert len(partials) == mixers
        results.append(
            [inference.merge_norm(p, live, a, b, EPS, w_o, OUT_EPS) for p, a, b in zip(partials, w_n, w_q, strict=True)]
        )
    for few, many, a, b in zip(*results, w_n, w_q, strict=True):
        # However the mixers are grouped.
        assert torch.equal(few, many)
        want = _formula([s.double() for s in sources], a.double(), b.double(), w_o.double())
        assert tokens == 0 or _error(few, want) < 3e-5


@gpu
@pytest.mark.parametrize("n", range(1, 10))
def test_gpu_shipped_widths(n: int) -> None:
    _check(n, 300, 7168, torch.bfloat16)
    _check(n, 33, 2304, torch.bfloat16)


@gpu
def test_gpu_same_bits_again_and_replayed() -> None:
    inputs, slopes = _inputs(9, 700, 7168, torch.bfloat16)

    def run() -> Tensors:
        leaves = [x.clone().requires_grad_() for x in inputs]
        x, again = kernels.mix_norm(leaves[3:], *leaves[:2], EPS, leaves[2], OUT_EPS)
        return [x.detach(), *torch.autograd.grad([x, *again], leaves, slopes)]

    first = run()
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))
    w_n, w_q, w_o, *sources = inputs
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        x, _ = kernels.mix_norm(sources, w_n, w_q, EPS, w_o, OUT_EPS)
    graph.replay()
    assert torch.equal(x, first[0])


@gpu
@pytest.mark.parametrize("tokens", [1, 33, 300])
def test_gpu_two_passes(tokens: int) -> None:
    (_, _, w_o, *sources), _ = _inputs(9, tokens, 7168, torch.bfloat16)
    *bank, live = sources
    w_n = [torch.rand(7168, device=DEVICE).bfloat16() + 0.5 for _ in range(11)]
    w_q = [torch.randn(7168, device=DEVICE).bfloat16() * 0.01 for _ in range(11)]
    partials = inference.mix_completed(bank, w_n, w_q, EPS)
    for p, a, b in zip(partials, w_n, w_q, strict=True):
        x = inference.merge_norm(p, live, a, b, EPS, w_o, OUT_EPS)
        want = _formula([s.double() for s in sources], a.double(), b.double(), w_o.double())
        # One rounding more than in one pass.
        assert _error(x, want) < 1.2e-2


def test_the_device_decides() -> None:
    from perilune.ops.attnres import implementation

    x = torch.zeros(2, 8, device=DEVICE)
    assert implementation([x]) == ("triton" if CUDA else "reference")
    assert implementation([x.double()]) == "reference"
    assert implementation([x] * 10) == "reference"
