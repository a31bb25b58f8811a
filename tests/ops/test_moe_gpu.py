"""The experts on a GPU as they are shipped, forward and every gradient, against float64 loops.

bfloat16; relative Frobenius. Rounded to 8 bits are h, a, u, d_h and the result: 2e-2 bounds every chain of them.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from perilune.config import Activation
from perilune.ops import moe
from perilune.ops.activation import glu
from perilune.ops.moe import Dense, Packed, packed_cuda
from perilune.ops.mx import decode_mxfp4, encode_mxfp4

pytestmark = pytest.mark.gpu
SITU, SILU = Activation("situ"), Activation("silu")
TOLERANCE = 2e-2


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def _offs(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)


def _loop(rows: torch.Tensor, w: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ends: list[int], act):
    parts, F = [], down.shape[-1]
    for e, (a, b) in enumerate(pairwise([0, *ends])):
        h = rows[a:b] @ gate_up[e].t()
        parts.append(w[a:b, None] * (glu(h[:, :F].contiguous(), h[:, F:].contiguous(), act) @ down[e].t()))
    return torch.cat([*parts, torch.zeros_like(rows[ends[-1] :])])


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.double() - want).norm() / want.norm().clamp(min=1e-30)).detach())


MANY = [0, 700, 1, 128, 129, 0, 517, 0]
CASES = {
    # name: (latent, width, rows of each expert, rows past them, which code must run)
    "many rows": (256, 384, MANY, 77, "triton"),
    "many rows, odd tiles": (320, 192, MANY, 1, "triton"),
    "one expert has all": (256, 384, [0, 0, 1500, 0], 0, "triton"),
    "few rows": (256, 384, [0, 3, 1, 0, 17, 2, 0, 1], 5, "triton"),
    "few rows, odd tiles": (320, 192, [1, 1, 80, 0], 0, "triton"),
    "no rows": (256, 384, [0, 0, 0], 9, "triton"),
    "K3 widths": (3584, 3072, [300, 0, 129, 1], 2, "triton"),
    "K3 widths, very few rows": (3584, 3072, [3, 0, 1, 1, 0, 0, 2, 0], 0, "triton"),
    "K3 widths, few rows": (3584, 3072, [30, 0, 50, 1], 2, "triton"),
    "widths that are no multiple of 64": (72, 40, MANY, 3, "reference"),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("act", [SITU, SILU], ids=["situ", "silu"])
@pytest.mark.parametrize("weighted", [True, False])
def test_output_and_every_gradient(case: str, act: Activation, weighted: bool) -> None:
    L, F, counts, tail, code = CASES[case]
    offs, R = _offs(counts), sum(counts) + tail
    ends, used = offs.tolist(), sum(counts)
    plain = [
        _random(R, L),
        torch.rand(R, device="cuda") + 0.1 if weighted else torch.ones(R, device="cuda"),
        _random(len(counts), 2 * F, L, seed=1) / L**0.5,
        _random(len(counts), L, F, seed=2) / F**0.5,
    ]
    mine = [t.clone().requires_grad_() for t in plain]
    theirs = [t.double().requires_grad_() for t in plain]
    with torch.no_grad():
        mine[0][used:] = mine[1][used:] = float("nan")
    d = _random(R, L, seed=3)
    d_mine = d.clone()
    d_mine[used:] = float("nan")
    assert moe.implementation(mine[0], Dense(mine[2], mine[3])) == code
    results = []
    for save in ("inputs", "all"):
        w = mine[1] if weighted else None
        out = moe.experts(mine[0], Dense(mine[2], mine[3]), offs, act, row_weights_R=w, save=save)
        leaves = [mine[0], *([mine[1]] if weighted else []), *mine[2:]]
        results.append([out, *torch.autograd.grad(out, leaves, d_mine)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    expected = _loop(*theirs, ends, act)
    wanted = [theirs[0], *([theirs[1]] if weighted else []), *theirs[2:]]
    if not used:
        assert all(torch.equal(t, torch.zeros_like(t)) for t in results[0])
        return
    want = [expected, *torch.autograd.grad(expected, wanted, d.double())]
    for a, b in zip(results[0], want, strict=True):
        assert _error(a, b) <= TOLERANCE
    for a in results[0][: 3 if weighted else 2]:
        assert torch.equal(a[used:], torch.zeros_like(a[used:]))
    for d_weight in results[0][-2:]:
        empty = [e for e, count in enumerate(counts) if not count]
        assert torch.equal(d_weight[empty], torch.zeros_like(d_weight[empty]))


@pytest.mark.parametrize("case", ["many rows", "few rows"])
def test_bits_repeat_and_the_buffers_may_hold_anything(case: str) -> None:
    L, F, counts, tail, _ = CASES[case]
    offs, R = _offs(counts), sum(counts) + tail
    leaves = [
        _random(R, L),
        _random(len(counts), 2 * F, L, seed=1) / L**0.5,
        _random(len(counts), L, F, seed=2) / F**0.5,
    ]
    leaves = [t.requires_grad_() for t in leaves]
    runs = []
    for _ in range(3):
        # Freed NaN buffers of the sizes in play: what is not written would pick one up.
        del [torch.full((R, n), float("nan"), dtype=torch.bfloat16, device="cuda") for n in (L, F, 2 * F)][:]
        out = moe.experts(leaves[0], Dense(*leaves[1:]), offs, SITU)
        runs.append([out, *torch.autograd.grad(out.float().pow(2).sum(), leaves)])
    for run in runs:
        assert all(t.isfinite().all() for t in run)
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("case", ["many rows", "few rows"])
def test_a_row_does_not_see_the_others(case: str) -> None:
    """Bitwise-batch among calls that run the same tiles: rows of one expert, moved to another place in its tile."""
    L, F, counts, _, code = CASES[case]
    weights = Dense(_random(len(counts), 2 * F, L, seed=1) / L**0.5, _random(len(counts), L, F, seed=2) / F**0.5)
    x = _random(sum(counts), L)
    full = moe.experts(x, weights, _offs(counts), SITU)
    expert = max(range(len(counts)), key=counts.__getitem__)
    start = sum(counts[:expert])
    keep = counts[expert] - 5
    moved = [0] * len(counts)
    moved[expert] = keep
    rows = x[start + 5 : start + 5 + keep]
    assert moe.implementation(rows, weights) == code
    assert torch.equal(moe.experts(rows, weights, _offs(moved), SITU), full[start + 5 : start + 5 + keep])


def test_nothing_is_read_back() -> None:
    L, F, counts, tail, _ = CASES["many rows"]
    leaves = [
        _random(sum(counts) + tail, L).requires_grad_(),
        torch.rand(sum(counts) + tail, device="cuda").requires_grad_(),
        (_random(len(counts), 2 * F, L, seed=1) / L**0.5).requires_grad_(),
        (_random(len(counts), L, F, seed=2) / F**0.5).requires_grad_(),
    ]
    logits, bias, offs = (
        torch.randn(200, 8, device="cuda").requires_grad_(),
        torch.zeros(8, device="cuda"),
        _offs(counts),
    )

    def step() -> None:
        out = moe.experts(leaves[0], Dense(*leaves[2:]), offs, SITU, row_weights_R=leaves[1])
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        routing = moe.route(logits, bias, 2, 1.0)
        order, _ = moe.permute(routing.ids_TJ, 8)
        rows = moe.dispatch(leaves[0][:200], order, 2)
        y = moe.combine(rows, order, routing.weights_TJ)
        torch.autograd.grad(y, (logits, leaves[0]), torch.ones_like(y))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_empty_experts_may_be_skipped() -> None:
    L, F, counts, tail, _ = CASES["many rows"]
    x, d, offs = _random(sum(counts) + tail, L), _random(sum(counts) + tail, L, seed=3), _offs(counts)
    weights = Dense(_random(len(counts), 2 * F, L, seed=1) / L**0.5, _random(len(counts), L, F, seed=2) / F**0.5)
    all_ = moe.experts_backward(d, x, weights, offs, SITU)
    some = moe.experts_backward(d, x, weights, offs, SITU, skip_empty=True)
    assert torch.equal(all_[0], some[0])
    full = [e for e, count in enumerate(counts) if count]
    for a, b in zip(all_[2:], some[2:], strict=True):
        assert a is not None
        assert b is not None
        assert _error(b[full], a[full].double()) <= 4e-3


@pytest.mark.parametrize("case", ["few rows", "K3 widths, few rows", "K3 widths, very few rows", "many rows"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("cuda", [True, False], ids=["cuda", "triton"])
def test_packed_weights(case: str, weighted: bool, cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not cuda:
        monkeypatch.setattr(packed_cuda, "why_not", lambda *_: "not wanted")
    L, F, counts, tail, _ = CASES[case]
    offs, R, used = _offs(counts), sum(counts) + tail, sum(counts)
    x, d = _random(R, L).requires_grad_(), _random(R, L, seed=3)
    w = torch.rand(R, device="cuda").requires_grad_() if weighted else None
    gate_up, down = _random(len(counts), 2 * F, L, seed=1) / L**0.5, _random(len(counts), L, F, seed=2) / F**0.5
    packed = Packed(*encode_mxfp4(gate_up), *encode_mxfp4(down))
    assert moe.implementation(x, packed) == "triton"
    out = moe.experts(x, packed, offs, SITU, row_weights_R=w)
    leaves = [x, *([w] if weighted else [])]
    got = [out, *torch.autograd.grad(out, leaves, d)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    weights = [
        decode_mxfp4(packed.gate_up_codes, packed.gate_up_scales, torch.float64),
        decode_mxfp4(packed.down_codes, packed.down_scales, torch.float64),
    ]
    ones = torch.ones(R, device="cuda", dtype=torch.float64)
    expected = _loop(wide[0], wide[1] if weighted else ones, *weights, offs.tolist(), SITU)
    want = [expected, *torch.autograd.grad(expected, wide, d.double())]
    for a, b in zip(got, want, strict=True):
        assert _error(a[:used], b[:used]) <= TOLERANCE
        assert torch.equal(a[used:], torch.zeros_like(a[used:]))


@pytest.mark.parametrize("rows", [3, 11, 40, 150, 300])
def test_packed_products_are_exact_up_to_the_order_of_sums(rows: int) -> None:
    """Against float64 sums of the same exact products: half an ulp of the result, and fp32's share of K additions."""
    L, G, E = 3584, 512, 3
    counts = [rows, 0, rows]
    x, offs = _random(2 * rows, L), _offs(counts)
    codes, scales = encode_mxfp4(_random(E, G, L, seed=1) * 2.0 ** torch.randint(-9, 6, (E, G, 1), device="cuda"))
    packed = Packed(codes, scales, codes.new_empty(E, L, G // 4), scales.new_empty(E, L, G // 64))
    got = moe.gate_up_product(x, packed, offs).double()
    w = decode_mxfp4(codes, scales, torch.float64)
    parts = [(x[:rows], w[0]), (x[rows:], w[2])]
    want = torch.cat([a.double() @ b.t() for a, b in parts])
    size = torch.cat([a.double().abs() @ b.abs().t() for a, b in parts])
    assert bool(((got - want).abs() <= 2.0**-8 * want.abs() + 2.0**-20 * size).all())


@pytest.mark.parametrize("rows", [8, 16, 48])
@pytest.mark.parametrize("byte", [0, 1, 2, 100, 127, 128, 129, 200])
def test_packed_products_take_every_code_of_every_scale(rows: int, byte: int) -> None:
    """One weight a row, times one: the sum is the decoded weight."""
    codes = torch.zeros(1, 256, 64, dtype=torch.uint8, device="cuda")
    scales = torch.full((1, 256, 4), 127, dtype=torch.uint8, device="cuda")
    x = torch.zeros(rows, 128, dtype=torch.bfloat16, device="cuda")
    for r in range(rows):
        at = (7 * r + byte) % 128
        codes[0, r, at // 2], scales[0, r, at // 32] = r % 16 << 4 * (at % 2), byte
        x[r, at] = 1
    packed = Packed(codes, scales, codes.new_empty(1, 128, 64), scales.new_empty(1, 128, 4))
    got = moe.gate_up_product(x, packed, torch.tensor([rows], dtype=torch.int32, device="cuda"))
    want = (x.double() @ decode_mxfp4(codes, scales, torch.float64)[0].t()).bfloat16()
    assert torch.equal(got, want)


@pytest.mark.parametrize("case", ["many rows", "few rows"])
def test_results_may_be_written_over_the_inputs(case: str) -> None:
    L, F, counts, tail, _ = CASES[case]
    offs, used = _offs(counts), sum(counts)
    x, d = _random(used + tail, L), _random(used + tail, L, seed=3)
    dense = Dense(_random(len(counts), 2 * F, L, seed=1) / L**0.5, _random(len(counts), L, F, seed=2) / F**0.5)
    buffer = x.clone()
    moe.experts(buffer, dense, offs, SITU, clean=False, out_RL=buffer)
    assert torch.equal(buffer[:used], moe.experts(x, dense, offs, SITU)[:used])
    assert torch.equal(buffer[used:], x[used:])
    back = moe.experts_backward(d, x, dense, offs, SITU)
    for over in (0, 1):
        inputs = [d.clone(), x.clone()]
        again = moe.experts_backward(*inputs, dense, offs, SITU, clean=False, out_RL=inputs[over])
        assert torch.equal(again[0][:used], back[0][:used])
        assert all(torch.equal(a, b) for a, b in zip(again[2:], back[2:], strict=True))
