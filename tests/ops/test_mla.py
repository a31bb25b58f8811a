"""Packed causal attention against a plain float64 softmax and torch's own, and the bits of the exact form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from perilune import Error, Sequences
from perilune.ops.mla import attention, attention_exact

H, Q, V = 3, 24, 16
SCALE = 0.37
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _qkv(queries: int, keys: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = [(queries, H, Q), (keys, H, Q), (keys, H, V)]
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: Sequences, keys: Sequences
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One sequence at a time, T x T."""
    outs, lses, largest = [q.new_zeros(0, H, V)], [q.new_zeros(0, H)], q.new_full((H,), float("-inf"))
    for i, (n, s) in enumerate(zip(queries.lengths, keys.lengths, strict=True)):
        if n == 0:
            continue
        qi = q[queries.offsets[i] : queries.offsets[i + 1]]
        ki, vi = (x[keys.offsets[i] : keys.offsets[i + 1]] for x in (k, v))
        logits = SCALE * torch.einsum("thq,shq->hts", qi, ki)
        visible = torch.arange(s) <= torch.arange(s - n, s).unsqueeze(-1)
        logits = logits.where(visible, float("-inf"))
        outs.append(torch.einsum("hts,shv->thv", logits.softmax(-1), vi))
        lses.append(logits.logsumexp(-1).t())
        largest = torch.maximum(largest, logits.amax((1, 2)))
    return torch.cat(outs), torch.cat(lses), largest


CUTS = {
    "one": ([70], [70]),
    "packed": ([5, 0, 64, 1, 130, 65], [5, 0, 64, 1, 130, 65]),
    "continued": ([3, 0, 64, 1, 70], [40, 9, 200, 129, 70]),
    "nothing": ([], []),
}


def _cut(name: str) -> tuple[Sequences, Sequences]:
    queries, keys = CUTS[name]
    return Sequences.from_lengths(queries, [s - n for n, s in zip(queries, keys, strict=True)]), Sequences.from_lengths(
        keys
    )


@pytest.mark.parametrize("op", [attention, attention_exact])
@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)], ids=str)
def test_values(op: Attention, name: str, dtype: torch.dtype, tolerance: float) -> None:
    queries, keys = _cut(name)
    inputs = _qkv(queries.total, keys.total, dtype)
    got = op(*inputs, queries, keys, SCALE)
    # fp32: exponentials of logits up to about 8, each off by a few units in the last place.
    for a, b in zip(got, _plain(*(x.double() for x in inputs), queries, keys), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CUTS)
def test_gradients_in_float64(name: str) -> None:
    queries, keys = _cut(name)
    inputs = [x.requires_grad_() for x in _qkv(queries.total, keys.total)]
    out, lse, largest = attention(*inputs, queries, keys, SCALE)
    assert not lse.requires_grad
    assert not largest.requires_grad
    d = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = torch.autograd.grad(out, inputs, d)
    if queries.total == 0:
        assert all(torch.equal(g, torch.zeros_like(g)) for g in got)
        return
    want = torch.autograd.grad(_plain(*inputs, queries, keys)[0], inputs, d)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_against_torch_scaled_dot_product_attention() -> None:
    whole = Sequences.from_lengths([150])
    q, k, v = (x.requires_grad_() for x in _qkv(150, 150, torch.float32))
    ours = attention(q, k, v, whole, whole, SCALE)[0]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), is_causal=True, scale=SCALE
    )[0].transpose(0, 1)
    torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=3e-6)
    for a, b in zip(
        torch.autograd.grad(ours.pow(2).sum(), (q, k, v)),
        torch.autograd.grad(theirs.pow(2).sum(), (q, k, v)),
        strict=True,
    ):
        assert (a - b).norm() <= 5e-6 * b.norm()


def test_bf16_rounds_once() -> None:
    queries, keys = _cut("packed")
    inputs = _qkv(queries.total, keys.total, torch.bfloat16)
    expected = _plain(*(x.double() for x in inputs), queries, keys)[0]
    for op in (attention, attention_exact):
        out, lse, largest = op(*inputs, queries, keys, SCALE)
        assert (out.dtype, lse.dtype, largest.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        # Half a unit in the last place of bf16 (2^-8), plus fp32's.
        torch.testing.assert_close(out.double(), expected, rtol=2.0**-8 * 1.01, atol=3e-6)


def test_packed_is_separate_bit_for_bit_and_nothing_crosses() -> None:
    lengths = [30, 100, 0, 7, 70]
    packed = Sequences.from_lengths(lengths)
    inputs = [x.requires_grad_() for x in _qkv(packed.total, packed.total, torch.float32)]
    d = torch.randn(packed.total, H, V, generator=torch.Generator().manual_seed(1))
    out, lse, _ = attention(*inputs, packed, packed, SCALE)
    grads = torch.autograd.grad(out, inputs, d)
    for i, n in enumerate(lengths):
        rows = slice(packed.offsets[i], packed.offsets[i + 1])
        one = Sequences.from_lengths([n])
        # Everything outside this sequence is NaN, so a read across the border shows.
        alone = []
        for x in inputs:
            y = torch.full_like(x, float("nan"))
            y[rows] = x.detach()[rows]
            alone.append(y[rows].requires_grad_())
        part, part_lse, _ = attention(*alone, one, one, SCALE)
        assert torch.equal(part, out[rows])
        assert torch.equal(part_lse, lse[rows])
        for a, b in zip(torch.autograd.grad(part, alone, d[rows]), grads, strict=True):
            assert torch.equal(a, b[rows])


@pytest.mark.parametrize("op", [attention, attention_exact])
def test_a_poisoned_sequence_stays_alone(op: Attention) -> None:
    cut = Sequences.from_lengths([20, 33, 80])
    inputs = _qkv(cut.total, cut.total, torch.float32)
    clean = op(*inputs, cut, cut, SCALE)[0]
    for x in inputs:
        x[20:53] = float("nan")
    out = op(*inputs, cut, cut, SCALE)[0]
    assert torch.equal(out[:20], clean[:20])
    assert torch.equal(out[53:], clean[53:])


def test_heads_are_grouped_when_a_block_gets_large(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys = _cut("continued")
    inputs = [x.requires_grad_() for x in _qkv(queries.total, keys.total, torch.float32)]
    results = []
    for limit in (1 << 24, 3000):
        monkeypatch.setattr("perilune.ops.mla.reference._BLOCK_NUMBERS", limit)
        out, lse, largest = attention(*inputs, queries, keys, SCALE)
        results.append([out, lse, largest, *torch.autograd.grad(out.pow(2).sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_large_logits_do_not_overflow() -> None:
    cut = Sequences.from_lengths([65])
    q, k, v = _qkv(65, 65, torch.float32)
    for op in (attention, attention_exact):
        out, lse, largest = op(100 * q, 100 * k, v, cut, cut, SCALE)
        assert out.isfinite().all()
        assert lse.isfinite().all()
        torch.testing.assert_close(largest, lse.amax(0), rtol=1e-5, atol=0)


# The exact form


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_exact_one_pass_is_token_by_token_is_chunks(dtype: torch.dtype, length: int) -> None:
    q, k, v = _qkv(length, length, dtype)
    whole = Sequences.from_lengths([length])
    out, lse, largest = attention_exact(q, k, v, whole, whole, SCALE)
    for step in (1, 5, 16, 50, 64):
        parts = []
        for start in range(0, length, step):
            end = min(start + step, length)
            cut = (Sequences.from_lengths([end - start], [start]), Sequences.from_lengths([end]))
            parts.append(attention_exact(q[start:end].clone(), k[:end].clone(), v[:end].clone(), *cut, SCALE))
        outs, lses, maxima = zip(*parts, strict=True)
        assert torch.equal(torch.cat(outs), out)
        assert torch.equal(torch.cat(lses), lse)
        assert torch.equal(torch.stack(maxima).amax(0), largest)


def test_exact_does_not_see_the_batch() -> None:
    """A continued prefill, decodes and a verification in one call, each against its own one-pass document."""
    total = [150, 64, 200, 31]
    new = [90, 1, 4, 31]
    documents = [_qkv(s, s, torch.float32, seed=i) for i, s in enumerate(total)]
    q = torch.cat([d[0][s - n :] for d, s, n in zip(documents, total, new, strict=True)])
    k, v = (torch.cat([d[i] for d in documents]) for i in (1, 2))
    queries = Sequences.from_lengths(new, [s - n for s, n in zip(total, new, strict=True)])
    out, lse, _ = attention_exact(q, k, v, queries, Sequences.from_lengths(total), SCALE)
    for i, (document, s, n) in enumerate(zip(documents, total, new, strict=True)):
        whole = Sequences.from_lengths([s])
        one, one_lse, _ = attention_exact(*document, whole, whole, SCALE)
        rows = slice(queries.offsets[i], queries.offsets[i + 1])
        assert torch.equal(out[rows], one[s - n :])
        assert torch.equal(lse[rows], one_lse[s - n :])


def test_exact_counts_tiles_from_the_absolute_start_of_the_keys() -> None:
    q, k, v = _qkv(40, 90, torch.float32)
    queries, keys = Sequences.from_lengths([40], [150]), Sequences.from_lengths([90], [100])
    got = attention_exact(q, k, v, queries, keys, SCALE)
    for a, b in zip(got, _plain(*(x.double() for x in (q, k, v)), queries, keys), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("width", [(48, 32), (192, 128), (9, 5)])
def test_exact_holds_for_other_widths_and_many_heads(width: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(0)
    heads, tokens = 8, 140
    q, k = (torch.randn(tokens, heads, width[0], generator=g) for _ in range(2))
    v = torch.randn(tokens, heads, width[1], generator=g)
    whole = Sequences.from_lengths([tokens])
    out, _, _ = attention_exact(q, k, v, whole, whole, width[0] ** -0.5)
    for end in (1, 17, 64, 100, 139):
        cut = Sequences.from_lengths([1], [end - 1]), Sequences.from_lengths([end])
        one, _, _ = attention_exact(q[end - 1 : end], k[:end], v[:end], *cut, width[0] ** -0.5)
        assert torch.equal(one[0], out[end - 1])


def test_refusals() -> None:
    q, k, v = _qkv(4, 4)
    four, two = Sequences.from_lengths([4]), Sequences.from_lengths([2, 2])
    for op in (attention, attention_exact):
        with pytest.raises(Error, match="1 sequences of queries but 2 of keys"):
            op(q, k, v, four, two, SCALE)
        with pytest.raises(Error, match="q_THQ has 3 tokens but sequences add up to 4"):
            op(q[:3], k, v, four, four, SCALE)
        with pytest.raises(Error, match=r"keys.lengths\[0\] is 1; must be >= queries.lengths\[0\] = 2"):
            op(q, k, v, two, Sequences.from_lengths([1, 3]), SCALE)
        with pytest.raises(Error, match="must be equal"):
            op(q, k, v[:, :2], four, four, SCALE)
