"""The attention-residual mixture against its formula under float64 autograd, and its bits."""

from __future__ import annotations

import pytest
import torch

from perilune import Error
from perilune.ops.attnres import merge_norm, mix, mix_completed, mix_norm
from perilune.ops.norm import rms_norm


def _formula(sources: list[torch.Tensor], w_n: torch.Tensor, w_q: torch.Tensor, eps: float) -> torch.Tensor:
    x_nTD = torch.stack(sources)
    s_nT = torch.einsum("d,ntd->nt", w_n * w_q, x_nTD / (x_nTD.pow(2).mean(-1, keepdim=True) + eps).sqrt())
    return torch.einsum("nt,ntd->td", s_nT.softmax(0), x_nTD)


def _inputs(n: int, tokens: int, width: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """[w_n, w_q, source 0, ...]; the sources differ in size, as blocks of a model do."""
    g = torch.Generator().manual_seed(0)
    vectors = [torch.randn(width, generator=g, dtype=torch.float64) for _ in range(2)]
    sources = [(i + 1) * torch.randn(tokens, width, generator=g, dtype=torch.float64) for i in range(n)]
    return [t.to(dtype) for t in (*vectors, *sources)]


@pytest.mark.parametrize(("n", "tokens", "width"), [(1, 5, 16), (2, 17, 24), (9, 6, 33), (3, 0, 8), (4, 1500, 70)])
def test_values_and_gradients_in_float64(n: int, tokens: int, width: int) -> None:
    inputs = [t.requires_grad_() for t in _inputs(n, tokens, width)]
    w_n, w_q, *sources = inputs
    out, expected = mix(sources, w_n, w_q, 1e-3), _formula(sources, w_n, w_q, 1e-3)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    d = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for got, want in zip(torch.autograd.grad(out, inputs, d), torch.autograd.grad(expected, inputs, d), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_float32_is_near_float64_and_bf16_rounds_once() -> None:
    w_n, w_q, *sources = _inputs(5, 40, 64, torch.float32)
    expected = _formula([x.double() for x in sources], w_n.double(), w_q.double(), 1e-5)
    # Scores reach about 30 here, and the softmax turns their absolute error into a relative one.
    torch.testing.assert_close(mix(sources, w_n, w_q, 1e-5).double(), expected, rtol=2e-5, atol=2e-5)
    narrow = [x.bfloat16() for x in sources]
    wide = mix([x.float() for x in narrow], w_n, w_q, 1e-5)
    assert torch.equal(mix(narrow, w_n, w_q, 1e-5), wide.bfloat16())


def test_zero_query_is_the_mean_and_still_gets_a_gradient() -> None:
    w_n, w_q, *sources = _inputs(4, 9, 16)
    w_q = torch.zeros_like(w_q).requires_grad_()
    out = mix(sources, w_n, w_q, 1e-5)
    torch.testing.assert_close(out, torch.stack(sources).mean(0), rtol=1e-12, atol=1e-12)
    assert torch.autograd.grad(out.pow(2).sum(), w_q)[0].abs().min() > 0


def test_only_asked_for_gradients() -> None:
    w_n, w_q, *sources = _inputs(3, 5, 16)
    sources[1].requires_grad_()
    (got,) = torch.autograd.grad(mix(sources, w_n, w_q, 1e-5).sum(), sources[1])
    (want,) = torch.autograd.grad(_formula(sources, w_n, w_q, 1e-5).sum(), sources[1])
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("n", [1, 2, 5, 9])
@pytest.mark.parametrize("width", [31, 128])
def test_a_tokens_bits_depend_on_that_token_alone(n: int, width: int) -> None:
    w_n, w_q, *sources = _inputs(n, 1234, width, torch.float32)
    for x in sources:
        x.requires_grad_()
    d = torch.randn(1234, width, generator=torch.Generator().manual_seed(1))
    full = mix(sources, w_n, w_q, 1e-5)
    d_full = torch.autograd.grad(full, sources, d)
    for start, length in [(0, 1), (5, 1), (1233, 1), (17, 16), (2, 1100)]:
        rows = slice(start, start + length)
        part = [x.detach()[rows].clone().requires_grad_() for x in sources]
        out = mix(part, w_n, w_q, 1e-5)
        assert torch.equal(out, full[rows])
        for got, want in zip(torch.autograd.grad(out, part, d[rows]), d_full, strict=True):
            assert torch.equal(got, want[rows])


def test_mix_norm_is_the_norm_of_the_mixture_bit_for_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        w_n, w_q, *sources = _inputs(3, 7, 40, dtype)
        x, again = mix_norm(sources, w_n, w_q, 1e-3, w_q, 1e-5)
        assert torch.equal(x, rms_norm(mix(sources, w_n, w_q, 1e-3), w_q, 1e-5))
        assert all(a is b for a, b in zip(again, sources, strict=True))


@pytest.mark.parametrize("n", [1, 2, 8])
def test_two_passes_make_the_same_mixture(n: int) -> None:
    _, _, *sources = _inputs(n + 1, 9, 40)
    *completed, live = sources
    mixers = [_inputs(0, 0, 40)[i] * (m + 1) for i in range(2) for m in range(3)]
    # A score of thousands must not overflow.
    completed[0] = completed[0] * 1e4
    for partial, w_n, w_q in zip(
        mix_completed(completed, mixers[:3], mixers[3:], 1e-3), *(mixers[:3], mixers[3:]), strict=True
    ):
        got = merge_norm(partial, live, w_n, w_q, 1e-3, w_n, 1e-5)
        want, _ = mix_norm([*completed, live], w_n, w_q, 1e-3, w_n, 1e-5)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_refusals() -> None:
    x, w = torch.zeros(2, 8), torch.zeros(8)
    with pytest.raises(Error, match="sources is empty"):
        mix([], w, w, 1e-5)
    with pytest.raises(Error, match=r"sources\[1\] is torch.float32 \(3, 8\)"):
        mix([x, torch.zeros(3, 8)], w, w, 1e-5)
    with pytest.raises(Error, match=r"query_w_D has shape \(7,\)"):
        mix([x], w, torch.zeros(7), 1e-5)
    with pytest.raises(Error, match=r"out_w_D has shape \(9,\)"):
        mix_norm([x], w, w, 1e-5, torch.zeros(9), 1e-5)
    with pytest.raises(Error, match="1 norm_w but 2 query_w"):
        mix_completed([x], [w], [w, w], 1e-5)
    with pytest.raises(Error, match=r"no_grad"):
        mix_completed([x.requires_grad_()], [w], [w], 1e-5)
