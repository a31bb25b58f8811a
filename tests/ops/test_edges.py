"""What callers may hand in that looks like the usual thing: views with gaps, odd addresses, tensors of other places.

Kernels read pointers. A view with gaps, or an address that vector loads cannot take, must be copied or refused: each
of these gave other numbers, or a crash on a GPU, where the reference on a CPU gave the right ones.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton_cpu import CUDA

from perilune.config import Activation, Gate
from perilune.errors import Error
from perilune.ops import mla, moe
from perilune.ops.activation import glu
from perilune.ops.attnres import Partial, merge_norm, mix, mix_completed, mix_norm
from perilune.ops.attnres import triton_inference as attnres
from perilune.ops.conv import short_conv
from perilune.ops.kda import decode
from perilune.ops.mla import paged_reference, triton_paged, triton_varlen
from perilune.ops.moe import grouped, products, triton_routing
from perilune.ops.mx import decode_mxfp4, decode_mxfp8, encode_mxfp4, encode_mxfp8, fake_quantize
from perilune.ops.norm import add_rms_norm, gated_rms_norm, rms_norm
from perilune.ops.sequences import Sequences

interpreted = pytest.mark.skipif(CUDA, reason="runs in Triton's interpreter")
SILU = Activation("silu")


def gaps(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, each with a NaN (or -7) behind it."""
    poison = float("nan") if x.is_floating_point() else -7
    view = torch.stack((x, torch.full_like(x, poison)), dim=-1)[..., 0]
    assert not view.is_contiguous()
    return view


def odd(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, contiguous, from an address that is no multiple of 16 bytes."""
    view = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    assert view.is_contiguous()
    assert view.data_ptr() % 16
    return view


@interpreted
@pytest.mark.parametrize("moved", [0, 1, 2])
def test_attention_at_odd_addresses(moved: int) -> None:
    cut = Sequences.from_lengths([3, 0, 1])
    inputs = [torch.randn(4, 2, 16) for _ in range(3)]
    others = [odd(x) if i == moved else x for i, x in enumerate(inputs)]
    d_o, results = torch.randn(4, 2, 16), []
    for tensors, gradient in ((inputs, d_o), (others, odd(d_o))):
        leaves = [x.requires_grad_() for x in tensors]
        o = triton_varlen.attention(*leaves, cut, cut, 0.25, True)[0]
        results.append((o, *torch.autograd.grad(o, leaves, gradient)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@interpreted
def test_paged_attention_of_queries_at_an_odd_address() -> None:
    """The CUDA kernel reads 16 bytes at a time: it must not see the address."""
    pages, table = torch.randn(2, 16, 32), torch.tensor([[1]], dtype=torch.int32)
    q, lengths = torch.randn(1, 2, 32), torch.tensor([9], dtype=torch.int32)
    found = triton_paged.paged_attention(odd(q), pages, table, lengths, 0.2, 1, 16, 1.0, 64)
    # fp32 sums in another order.
    expected = paged_reference.paged_attention(q, pages, table, lengths, 0.2, 1, 16, 1.0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@interpreted
@torch.no_grad()
def test_mixtures_of_weights_with_gaps() -> None:
    sources, live = [torch.randn(2, 32) for _ in range(2)], torch.randn(2, 32)
    weights = [torch.randn(32) for _ in range(3)]
    results = []
    for w, n, q in (weights, [gaps(x) for x in weights]):
        partial = attnres.mix_completed(sources, [n, n], [q, q], 1e-5)[1]
        results.append((partial.h_TD, partial.lse_T, attnres.merge_norm(partial, live, n, q, 1e-5, w, 1e-5)))
        spread = Partial(gaps(partial.h_TD), gaps(partial.lse_T))
        results.append((*results[-1][:2], attnres.merge_norm(spread, live, n, q, 1e-5, w, 1e-5)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@interpreted
@pytest.mark.parametrize("one_block", [1024, 0])
def test_rows_of_the_first_choice_alone(one_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first column of several choices is a view with gaps."""
    monkeypatch.setattr(triton_routing, "ONE_BLOCK", one_block)
    ids = torch.randint(0, 4, (40, 3))
    for a, b in zip(triton_routing.permute(ids[:, :1], 4), moe.permute(ids[:, :1], 4), strict=True):
        assert torch.equal(a, b)
    order_R, _ = moe.permute(ids, 4)
    assert torch.equal(triton_routing.row_of_choice(gaps(order_R)), triton_routing.row_of_choice(order_R))


def test_row_weights_with_gaps_reach_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of the experts take a pointer to the weights."""
    seen = []
    for name in ("glu_product", "glu_backward"):
        real = getattr(products, name)

        def spy(*args, real=real, **options):
            seen.append(args[4])
            return real(*args, **options)

        monkeypatch.setattr(products, name, spy)
    weights = moe.Dense(torch.randn(2, 32, 8), torch.randn(2, 8, 16))
    rows, ends, w = torch.randn(5, 8, requires_grad=True), torch.tensor([2, 5], dtype=torch.int32), torch.rand(5)
    y = moe.experts(rows, weights, ends, SILU, row_weights_R=gaps(w))
    y.sum().backward()
    assert torch.equal(y, moe.experts(rows, weights, ends, SILU, row_weights_R=w))
    assert grouped.products is products
    assert len(seen) == 3
    assert all(x.is_contiguous() for x in seen)


def test_weight_gradients_of_no_rows_read_nothing_back() -> None:
    """A rank of expert parallelism may have none; on "meta" there is nothing to read."""
    ends = torch.zeros(3, dtype=torch.int32)
    for device in ("cpu", "meta"):
        d, x = torch.empty(0, 16, device=device), torch.empty(0, 8, device=device)
        found = products.weight_gradient(d, x, ends.to(device))
        assert found.shape == (3, 16, 8)
        assert device == "meta" or not found.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_and_gates_in_float64_beside_narrower_rows(dtype: torch.dtype) -> None:
    """The rows' dtype says what is computed in; gradients come back in each input's own."""
    w, gate = torch.rand(8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    calls = {
        "rms_norm": lambda x, w, _: rms_norm(x, w, 1e-5),
        "gated_rms_norm": lambda x, w, gate: gated_rms_norm(x, w, gate, 1e-5),
        "mix": lambda x, w, _: mix([x, 2 * x], w, w, 1e-5),
    }
    for call in calls.values():
        results = []
        for wide in (True, False):
            leaves = [torch.linspace(-1, 1, 24).view(3, 8).to(dtype), w, gate]
            leaves = [x.clone() if wide else x.float() if x.dtype == torch.float64 else x.clone() for x in leaves]
            leaves = [x.requires_grad_() for x in leaves]
            y = call(*leaves)
            grads = torch.autograd.grad(y.float().square().sum(), leaves, allow_unused=True)
            assert y.dtype == dtype
            assert all(g is None or g.dtype == x.dtype for g, x in zip(grads, leaves, strict=True))
            results.append((y, *(g for g in grads if g is not None)))
        for a, b in zip(*results, strict=True):
            # One rounding of the weight to fp32, and of the output to its dtype.
            torch.testing.assert_close(a.float(), b.float(), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


def _decoding(N: int = 2):
    one = torch.randn(N, 1, 16)
    inputs = decode.Projected(one, one, one, one, one[..., 0], one)
    taps, A_log, row = torch.randn(16, 4), torch.zeros(1), torch.ones(1, 16)
    weights = decode.Weights(taps, taps, taps, A_log, row, row[0], 1e-5, Gate("safe", -5.0))
    return inputs, weights, torch.zeros(4, 1, 16, 16), torch.zeros(4, 3, 48), torch.arange(N, dtype=torch.int32)


def test_decode_refuses_indices_and_weights_with_gaps() -> None:
    inputs, weights, matrix, window, slots = _decoding()
    tail, lengths = decode.Tail.empty(4, 1, 16, 16), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(Error, match=r"slots_N has shape \(2,\) and strides \(2,\); must be contiguous \(2,\)"):
        decode.decode_step_inplace(inputs, weights, matrix, window, gaps(slots))
    for bad in ({"dt_bias_HK": gaps(weights.dt_bias_HK)}, {"A_log_H": torch.zeros(1, device="meta")}):
        with pytest.raises(Error, match=rf"weights\.{next(iter(bad))} has .*; must be .*, contiguous, on cpu"):
            decode.decode_step_inplace(inputs, replace(weights, **bad), matrix, window, slots)
    with pytest.raises(Error, match=r"counts_N has shape .* and strides"):
        decode.tail_step_inplace(inputs, weights, matrix, window, tail, gaps(lengths), slots)
    with pytest.raises(Error, match=r"accepted_N is torch\.int64"):
        decode.shift_window_inplace(inputs, window, slots, lengths.long(), 1)
    with pytest.raises(Error, match=r"window_S3C is \(4, 3, 47\).*; must be \(4, 3, 48\)"):
        decode.shift_window_inplace(inputs, window[..., 1:], slots, lengths, 1)
    with pytest.raises(Error, match=r"lengths_N has shape \(1,\)"):
        decode.fold_inplace(matrix, tail, lengths[:1], slots, weights.gate)
    with pytest.raises(Error, match=r"target_N has shape .* and strides"):
        decode.fold_inplace(matrix, tail, lengths, slots, weights.gate, target_N=gaps(slots))


X, W, CUT = torch.zeros(3, 8), torch.zeros(8), Sequences.from_lengths([3])
HEADS, IDS = torch.zeros(3, 2, 16), torch.zeros(3, 2, dtype=torch.int64)
BLOCKS, CODES = torch.zeros(2, 32), torch.zeros(2, 16, dtype=torch.uint8)
SCALES = torch.zeros(2, 1, dtype=torch.uint8)
WIDE, ENDS = torch.zeros(1, 1, 1), torch.tensor([3], dtype=torch.int32)
AWAY = "is on meta; must be on cpu"
REFUSED = {
    "rms_norm": (lambda: rms_norm(X, W.to("meta"), 1e-5), rf"rms_norm: weight {AWAY} as x is"),
    "rms_norm of integers": (lambda: rms_norm(X.long(), W, 1e-5), "rms_norm: x is torch.int64; allowed: bfloat16"),
    "rms_norm of a number": (lambda: rms_norm(W[0], W, 1e-5), r"rms_norm: weight has shape \(8,\); x of \(\) needs"),
    "add_rms_norm": (lambda: add_rms_norm(X, X.to("meta"), W, 1e-5), f"add_rms_norm: added {AWAY}"),
    "gated_rms_norm": (lambda: gated_rms_norm(X, W, X.to("meta"), 1e-5), f"gated_rms_norm: gate {AWAY}"),
    "glu of two dtypes": (lambda: glu(X, X.double(), SILU), r"glu: gate is torch\.float32 .* up is torch\.float64"),
    "glu": (lambda: glu(X, X.to("meta"), SILU), f"glu: up {AWAY}"),
    "glu of numbers": (lambda: glu(W[0], W[0], SILU), "of at least one dimension"),
    "short_conv": (lambda: short_conv(X, torch.zeros(8, 4, device="meta"), CUT), f"short_conv: w {AWAY}"),
    "short_conv of integers": (lambda: short_conv(X.int(), torch.zeros(8, 4), CUT), "short_conv: u is torch.int32"),
    "mix": (lambda: mix([X, X.to("meta")], W, W, 1e-5), rf"attnres\.mix: sources\[1\] {AWAY}"),
    "mix_norm": (lambda: mix_norm([X], W, W, 1e-5, W.to("meta"), 1e-5), rf"attnres\.mix_norm: out_w_D {AWAY}"),
    "mix_completed": (lambda: mix_completed([X.int()], [W], [W], 1e-5), r"sources\[0\] is torch\.int32"),
    "merge_norm": (lambda: merge_norm(Partial(X, W), X, W, W.to("meta"), 1e-5, W, 1e-5), f"query_w_D {AWAY}"),
    "attention of rows": (lambda: mla.attention(X, X, X, CUT, CUT, 1.0), r"q_THQ has shape \(3, 8\); must have three"),
    "attention": (lambda: mla.attention(HEADS, HEADS.to("meta"), HEADS, CUT, CUT, 1.0), f"k_SHQ {AWAY} as q_THQ is"),
    "paged rows": (
        lambda: mla.append_rows_inplace(WIDE.expand(2**27, 16, 8), X, IDS[:, 0]),
        "pages_PSL has 2147483648 rows; must be fewer than",
    ),
    "route": (lambda: moe.route(W, W, 2, 1.0), r"route: logits_TE has shape \(8,\); must be \[T, E\]"),
    "route elsewhere": (lambda: moe.route(X, W.to("meta"), 2, 1.0), f"route: bias_E {AWAY}"),
    "permute": (lambda: moe.permute(IDS.int(), 4), r"permute: ids_TJ is torch\.int32 \(3, 2\)"),
    "dispatch": (lambda: moe.dispatch(X, IDS[:, 0], 2), r"order_R \(3,\) with top_k 2; must be \[T, L\] and"),
    "combine": (lambda: moe.combine(X, IDS.flatten(), None, 2), r"rows_RL is \(3, 8\) .* for the 6 rows of order_R"),
    "experts": (
        lambda: moe.experts(X, moe.Dense(WIDE.expand(1, 16, 8).to("meta"), WIDE.expand(1, 8, 8)), ENDS, SILU),
        f"experts: gate_up_E2FL {AWAY} as rows_RL is",
    ),
    "encode_mxfp4 of integers": (lambda: encode_mxfp4(BLOCKS.int()), r"encode_mxfp4: x is torch\.int32"),
    "encode_mxfp8 of integers": (lambda: encode_mxfp8(BLOCKS.int()), r"encode_mxfp8: x is torch\.int32"),
    "decode_mxfp4": (lambda: decode_mxfp4(CODES, SCALES.to("meta")), f"decode_mxfp4: scale {AWAY} as codes is"),
    "decode_mxfp4 to elsewhere": (
        lambda: decode_mxfp4(CODES, SCALES, out=BLOCKS.to("meta")),
        f"decode_mxfp4: out {AWAY}",
    ),
    "decode_mxfp8": (
        lambda: decode_mxfp8(BLOCKS.to(torch.float8_e4m3fn), SCALES.to("meta")),
        f"decode_mxfp8: scale {AWAY}",
    ),
    "fake_quantize of integers": (lambda: fake_quantize(BLOCKS.int(), "mxfp4"), r"fake_quantize: x is torch\.int32"),
    "fake_quantize to elsewhere": (
        lambda: fake_quantize(BLOCKS, "mxfp4", out=BLOCKS.to("meta")),
        f"fake_quantize: out {AWAY} as x is",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_any_work(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(Error, match=message):
        call()
