"""Paged latent rows against a plain float64 softmax over each sequence's own rows, and a prefix in pieces.

Everything that must not be read is NaN: unused pages, the places of a page past the length, skipped rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from perilune import Error, Sequences
from perilune.ops.mla import (
    append_rows_inplace,
    attention,
    choose_split,
    gather_rows,
    merge,
    paged_attention,
    prefix_attention,
)
from perilune.ops.mla.paged_cuda import Shape

H, RANK, L, S = 3, 16, 24, 8
SCALE = 0.31
NAN = float("nan")
FP8 = torch.float8_e4m3fn


@dataclass
class Pool:
    """Pages with rows of some lengths in scattered order, all else NaN; `rows` are the stored values in float64."""

    pages: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    rows: list[torch.Tensor]


def make(
    lengths: list[int],
    dtype: torch.dtype = torch.float64,
    row_scale: float = 1.0,
    width: int = L,
    tokens: int = S,
    device: str = "cpu",
    seed: int = 0,
) -> Pool:
    g = torch.Generator().manual_seed(seed)
    needed = [-(-n // tokens) for n in lengths]
    order = torch.randperm(sum(needed) + 3, generator=g).tolist()
    table = torch.full((len(lengths), max(needed, default=0) + 2), -1, dtype=torch.int32)
    pages = torch.full((len(order), tokens, width), NAN, dtype=torch.float64).to(dtype)
    slots, rows = [], []
    for n, length in enumerate(lengths):
        for m in range(needed[n]):
            table[n, m] = order.pop()
        at = torch.arange(length)
        slots.append(table[n, at // tokens].long() * tokens + at % tokens)
        rows.append(torch.randn(length, width, generator=g, dtype=torch.float64))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    append_rows_inplace(
        pages, torch.cat([*rows, torch.zeros(0, width)]).to(wide), torch.cat(slots), row_scale=row_scale
    )
    if dtype != torch.float64:
        flat = pages.view(torch.uint8).flatten(0, 1)
        rows = [(flat[s].view(dtype).double() * row_scale) for s in slots]
    return Pool(pages.to(device), table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device), rows)


def queries(pool: Pool, drafts: int, heads: int = H, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    g = torch.Generator().manual_seed(9)
    shape = (len(pool.rows) * drafts, heads, pool.pages.shape[2])
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).to(pool.pages.device)


def plain(q: torch.Tensor, pool: Pool, drafts: int, rank: int = RANK, scale: float = SCALE):
    """Row by row in float64."""
    q = q.cpu().double()
    o = torch.zeros(*q.shape[:2], rank, dtype=torch.float64)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64)
    for t in range(q.shape[0]):
        n, i = divmod(t, drafts)
        keys = pool.rows[n][: max(len(pool.rows[n]) - drafts + i + 1, 0)]
        if len(keys):
            logits = q[t] @ keys.T * scale
            o[t], lse[t] = logits.softmax(-1) @ keys[:, :rank], logits.logsumexp(-1)
    return o, lse


LENGTHS = [13, 0, 1, 8, 40, 3]


@pytest.mark.parametrize("drafts", [1, 2, 5])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 3e-6), (FP8, 3e-6)],
    ids=str,
)
def test_values(dtype: torch.dtype, tolerance: float, drafts: int) -> None:
    pool = make(LENGTHS, dtype, row_scale=0.5 if dtype == FP8 else 1.0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q = queries(pool, drafts, dtype=wide)
    o, lse = paged_attention(
        q, pool.pages, pool.table, pool.lengths, SCALE, drafts, rank=RANK, row_scale=0.5 if dtype == FP8 else 1.0
    )
    expected = plain(q, pool, drafts)
    # The stored rows are exact inputs here; what is left is fp32 arithmetic.
    assert (o.dtype, lse.dtype) == (wide, wide)
    torch.testing.assert_close(o.double(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected[1], rtol=tolerance, atol=tolerance)
    assert o[drafts : 2 * drafts].count_nonzero() == 0  # the sequence of length 0


def test_a_verify_is_the_decodes_in_a_row() -> None:
    pool = make([29], torch.float64)
    q = queries(pool, 4)
    together = paged_attention(q, pool.pages, pool.table, pool.lengths, SCALE, 4, rank=RANK)
    for i in range(4):
        one = paged_attention(q[i : i + 1], pool.pages, pool.table, pool.lengths - 3 + i, SCALE, rank=RANK)
        torch.testing.assert_close(one[0][0], together[0][i], rtol=1e-13, atol=1e-13)


def test_does_not_see_the_batch() -> None:
    pool = make(LENGTHS, torch.float32)
    q = queries(pool, 2, dtype=torch.float32)
    o, lse = paged_attention(q, pool.pages, pool.table, pool.lengths, SCALE, 2, rank=RANK)
    for n in range(len(LENGTHS)):
        rows, one = slice(2 * n, 2 * n + 2), slice(n, n + 1)
        alone = paged_attention(q[rows], pool.pages, pool.table[one], pool.lengths[one], SCALE, 2, rank=RANK)
        assert torch.equal(alone[0], o[rows])
        assert torch.equal(alone[1], lse[rows])


def test_absorbed_form_is_the_expanded_form() -> None:
    """softmax(q k^T) v with k = [W_k c | k_r], v = W_v c equals the absorbed query on rows, then W_v."""
    g = torch.Generator().manual_seed(3)
    nope, values = 10, 6
    w_k, w_v = (torch.randn(H, width, RANK, generator=g, dtype=torch.float64) for width in (nope, values))
    pool = make([21], torch.float64)
    rows = pool.rows[0]
    q = torch.randn(21, H, nope + L - RANK, generator=g, dtype=torch.float64)
    k = torch.cat([torch.einsum("hpr,sr->shp", w_k, rows[:, :RANK]), rows[:, None, RANK:].expand(-1, H, -1)], dim=-1)
    v = torch.einsum("hvr,sr->shv", w_v, rows[:, :RANK])
    whole = Sequences.from_lengths([21])
    expected = attention(q, k, v, whole, whole, SCALE)[0][-1:]
    absorbed = torch.cat([torch.einsum("hpr,thp->thr", w_k, q[-1:, :, :nope]), q[-1:, :, nope:]], dim=-1)
    o = paged_attention(absorbed, pool.pages, pool.table, pool.lengths, SCALE, rank=RANK)[0]
    torch.testing.assert_close(torch.einsum("hvr,thr->thv", w_v, o), expected, rtol=1e-12, atol=1e-12)


# Writing and reading rows


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_append_writes_its_rows_and_nothing_else(dtype: torch.dtype, index: torch.dtype) -> None:
    pages = torch.zeros(4, S, L).to(dtype)
    rows = torch.randn(5, L, generator=torch.Generator().manual_seed(0))
    rows[1] = NAN
    append_rows_inplace(pages, rows, torch.tensor([9, -1, 31, 0, 8], dtype=index), row_scale=0.25)
    flat = pages.float().flatten(0, 1)
    expected = (rows / 0.25).to(dtype).float()
    for t, slot in ((0, 9), (2, 31), (3, 0), (4, 8)):
        assert torch.equal(flat[slot], expected[t])
        flat[slot] = 0
    assert flat.count_nonzero() == 0


def test_fp8_saturates_and_keeps_nan() -> None:
    pages = torch.zeros(1, 2, 4).to(FP8)
    append_rows_inplace(pages, torch.tensor([[1e4, -1e30, NAN, 449.0]]), torch.tensor([1]))
    stored = pages.float()[0, 1]
    assert stored[[0, 1, 3]].tolist() == [448.0, -448.0, 448.0]
    assert stored[2].isnan()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, FP8], ids=str)
def test_gather_reads_any_range(dtype: torch.dtype) -> None:
    pool = make(LENGTHS, dtype, row_scale=2.0)
    cut = Sequences.from_lengths([5, 0, 1, 0, 23, 3], [8, 0, 0, 8, 9, 0])
    got = gather_rows(pool.pages, pool.table, cut, torch.float64, row_scale=2.0)
    expected = torch.cat([r[s : s + n] for r, s, n in zip(pool.rows, cut.starts, cut.lengths, strict=True)])
    assert torch.equal(got, expected)
    nothing = Sequences.from_lengths([0] * 6)
    assert gather_rows(pool.pages, pool.table, nothing, torch.float32).shape == (0, L)


# Merging and the prefix


def test_merge_is_attention_over_both_parts() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, H, w, generator=g, dtype=torch.float64) for n, w in ((7, L), (30, L), (30, RANK)))
    new = Sequences.from_lengths([7])

    def over(start: int, end: int):
        keys = Sequences.from_lengths([end - start])
        return attention(q, k[start:end], v[start:end], new, keys, SCALE, causal=False)

    whole, first, second, empty = over(0, 30), over(0, 11), over(11, 30), over(0, 0)
    assert empty[0].count_nonzero() == 0
    assert (empty[1] == float("-inf")).all()
    assert (empty[2] == float("-inf")).all()
    o, lse = merge(*first[:2], *second[:2])
    torch.testing.assert_close(o, whole[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, whole[1], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.maximum(first[2], second[2]), whole[2], rtol=1e-14, atol=0)
    poisoned = torch.full_like(o, NAN)
    for pair in ((o, lse, poisoned, empty[1]), (poisoned, empty[1], o, lse)):
        assert torch.equal(merge(*pair)[0], o)
        assert torch.equal(merge(*pair)[1], lse)
    assert merge(poisoned, empty[1], poisoned, empty[1])[0].count_nonzero() == 0


def test_merge_has_gradients() -> None:
    g = torch.Generator().manual_seed(0)
    parts = [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in ((3, 2, 4), (3, 2)) * 2]
    assert torch.autograd.gradcheck(merge, parts)


def test_full_attention_gradients() -> None:
    g = torch.Generator().manual_seed(0)
    new, keys = Sequences.from_lengths([70, 3, 4]), Sequences.from_lengths([9, 0, 130])
    inputs = [
        torch.randn(n, H, w, generator=g, dtype=torch.float64).requires_grad_()
        for n, w in ((77, L), (139, L), (139, RANK))
    ]
    o = attention(*inputs, new, keys, SCALE, causal=False)[0]
    parts = []
    for i, (q, k, v) in enumerate(
        zip(*(x.split(cut.lengths) for x, cut in zip(inputs, (new, keys, keys), strict=True)), strict=True)
    ):
        weights = (SCALE * torch.einsum("thq,shq->hts", q, k)).softmax(-1)
        parts.append(torch.einsum("hts,shv->thv", weights, v) if keys.lengths[i] else o.new_zeros(3, H, RANK))
    torch.testing.assert_close(o, torch.cat(parts), rtol=1e-12, atol=1e-12)
    d = torch.randn(o.shape, generator=g, dtype=torch.float64)
    got = torch.autograd.grad(o, inputs, d)
    for a, b in zip(got, torch.autograd.grad(torch.cat(parts), inputs, d), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("piece", [1, 7, 8, 64])
def test_prefix_in_pieces_is_one_attention(piece: int) -> None:
    cached, new = [13, 0, 21, 8], [4, 5, 0, 1]
    pool = make(cached, torch.float64)
    g = torch.Generator().manual_seed(5)
    w_k, w_v = torch.randn(H, L, L, generator=g, dtype=torch.float64), torch.randn(H, RANK, L, generator=g).double()

    def expand(rows: torch.Tensor):
        assert rows.shape[0] <= 4 * piece
        return torch.einsum("hql,rl->rhq", w_k, rows), torch.einsum("hvl,rl->rhv", w_v, rows)

    fresh = [torch.randn(n, L, generator=g, dtype=torch.float64) for n in new]
    q = torch.randn(sum(new), H, L, generator=g, dtype=torch.float64)
    cut = Sequences.from_lengths(new, cached)
    o, lse = prefix_attention(
        q, *expand_all(expand, fresh, piece), cut, pool.pages, pool.table, expand, SCALE, piece=piece
    )
    rows = torch.cat([torch.cat(pair) for pair in zip(pool.rows, fresh, strict=True)])
    keys = Sequences.from_lengths([a + b for a, b in zip(cached, new, strict=True)])
    k, v = torch.einsum("hql,rl->rhq", w_k, rows), torch.einsum("hvl,rl->rhv", w_v, rows)
    expected = attention(q, k, v, cut, keys, SCALE)
    torch.testing.assert_close(o, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected[1], rtol=1e-12, atol=1e-12)


def expand_all(expand, fresh: list[torch.Tensor], piece: int):
    parts = [expand(rows) for rows in torch.cat(fresh).split(4 * piece)]
    return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])


@pytest.mark.parametrize("sequences", [1, 7, 64, 300])
@pytest.mark.parametrize("context", [1, 128, 8192, 1 << 20])
def test_chosen_splits_fill_the_device_and_bound_the_parts(sequences: int, context: int) -> None:
    for rows in (12, 96, 192):
        split = choose_split(sequences, context, rows)
        parts, blocks = -(-context // split), Shape.of(rows).blocks
        assert split % 64 == 0
        assert split >= 64
        assert parts <= 132
        waves = -(-sequences * blocks * parts // 132)
        # No worse than one part, and at least 3/4 of the multiprocessors busy where the context allows it.
        assert waves * (split + 256) <= -(-sequences * blocks // 132) * (context + 63 + 256)
        if context >= 8192:
            assert sequences * blocks * context / (132 * waves * split) > 0.45
    assert choose_split(64, 8192, 96) == 8192


def test_refusals() -> None:
    pool = make([5, 3], torch.float32)
    q = queries(pool, 1, dtype=torch.float32)

    def attend(q=q, pages=pool.pages, table=pool.table, lengths=pool.lengths, scale=SCALE, drafts=1, **options):
        paged_attention(q, pages, table, lengths, scale, drafts, **{"rank": RANK, **options})

    for arguments, message in (
        ({"drafts": 0}, "drafts is 0; allowed: 1 to 16"),
        ({"drafts": 2}, r"q_THL has shape \(2, 3, 24\); must be \(4, 3, 24\)"),
        ({"q": q[..., :8]}, r"must be \(2, 3, 24\)"),
        ({"q": q.long()}, "q_THL is torch.int64; allowed: bfloat16, float16, float32, float64"),
        ({"pages": pool.pages.half()}, "pages_PSL is torch.float16; allowed: bfloat16, float8_e4m3fn"),
        ({"pages": pool.pages[0]}, "must be \\[pages, tokens a page, row width\\]"),
        ({"rank": 25}, "rank is 25; must be from 1 to the row width 24"),
        ({"table": pool.table.long()}, "table_NM is torch.int64; allowed: int32"),
        ({"lengths": pool.lengths[:1]}, r"lengths_N has shape \(1,\); must be \(2,\)"),
        ({"row_scale": 0.0}, "row_scale is 0.0; must be positive"),
        ({"scale": -1.0}, "scale is -1.0; must be positive"),
        ({"split": 100}, "split is 100; must be a multiple of 64"),
        ({"q": q.to("meta")}, "q_THL is on meta; must be on cpu"),
    ):
        with pytest.raises(Error, match=message):
            attend(**arguments)
    rows = torch.zeros(2, L)
    with pytest.raises(Error, match="slots_T has shape"):
        append_rows_inplace(pool.pages, rows, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(Error, match="must be contiguous"):
        append_rows_inplace(pool.pages[:, :, :8], rows[:, :8], torch.zeros(2, dtype=torch.int64))
    with pytest.raises(Error, match="rows has 1 sequences but table_NM 2"):
        gather_rows(pool.pages, pool.table, Sequences.from_lengths([1]), torch.float32)
    with pytest.raises(Error, match="end at 90; its table holds 24"):
        gather_rows(pool.pages, pool.table, Sequences.from_lengths([1, 1], [0, 89]), torch.float32)
    with pytest.raises(Error, match=r"dtype is torch\.float8_e4m3fn"):
        gather_rows(pool.pages, pool.table, Sequences.from_lengths([1, 1]), FP8)
    with pytest.raises(Error, match="must be equal and lse"):
        merge(torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(2, 3, 4), torch.zeros(3, 3))
    two = Sequences.from_lengths([1, 1])
    kv = torch.zeros(2, H, L)
    with pytest.raises(Error, match="piece is 0"):
        prefix_attention(kv, kv, kv, two, pool.pages, pool.table, lambda r: (r, r), SCALE, piece=0)
