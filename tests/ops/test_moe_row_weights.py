"""Weights of expert rows: against autograd through a loop that multiplies the outputs, in float64."""

from __future__ import annotations

import pytest
import torch

from perilune import Error
from perilune.config import Activation
from perilune.ops import moe
from perilune.ops.moe import Dense, Packed
from perilune.ops.mx import decode_mxfp4, encode_mxfp4

SITU, SILU = Activation("situ"), Activation("silu")
ENDS = [7, 7, 24, 40, 40]  # of 44 rows; experts 1 and 4 are empty
OFFS = torch.tensor(ENDS, dtype=torch.int32)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _inputs(latent: int = 32, width: int = 64) -> list[torch.Tensor]:
    """rows, row weights (some negative, some zero), gate_up, down."""
    weights = _random(44, seed=4)
    weights[3] = 0
    return [
        _random(44, latent),
        weights,
        _random(5, 2 * width, latent, seed=1) / latent**0.5,
        _random(5, latent, width, seed=2) / width**0.5,
    ]


def _loop(
    rows: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, act: Activation
) -> torch.Tensor:
    """The definition: each output row times its weight, with autograd's own derivative."""
    parts, start, width = [], 0, down.shape[-1]
    for e, end in enumerate(ENDS):
        h = rows[start:end] @ gate_up[e].t()
        gate, up = h[:, :width], h[:, width:]
        if act.kind == "silu":
            a = torch.nn.functional.silu(gate) * up
        else:
            a = act.beta * torch.tanh(gate / act.beta) * torch.sigmoid(gate)
            a = a * act.linear_beta * torch.tanh(up / act.linear_beta)
        parts.append(weights[start:end, None] * (a @ down[e].t()))
        start = end
    return torch.cat([*parts, torch.zeros_like(rows[start:])])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# fp32: sums of 64 products; bf16: h, a, u and y are each rounded to 8 bits.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("act", [SITU, SILU], ids=["situ", "silu"])
@pytest.mark.parametrize("save", ["inputs", "all"])
@pytest.mark.parametrize("exact", [False, True])
def test_output_and_every_gradient(
    dtype: torch.dtype, tolerance: float, act: Activation, save: moe.Save, exact: bool
) -> None:
    plain = _inputs(*((31, 7) if exact else (32, 64)))
    kinds = [dtype, _wide(dtype), dtype, dtype]
    mine = [t.to(kind).requires_grad_() for t, kind in zip(plain, kinds, strict=True)]
    theirs = [t.detach().double().requires_grad_() for t in mine]
    with torch.no_grad():
        mine[0][40:] = mine[1][40:] = float("nan")
    out = moe.experts(mine[0], Dense(*mine[2:]), OFFS, act, exact=exact, row_weights_R=mine[1], save=save)
    expected = _loop(*theirs, act)
    d = _random(*out.shape, seed=3)
    d_mine = d.to(dtype)
    d_mine[40:] = float("nan")
    got = [out, *torch.autograd.grad(out, mine, d_mine)]
    want = [expected, *torch.autograd.grad(expected, theirs, d)]
    for a, b, kind in zip(got, want, [dtype, *kinds], strict=True):
        assert a.dtype == kind
        assert (a.double() - b).norm() <= tolerance * b.norm()
    for tail in (out[40:], got[1][40:], got[2][40:]):
        assert torch.equal(tail, torch.zeros_like(tail))


def test_saving_more_changes_no_bit_and_saves_only_h() -> None:
    rows, weights, gate_up, down = (t.float().requires_grad_() for t in _inputs())
    results, kept = [], []
    for save in ("inputs", "all"):
        sizes: list[tuple[int, ...]] = []

        def pack(t: torch.Tensor, sizes: list[tuple[int, ...]] = sizes) -> torch.Tensor:
            sizes.append(tuple(t.shape))
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = moe.experts(rows, Dense(gate_up, down), OFFS, SITU, row_weights_R=weights, save=save)
        kept.append(sizes)
        results.append([out, *torch.autograd.grad(out.pow(2).sum(), (rows, weights, gate_up, down))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert kept[0] == [(44, 32), (44,), (5,), (5, 128, 32), (5, 32, 64)]
    assert kept[1] == [*kept[0], (44, 128)]


def test_without_weights_it_is_weight_one_to_the_bit() -> None:
    rows, _, gate_up, down = (t.float() for t in _inputs())
    ones = moe.experts(rows, Dense(gate_up, down), OFFS, SITU, row_weights_R=torch.ones(44))
    assert torch.equal(ones, moe.experts(rows, Dense(gate_up, down), OFFS, SITU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exact_rows_and_weight_gradients_do_not_see_each_other(dtype: torch.dtype) -> None:
    rows, weights, gate_up, down = (t.to(dtype) for t in _inputs())
    d = _random(44, 32, seed=3).to(dtype)

    def run(pick: slice, offs: torch.Tensor) -> list[torch.Tensor]:
        leaves = [rows[pick].clone().requires_grad_(), weights[pick].clone().requires_grad_()]
        out = moe.experts(leaves[0], Dense(gate_up, down), offs, SITU, exact=True, row_weights_R=leaves[1])
        return [out, *torch.autograd.grad(out, leaves, d[pick])]

    full = run(slice(0, 44), OFFS)
    expert_of_row = torch.bucketize(torch.arange(40), OFFS, right=True)
    for row in (0, 6, 7, 23, 39):
        alone = run(slice(row, row + 1), (torch.arange(5) >= expert_of_row[row]).to(torch.int32))
        for a, b in zip(alone, full, strict=True):
            assert torch.equal(a[0], b[row])


def test_packed_rows_and_weights_get_gradients() -> None:
    rows, weights, gate_up, down = _inputs()
    packed = Packed(*encode_mxfp4(gate_up), *encode_mxfp4(down))
    decoded = [
        decode_mxfp4(packed.gate_up_codes, packed.gate_up_scales, torch.float64),
        decode_mxfp4(packed.down_codes, packed.down_scales, torch.float64),
    ]
    leaves = [rows.requires_grad_(), weights.requires_grad_()]
    d = _random(44, 32, seed=3)
    out, expected = (
        moe.experts(rows, packed, OFFS, SITU, row_weights_R=weights),
        _loop(rows, weights, *decoded, SITU),
    )
    got, want = [out, *torch.autograd.grad(out, leaves, d)], [expected, *torch.autograd.grad(expected, leaves, d)]
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()


def test_the_layer_is_the_same_whether_rows_or_the_combination_are_weighted() -> None:
    tokens, top_k = 30, 3
    _, _, gate_up, down = _inputs()
    x, logits = _random(tokens, 32, seed=5).requires_grad_(), _random(tokens, 5, seed=6).requires_grad_()
    results = []
    for on_rows in (True, False):
        routing = moe.route(logits, torch.zeros(5, dtype=torch.float64), top_k, 2.5)
        order, offs = moe.permute(routing.ids_TJ, 5)
        rows = moe.dispatch(x, order, top_k)
        if on_rows:
            w = routing.weights_TJ.reshape(-1)[order]
            out = moe.experts(rows, Dense(gate_up, down), offs, SITU, row_weights_R=w)
            out = moe.combine(out, order, torch.ones_like(routing.weights_TJ))
        else:
            out = moe.combine(moe.experts(rows, Dense(gate_up, down), offs, SITU), order, routing.weights_TJ)
        results.append([out, *torch.autograd.grad(out, (x, logits), _random(tokens, 32, seed=7))])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()


def test_row_weights_and_save_are_checked() -> None:
    rows, weights, gate_up, down = (t.float() for t in _inputs())
    dense = Dense(gate_up, down)
    with pytest.raises(Error, match=r"row_weights_R has shape \(43,\); rows and offs_E need \(44,\)"):
        moe.experts(rows, dense, OFFS, SITU, row_weights_R=weights[:43])
    with pytest.raises(Error, match=r"row_weights_R is torch\.bfloat16; must be torch\.float32"):
        moe.experts(rows, dense, OFFS, SITU, row_weights_R=weights.bfloat16())
    with pytest.raises(Error, match=r"offs_E is torch\.int64 \(5,\); must be contiguous torch\.int32 \[E\]"):
        moe.experts(rows, dense, OFFS.long(), SITU)
    with pytest.raises(Error, match="save is 'some'; allowed: 'inputs', 'all'"):
        moe.experts(rows, dense, OFFS, SITU, save="some")  # type: ignore[arg-type]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_backward_pass_called_directly_is_that_of_autograd(exact: bool, packed: bool, weighted: bool) -> None:
    rows, w, gate_up, down = (t.float().requires_grad_() for t in _inputs())
    with torch.no_grad():
        weights = Packed(*encode_mxfp4(gate_up), *encode_mxfp4(down)) if packed else Dense(gate_up, down)
    row_weights = w if weighted else None
    d = _random(44, 32, seed=3).float()
    out = moe.experts(rows, weights, OFFS, SITU, exact=exact, row_weights_R=row_weights)
    leaves = [rows, *([w] if weighted else []), *([] if packed else [gate_up, down])]
    want = list(torch.autograd.grad(out, leaves, d))
    got = moe.experts_backward(d, rows.detach(), weights, OFFS, SITU, exact=exact, row_weights_R=row_weights)
    assert [t is None for t in got] == [False, not weighted, packed, packed]
    assert all(torch.equal(a, b) for a, b in zip([t for t in got if t is not None], want, strict=True))
    with pytest.raises(Error, match=r"d_y_RL has shape \(43, 32\)"):
        moe.experts_backward(d[:43], rows, weights, OFFS, SITU)


@pytest.mark.parametrize("save", ["inputs", "all"])
@pytest.mark.parametrize("tokens", [30, 0])
def test_dispatch_inside_is_dispatch_before_and_keeps_the_tokens_alone(save: moe.Save, tokens: int) -> None:
    top_k = 3
    _, _, gate_up, down = (t.requires_grad_() for t in _inputs())
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:top_k] for i in range(30)])
    order, offs = moe.permute(ids[:tokens], 5)
    x, w = _random(tokens, 32, seed=5).requires_grad_(), _random(tokens * top_k, seed=6).requires_grad_()
    kept: list[tuple[int, ...]] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        inside = moe.experts(x, Dense(gate_up, down), offs, SITU, row_weights_R=w, save=save, order_R=order)
    assert (30 * top_k, 32) not in kept
    assert (tokens, 32) in kept
    before = moe.experts(moe.dispatch(x, order, top_k), Dense(gate_up, down), offs, SITU, row_weights_R=w, save=save)
    d = _random(tokens * top_k, 32, seed=7)
    leaves = (x, w, gate_up, down)
    for a, b in zip(
        [inside, *torch.autograd.grad(inside, leaves, d)],
        [before, *torch.autograd.grad(before, leaves, d)],
        strict=True,
    ):
        assert torch.equal(a, b)
    with pytest.raises(Error, match="order_R has 89 rows; must be a multiple of the 30 tokens"):
        moe.experts(_random(30, 32), Dense(gate_up, down), offs, SITU, order_R=torch.arange(89))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_results_may_be_written_over_the_inputs(dtype: torch.dtype) -> None:
    rows, w, gate_up, down = (t.to(dtype) for t in _inputs())
    dense, d = Dense(gate_up, down), _random(44, 32, seed=3).to(dtype)
    want = moe.experts(rows, dense, OFFS, SITU, row_weights_R=w)
    buffer = rows.clone()
    got = moe.experts(buffer, dense, OFFS, SITU, row_weights_R=w, clean=False, out_RL=buffer)
    assert got.data_ptr() == buffer.data_ptr()
    assert torch.equal(got[:40], want[:40])
    assert torch.equal(got[40:], rows[40:])
    back = moe.experts_backward(d, rows, dense, OFFS, SITU, row_weights_R=w)
    for over in (0, 1):
        inputs = [d.clone(), rows.clone()]
        again = moe.experts_backward(*inputs, dense, OFFS, SITU, row_weights_R=w, clean=False, out_RL=inputs[over])
        assert again[0].data_ptr() == inputs[over].data_ptr()
        assert torch.equal(again[0][:40], back[0][:40])
        assert all(torch.equal(a, b) for a, b in zip(again[1:], back[1:], strict=True))
    with pytest.raises(Error, match="a gradient is wanted"):
        moe.experts(rows.requires_grad_(), dense, OFFS, SITU, out_RL=buffer)
    with pytest.raises(Error, match=r"out_RL has shape \(43, 32\)"):
        moe.experts_backward(d, rows, dense, OFFS, SITU, out_RL=buffer[:43])
