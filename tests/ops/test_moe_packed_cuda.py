"""packed_few.cu and packed_many.cu on the CPU, against float64.

A product of decoded weights and bf16 rows is exact in fp32 but for the order of its sums, and rounded once: half an
ulp of bf16, and what fp32 sums of K numbers lose. On a GPU the same launches run in test_moe_gpu.py.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from packed_on_cpu import packed_on_cpu

from perilune.config import Activation
from perilune.ops.activation import glu
from perilune.ops.moe import packed_cuda
from perilune.ops.mx import decode_mxfp4, encode_mxfp4

__all__ = ["packed_on_cpu"]
pytestmark = pytest.mark.usefixtures("packed_on_cpu")
SITU, SILU = Activation("situ"), Activation("silu")


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _weights(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of random weights, with rows on both sides of a scale of 2 and with a zero block."""
    w = _draw(*shape, seed=1).float() / shape[-1] ** 0.5
    w[:, 1::16] *= 2.0**7
    w[:, 0, :32] = 0
    return encode_mxfp4(w)


def _poisoned(counts: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, one NaN row behind them, and their ends."""
    x = _draw(sum(counts) + 1, width)
    x[-1] = float("nan")
    return x, torch.tensor(counts).cumsum(0).to(torch.int32)


def _loop(x: torch.Tensor, w_EGK: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    ends = [0, *offs.tolist()]
    return torch.cat([x[a:b].double() @ w_EGK[e].double().t() for e, (a, b) in enumerate(pairwise(ends))])


COUNTS = {"few": [0, 2, 1, 0, 9, 0], "more": [0, 17, 0, 5, 16, 30], "one": [3], "none": [0, 0]}


@pytest.mark.parametrize("counts", list(COUNTS))
@pytest.mark.parametrize(("width", "outputs"), [(128, 32), (384, 16)])
def test_product(counts: str, width: int, outputs: int) -> None:
    (x, offs), (codes, scales) = _poisoned(COUNTS[counts], width), _weights(len(COUNTS[counts]), outputs, width)
    used = int(offs[-1])
    assert packed_cuda.few(len(x), len(offs))
    out = torch.full((len(x), outputs), -7.0, dtype=torch.bfloat16)
    assert packed_cuda.product(x, codes, scales, offs, out) is out
    want = _loop(x, decode_mxfp4(codes, scales, torch.float64), offs)
    torch.testing.assert_close(out[:used].double(), want, rtol=2**-8, atol=1e-5)
    assert (out[used:] == -7).all()


@pytest.mark.parametrize("activation", [SITU, SILU], ids=["situ", "silu"])
@pytest.mark.parametrize("weighted", [True, False])
def test_gated_product(activation: Activation, weighted: bool) -> None:
    counts, width, F = COUNTS["few"], 256, 24
    (x, offs), (codes, scales) = _poisoned(counts, width), _weights(len(counts), 2 * F, width)
    used = int(offs[-1])
    w = torch.rand(len(x), generator=torch.Generator().manual_seed(2)) if weighted else None
    a = packed_cuda.glu_product(x, codes, scales, offs, activation, w)
    h = _loop(x, decode_mxfp4(codes, scales, torch.float64), offs).bfloat16().double()
    want = glu(h[:, :F].contiguous(), h[:, F:].contiguous(), activation)
    if w is not None:
        want = want * w[:used, None]
    # h may be rounded to the other neighbour where a sum lies half-way: an ulp of h, times a slope of up to 1.1 each.
    torch.testing.assert_close(a[:used].double(), want, rtol=4 * 2**-8, atol=1e-4)


@pytest.mark.parametrize("few_rows", [16, 1], ids=["few", "many"])
@pytest.mark.parametrize("byte", [0, 1, 120, 127, 128, 129, 200])
def test_every_code_of_every_scale(byte: int, few_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight a row, times one: the sum is the decoded weight."""
    monkeypatch.setattr(packed_cuda, "FEW_ROWS", few_rows)
    codes = torch.zeros(1, 128, 64, dtype=torch.uint8)
    scales = torch.full((1, 128, 4), 127, dtype=torch.uint8)
    x = torch.zeros(16, 128, dtype=torch.bfloat16)
    for r in range(16):
        at = (7 * r + byte) % 128
        codes[0, r, at // 2], scales[0, r, at // 32] = r << 4 * (at % 2), byte
        x[r, at] = 1
    y = packed_cuda.product(x, codes, scales, torch.tensor([16], dtype=torch.int32), None)
    w = decode_mxfp4(codes, scales, torch.bfloat16)[0]
    assert torch.equal(y, (x.double() @ w.double().t()).bfloat16())
    assert torch.equal(y.diagonal(), w[torch.arange(16), (7 * torch.arange(16) + byte) % 128])


@pytest.mark.parametrize("rows", [2, 20])
def test_a_broken_block_shows(rows: int) -> None:
    codes, scales = _weights(1, 128, 128)
    scales[0, 3, 2] = 255
    y = packed_cuda.product(_draw(rows, 128), codes, scales, torch.tensor([rows], dtype=torch.int32), None)
    assert y[:, 3].isnan().all()
    assert y.isfinite().sum() == rows * 127


def test_a_rows_bits_depend_on_that_row_alone() -> None:
    (x, offs), (codes, scales) = _poisoned([0, 7, 5], 384), _weights(3, 32, 384)
    full = packed_cuda.product(x, codes, scales, offs, None)
    alone = packed_cuda.product(x[8:9].contiguous(), codes, scales, torch.tensor([0, 0, 1], dtype=torch.int32), None)
    assert torch.equal(alone[0], full[8])


@pytest.mark.parametrize("height", packed_cuda.HEIGHTS)
def test_many_rows(height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cuda, "tile_height", lambda rows: height)
    counts, width, outputs = [0, 70, 3, 0, 9], 384, 256
    (x, offs), (codes, scales) = _poisoned(counts, width), _weights(len(counts), outputs, width)
    used = int(offs[-1])
    assert not packed_cuda.few(len(x), len(offs))
    out = torch.full((len(x), outputs), -7.0, dtype=torch.bfloat16)
    assert packed_cuda.product(x, codes, scales, offs, out) is out
    want = _loop(x, decode_mxfp4(codes, scales, torch.float64), offs)
    torch.testing.assert_close(out[:used].double(), want, rtol=2**-8, atol=1e-5)
    assert (out[used:] == -7).all()


def test_tiles_are_high_where_experts_have_many_rows() -> None:
    assert [packed_cuda.tile_height(rows) for rows in (0, 13, 60, 100, 146, 1170)] == [64, 64, 64, 128, 160, 240]


def test_the_ring_fits_into_shared_memory() -> None:
    for width in range(128, packed_cuda.MAX_WIDTH + 1, 128):
        for high in (8, 16):
            assert packed_cuda.stages(width, high, packed_cuda.MAX_EXPERTS) >= 2


def test_why_not_says_what_is_missing() -> None:
    x, (codes, _) = _draw(2, 128), _weights(1, 16, 128)
    assert packed_cuda.why_not(x, codes, 1) == "cpu is not a Hopper GPU"
