"""latent.cu on a CPU, thread by thread, against a plain float64 softmax; everything that must not be read is NaN.

Weights and outputs are rounded to bf16 (2^-9 each): 6e-3; the log-sum-exp comes from fp32 sums of exact products: 3e-5,
more where the logits are larger.
"""

from __future__ import annotations

import pytest
import torch
from hopper_on_cpu import hopper_on_cpu  # noqa: F401
from test_mla_paged import Pool, make

from perilune.ops.mla import paged_cuda
from perilune.ops.mla import paged_reference as spec

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SCALE = 576**-0.5
pytestmark = pytest.mark.usefixtures("hopper_on_cpu")


def run(pool: Pool, q: torch.Tensor, drafts: int, split: int, row_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """split_parts, and the merge of its parts in plain torch."""
    count, heads = len(pool.lengths), q.shape[1]
    splits = max(1, -(-pool.table.shape[1] * pool.pages.shape[1] // split))
    o, lse = torch.full((len(q), heads, 512), torch.nan, dtype=BF16), torch.full((len(q), heads), torch.nan)
    part = torch.full((count, splits, drafts * heads, 512), torch.nan)
    part_lse = torch.full(part.shape[:3], torch.nan)
    out = o, lse, part, part_lse
    paged_cuda.split_parts(q, pool.pages, pool.table, pool.lengths, SCALE, drafts, row_scale, split, out)
    for n, length in enumerate(pool.lengths.tolist()):
        if length > split:
            used, rows = -(-length // split), slice(n * drafts, (n + 1) * drafts)
            total = part_lse[n, :used].logsumexp(0)
            share = (part_lse[n, :used] - total).exp().nan_to_num(0.0)
            lse[rows] = total.view(drafts, heads)
            o[rows] = ((part[n, :used] * share[..., None]).sum(0) * row_scale).view(drafts, heads, 512).to(BF16)
    return o, lse


def check(
    lengths: list[int], dtype: torch.dtype, heads: int, drafts: int, split: int, tokens: int = 64, spread: float = 1.0
) -> None:
    row_scale = 0.5 if dtype == FP8 else 1.0
    pool = make(lengths, dtype, row_scale, 576, tokens)
    g = torch.Generator().manual_seed(3)
    q = (spread * torch.randn(len(lengths) * drafts, heads, 576, generator=g)).to(BF16)
    o, lse = run(pool, q, drafts, split, row_scale)
    pages = pool.pages.float().double()
    expected = spec.paged_attention(q.double(), pages, pool.table, pool.lengths, SCALE, drafts, 512, row_scale)
    seen = expected[1] > float("-inf")
    assert torch.equal(seen, lse > float("-inf"))
    assert (o.double() - expected[0]).norm() < 6e-3 * expected[0].norm()
    assert (lse - expected[1])[seen].abs().max() < 3e-5 * max(1.0, spread / 5)
    assert o[~seen].count_nonzero() == 0


@pytest.mark.parametrize(
    ("heads", "drafts", "dtype"),
    [
        (1, 1, BF16),  # a block of 16 rows
        (9, 5, BF16),  # a block of 48
        (96, 1, BF16),  # a cluster of two
        (10, 15, BF16),  # two clusters
        (12, 2, FP8),
        (96, 1, FP8),
    ],
    ids=str,
)
def test_latent(heads: int, drafts: int, dtype: torch.dtype) -> None:
    check([290, 1, 0, 64, 7], dtype, heads, drafts, 192, tokens=128)


@pytest.mark.parametrize(("heads", "dtype"), [(20, BF16), (96, BF16), (20, FP8)], ids=str)
@pytest.mark.parametrize("spread", [1.0, 5.0, 30.0])
def test_rings_go_round_and_references_rise(heads: int, dtype: torch.dtype, spread: float) -> None:
    check([900, 65], dtype, heads, 1, 1024, spread=spread)


def test_a_later_score_far_above_all_earlier_ones() -> None:
    """Every tile's scores lie 40 (base 2) above those of the tile before it: each raises the reference."""
    pool = make([256], BF16, 1.0, 576, 64)
    q = torch.zeros(1, 16, 576, dtype=BF16)
    q[..., 575] = 1 / SCALE
    flat = pool.pages.view(-1, 576)
    for m, page in enumerate(pool.table[0, :4].tolist()):
        flat[page * 64 : page * 64 + 64, 575] = 28.0 * m
    o, lse = run(pool, q, 1, 256, 1.0)
    expected = spec.paged_attention(
        q.double(), pool.pages.float().double(), pool.table, pool.lengths, SCALE, 1, 512, 1.0
    )
    assert (o.double() - expected[0]).norm() < 6e-3 * expected[0].norm()
    assert (lse - expected[1]).abs().max() < 1e-4


def test_bits_do_not_depend_on_the_order_of_events_or_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make([200, 70], BF16, 1.0, 576, 64)
    q = torch.randn(4, 30, 576, generator=torch.Generator().manual_seed(0)).to(BF16)
    first = run(pool, q, 2, 128, 1.0)
    launch = paged_cuda._launch
    monkeypatch.setattr(paged_cuda, "_launch", lambda *given: launch(*given, seed=7))
    assert all(torch.equal(a, b) for a, b in zip(first, run(pool, q, 2, 128, 1.0), strict=True))
    alone = run(Pool(pool.pages, pool.table[1:], pool.lengths[1:], []), q[2:], 2, 128, 1.0)
    assert all(torch.equal(a[2:], b) for a, b in zip(first, alone, strict=True))


def test_fp8_numbers_are_widened_exactly() -> None:
    """A row with every finite number of e4m3: with a single key the output is the row. A NaN makes the sequence NaN."""
    pool = make([1, 1], FP8, 1.0, 576, 64)
    bits = torch.arange(576) % 256
    bits[bits % 128 == 127] = 0
    rows = pool.pages.view(torch.uint8).view(-1, 576)
    rows[pool.table[0, 0] * 64] = bits.to(torch.uint8)
    rows[pool.table[1, 0] * 64, 300] = 255
    o, _ = run(pool, torch.randn(2, 5, 576, generator=torch.Generator().manual_seed(0)).to(BF16), 1, 64, 1.0)
    assert torch.equal(o[0].float(), bits[:512].to(torch.uint8).view(FP8).float().expand(5, 512))
    assert o[1].isnan().all()
