"""The experts' Triton kernels against float64 loops: products, the activation inside and between them, gradients.

In the interpreter tensors are float32 and a product's operands are not rounded: 1e-6 relative Frobenius checks the
mathematics (5e-6 where exp and tanh are in it). On a GPU everything is bfloat16: 4e-3 for a result that is rounded
once, 6e-3 where a rounded h lies between.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from triton_cpu import CUDA, DEVICE

from perilune.config import Activation
from perilune.ops.activation import glu
from perilune.ops.moe import triton_launch as kernels
from perilune.ops.moe.products import Weight
from perilune.ops.moe.triton_experts import many, product
from perilune.ops.moe.triton_launch import Tile
from perilune.ops.mx import decode_mxfp4, encode_mxfp4

SITU, SILU = Activation("situ"), Activation("silu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
ONCE, TWICE = (4e-3, 6e-3) if CUDA else (1e-6, 5e-6)
# Small tiles exist for the interpreter alone; with SWAP the weights are the left operand.
WIDE = Tile(128, 64, 64, 3, 4, copy=True) if CUDA else Tile(16, 32, 32, 2, 4, copy=True)
LOW = Tile(16, 64, 64, 3, 4, 2, swap=True) if CUDA else Tile(16, 32, 32, 2, 4, swap=True)
SIZES = (256, 320) if CUDA else (64, 96)
# Experts without rows first, in the middle and last; row tiles that end within an expert; one expert with everything.
ENDS = {"ragged": [0, 7, 7, 24, 40, 40], "one": [0, 0, 40, 40, 40, 40], "none": [0, 0, 0, 0, 0, 0]}
ROWS = 44


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def _poisoned(x: torch.Tensor, rows: int) -> torch.Tensor:
    x[rows:] = float("nan")
    return x


def _loop(x: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> torch.Tensor:
    return torch.cat([x[a:b].double() @ weight[e].double().t() for e, (a, b) in enumerate(pairwise([0, *ends]))])


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


@pytest.fixture(params=list(ENDS), ids=str)
def ends(request: pytest.FixtureRequest) -> list[int]:
    return ENDS[request.param]


@pytest.mark.parametrize("tile", [WIDE, LOW], ids=["wide", "low"])
def test_products_either_way(tile: Tile, ends: list[int]) -> None:
    (L, F), used, offs = SIZES, ends[-1], torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    x, d = _poisoned(_random(ROWS, L), used), _poisoned(_random(ROWS, F, seed=1), used)
    weight = _random(6, F, L, seed=2) / L**0.5
    y = kernels.product(x, weight, offs, False, tile)
    assert y.shape == (ROWS, F)
    assert _error(y[:used], _loop(x, weight, ends)) <= ONCE
    back = kernels.product(d, weight, offs, True, tile)
    assert _error(back[:used], _loop(d, weight.transpose(1, 2), ends)) <= ONCE


def test_bands_change_no_bit(ends: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert's row tiles in several bands, the last of one tile."""
    (L, F), used, offs = SIZES, ends[-1], torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    x, weight = _random(ROWS, L), _random(6, F, L, seed=2) / L**0.5
    whole = kernels.product(x, weight, offs, False, LOW)
    monkeypatch.setattr(kernels, "BAND", 2)
    assert torch.equal(kernels.product(x, weight, offs, False, LOW)[:used], whole[:used])


@pytest.mark.parametrize("tile", [WIDE, LOW], ids=["wide", "low"])
@pytest.mark.parametrize("act", [SITU, SILU], ids=["situ", "silu"])
@pytest.mark.parametrize("weighted", [True, False])
def test_product_with_the_activation_inside(tile: Tile, act: Activation, weighted: bool, ends: list[int]) -> None:
    (L, F), used, offs = SIZES, ends[-1], torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    x, gate_up = _poisoned(_random(ROWS, L), used), _random(6, 2 * F, L, seed=2) / L**0.5
    w = _poisoned(_random(ROWS, seed=3).float(), used) if weighted else None
    h = _loop(x, gate_up, ends)
    want = glu(h[:, :F].contiguous(), h[:, F:].contiguous(), act) * (1 if w is None else w[:used, None].double())
    bits = []
    for keep in (True, False):
        a, kept = kernels.glu_product(x, gate_up, offs, act, w, keep, tile)
        assert _error(a[:used], want) <= TWICE
        assert (kept is None) == (not keep)
        if kept is not None:
            assert _error(kept[:used], h) <= ONCE
        bits.append(a[:used])
    assert torch.equal(*bits)


@pytest.mark.parametrize("act", [SITU, SILU], ids=["situ", "silu"])
@pytest.mark.parametrize("weighted", [True, False])
def test_activation_and_its_gradients(act: Activation, weighted: bool) -> None:
    width, rows, used = 80, 9, 7
    offs = torch.tensor([3, 3, used], dtype=torch.int32, device=DEVICE)
    # Small values too, where 1 - 2 / (1 + e^2x) alone would lose its digits.
    scale = torch.logspace(-4, 1.3, rows, device=DEVICE)[:, None]
    h = _poisoned((_random(rows, 2 * width) * scale).to(DTYPE), used)
    u = _poisoned(_random(rows, width, seed=1), used)
    w = _poisoned(_random(rows, seed=2).float(), used) if weighted else None
    leaves = [t[:used].double().requires_grad_() for t in (h, torch.ones(rows, device=DEVICE) if w is None else w)]
    want = glu(leaves[0][:, :width].contiguous(), leaves[0][:, width:].contiguous(), act) * leaves[1][:, None]
    d_h, d_w = torch.autograd.grad(want, leaves, u[:used].double())
    a = kernels.glu_forward(h, offs, act, w)
    got_h, got_a, got_w = kernels.glu_backward(u, h, offs, act, w, need_a=True)
    for row in range(used):
        assert _error(a[row], want[row].detach()) <= ONCE
        assert _error(got_h[row], d_h[row]) <= ONCE
    assert got_a is not None
    assert torch.equal(got_a[:used], a[:used])
    assert kernels.glu_backward(u, h, offs, act, w, need_a=False)[1] is None
    if w is None:
        assert got_w is None
    else:
        torch.testing.assert_close(got_w[:used].double(), d_w, rtol=1e-4, atol=1e-5)
        assert torch.equal(got_w[used:], torch.zeros_like(got_w[used:]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.parametrize("act", [SITU, SILU], ids=["situ", "silu"])
def test_the_activation_hides_no_nan_and_survives_infinities(act: Activation) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 100.0, -100.0, 0.5], device=DEVICE)
    gate, up = (t.flatten() for t in torch.meshgrid(odd, odd, indexing="ij"))
    h = torch.cat([gate, up])[None].to(DTYPE)
    offs = torch.ones(1, dtype=torch.int32, device=DEVICE)
    a = kernels.glu_forward(h, offs, act, None)[0].float()
    want = glu(h[:, :64].double(), h[:, 64:].double(), act)[0]
    d_h, again, _ = kernels.glu_backward(torch.ones_like(h[:, :64]), h, offs, act, None, need_a=True)
    assert again is not None
    nan = gate.isnan() | up.isnan()
    assert a[nan].isnan().all()
    assert again[0][nan].isnan().all()
    assert d_h[0, :64][nan].isnan().all()
    if act.kind == "situ":
        # It saturates: infinities are ordinary arguments. exp(-60) instead of exp(-100) is the largest difference.
        torch.testing.assert_close(a[~nan].double(), want[~nan], rtol=1e-2 if CUDA else 1e-5, atol=1e-22)
        assert d_h[0].view(2, 64)[:, ~nan].isfinite().all()


def test_weight_gradient(ends: list[int]) -> None:
    (L, F), used, offs = SIZES, ends[-1], torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    x, d = _poisoned(_random(ROWS, L), used), _poisoned(_random(ROWS, F, seed=1), used)
    tile = Tile(128, 128, 64, 3, 8) if CUDA else Tile(32, 64, 16, 2, 4)
    dw = kernels.weight_gradient(d, x, offs, tile)
    want = torch.stack([d[a:b].double().t() @ x[a:b].double() for a, b in pairwise([0, *ends])])
    assert _error(dw, want) <= ONCE
    empty = [e for e, (a, b) in enumerate(pairwise([0, *ends])) if a == b]
    assert torch.equal(dw[empty], torch.zeros_like(dw[empty]))
    full = [e for e in range(len(ends)) if e not in empty]
    assert torch.equal(kernels.weight_gradient(d, x, offs, tile, skip_empty=True)[full], dw[full])
    out = torch.full_like(dw, float("nan"))
    assert kernels.weight_gradient(d, x, offs, tile, skip_empty=True, out_EGK=out) is out
    assert torch.equal(out[full], dw[full])
    assert out[empty].isnan().all()


def test_no_rows() -> None:
    offs = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    x, weight = _random(0, SIZES[0]), _random(6, 2 * SIZES[1], SIZES[0])
    assert kernels.product(x, weight, offs, False, WIDE).shape == (0, 2 * SIZES[1])
    a, h = kernels.glu_product(x, weight, offs, SITU, None, True, WIDE)
    assert h is not None
    assert (a.shape, h.shape) == ((0, SIZES[1]), (0, 2 * SIZES[1]))
    dw = kernels.weight_gradient(h, x, offs, WIDE)
    assert torch.equal(dw, torch.zeros_like(weight))


@pytest.mark.parametrize("used", [0, 5, 44])
def test_the_tail_is_zeroed_and_nothing_else(used: int) -> None:
    offs = torch.tensor([0, used, used], dtype=torch.int32, device=DEVICE)
    x = _random(ROWS, 72)
    want = x.clone()
    want[used:] = 0
    x[used:] = float("nan")
    assert torch.equal(kernels.zero_tail(x, offs), want)


@pytest.mark.parametrize("act", [SITU, SILU], ids=["situ", "silu"])
def test_products_through_packed_weights(act: Activation, ends: list[int]) -> None:
    (L, F), used, offs = (128, 192), ends[-1], torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    tile = Tile(16, 64, 64, 3, 4, 4, swap=True) if CUDA else Tile(16, 32, 32, 2, 4, swap=True)
    x, w = _poisoned(_random(ROWS, L), used), _poisoned(_random(ROWS, seed=3).float(), used)
    codes, scales = encode_mxfp4(_random(6, 2 * F, L, seed=2).float() / L**0.5)
    weight = decode_mxfp4(codes, scales, torch.float64)
    h = _loop(x, weight, ends)
    y = kernels.packed_product(x, codes, scales, offs, tile)
    assert _error(y[:used], h) <= ONCE
    a = kernels.packed_glu_product(x, codes, scales, offs, act, w, tile)
    want = glu(h[:, :F].contiguous(), h[:, F:].contiguous(), act) * w[:used, None].double()
    assert _error(a[:used], want) <= TWICE


@pytest.mark.parametrize("turned", [False, True])
def test_many_rows_meet_weights_that_are_decoded_first(turned: bool) -> None:
    ends, (L, G) = [0, 70, 132], (64, 128)
    offs = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    x = _random(132, G if turned else L)
    codes, scales = encode_mxfp4(_random(3, G, L, seed=2).float() / L**0.5)
    assert many(x.shape[0], len(ends) - 1) or turned
    y = product(x, Weight(codes, scales, turned), offs)
    dense = decode_mxfp4(codes, scales, torch.float64)
    assert _error(y, _loop(x, dense.transpose(1, 2) if turned else dense, ends)) <= ONCE


def test_every_code_and_scale_is_decoded_exactly() -> None:
    """Rows that are unit vectors read the weights out; the reference decodes them."""
    K = 128
    codes = torch.arange(64 * K // 2, device=DEVICE).remainder(256).to(torch.uint8).view(1, 64, K // 2)
    # Every scale whose weights are normal numbers, and NaN; the smallest ones come out as zero where bf16 has no more.
    scales = (torch.arange(64 * K // 32, device=DEVICE) + 2).clamp(max=252).to(torch.uint8).view(1, 64, K // 32)
    scales[0, -1, -1] = 255
    tile = Tile(16, 64, 64, 2, 4, swap=True) if CUDA else Tile(16, 32, 32, 2, 4, swap=True)
    unit, offs = torch.eye(K, device=DEVICE, dtype=DTYPE), torch.tensor([K], dtype=torch.int32, device=DEVICE)
    want = decode_mxfp4(codes, scales, torch.float32)[0].t()
    # A NaN weight reaches every row through 0 * NaN: that column is all NaN.
    got = kernels.packed_product(unit, codes, scales, offs, tile).float()
    assert got[:, -1].isnan().all()
    assert torch.equal(got[:, :-1], want[:, :-1].to(DTYPE).float())
