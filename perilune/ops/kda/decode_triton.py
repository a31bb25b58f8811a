"""Triton kernels of KDA decode: what `decode.py` specifies, one program a (head, sequence), fp32 inside.

A program holds its head's matrix in registers while it walks through the tokens, so that one decode step and the
verification of eight drafts run the same instructions token by token: they agree bit for bit.

Legend as in decode.py; pointer arguments carry the name of their tensor.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc,unused-ignore"

from __future__ import annotations


import torch
import triton
import triton.language as tl

from perilune.config import Gate
from perilune.ops.kda.decode import CAPACITY, CENTRE, GRID, Projected, Tail, Weights

_CENTRE = tl.constexpr(CENTRE)
_CAPACITY = tl.constexpr(CAPACITY)
_GRID = tl.constexpr(GRID)
_BLOCK = tl.constexpr(16)
_L2_EPS = tl.constexpr(1e-6)
_WIDTH = tl.constexpr(4)

# Measured on one H200 (bench/kda_decode.py): warps of a program in each kernel.
STEP_WARPS = 8
TAIL_WARPS = 8
FOLD_WARPS = 8


@triton.jit
def _history(x, window, row, x_stride, window_stride, c):
    """Row `row` of the pre-convolution inputs: token `row` of this call, or row + 3 of the window if negative.

    Rounded to the window's dtype: a later call would find it there.
    """
    new = tl.load(x + row * x_stride + c, mask=(c >= 0) & (row >= 0), other=0.0)
    old = tl.load(window + (row + 3) * window_stride + c, mask=(c >= 0) & (row < 0), other=0.0)
    return tl.where(row >= 0, new.to(old.dtype), old)


@triton.jit
def _conv(x, window, taps, i, x_stride, window_stride, c):
    """SiLU of the width-4 convolution at token i; x, window and taps point at the head's first channel."""
    now = tl.load(x + i * x_stride + c).to(tl.float32)
    acc = tl.zeros_like(now)
    for j in tl.static_range(3):
        past = _history(x, window, i + j - 3, x_stride, window_stride, c).to(tl.float32)
        acc += past * tl.load(taps + c * _WIDTH + j).to(tl.float32)
    acc += now * tl.load(taps + c * _WIDTH + 3).to(tl.float32)
    return acc * tl.sigmoid(acc)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + _L2_EPS)


@triton.jit
def _log_decay(g_raw, dt_bias, A_log, lower_bound, SAFE: tl.constexpr):
    """The gate's activation, nats."""
    x = g_raw + dt_bias
    if SAFE:
        return lower_bound * tl.sigmoid(tl.exp(A_log) * x)
    return -tl.exp(A_log) * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))


@triton.jit
def _gated_norm(o, norm, out_gate, eps, V: tl.constexpr):
    return o * tl.rsqrt(tl.sum(o * o, 0) / V + eps) * norm * tl.sigmoid(out_gate)


_RUNTIME = ["tokens", "store", "shift", "heads"]


@triton.jit(do_not_specialize=_RUNTIME)
def _step_kernel(
    q_THK, k_THK, v_THV, g_raw_THK, beta_logit_TH, out_gate_THV,
    conv_q_CW, conv_k_CW, conv_v_CW, A_log_H, dt_bias_HK, norm_V,
    matrix_SHKV, window_S3C, slots_N, counts_N, o_THV,
    q_stride, k_stride, v_stride, g_stride, beta_stride, gate_stride,
    heads, tokens, store, eps, lower_bound,
    SAFE: tl.constexpr, COUNTED: tl.constexpr, ONE: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    n = tl.program_id(1)
    ck = tl.arange(0, K)
    cv = tl.arange(0, V)
    first = n.to(tl.int64) * tokens
    o = o_THV + (first * heads + h) * V + cv
    slot = tl.load(slots_N + n).to(tl.int64)
    if slot < 0:
        for i in range(tokens):
            tl.store(o + i * heads * V, tl.zeros([V], tl.float32).to(o_THV.dtype.element_ty))
        return
    count = tokens
    if COUNTED:
        count = tl.load(counts_N + n)
    at = matrix_SHKV + (slot * heads + h) * (K * V) + ck[:, None] * V + cv[None, :]
    S = tl.load(at, eviction_policy="evict_first")

    channels = heads * (2 * K + V)
    q_window = window_S3C + slot * 3 * channels + h * K
    k_window = q_window + heads * K
    v_window = window_S3C + slot * 3 * channels + heads * 2 * K + h * V
    q_x = q_THK + first * q_stride + h * K
    k_x = k_THK + first * k_stride + h * K
    v_x = v_THV + first * v_stride + h * V
    A_log = tl.load(A_log_H + h).to(tl.float32)
    dt_bias = tl.load(dt_bias_HK + h * K + ck).to(tl.float32)
    norm = tl.load(norm_V + cv).to(tl.float32)
    # The window as it will be, read before anything is stored.
    q_old0 = _history(q_x, q_window, count - 3, q_stride, channels, ck)
    q_old1 = _history(q_x, q_window, count - 2, q_stride, channels, ck)
    q_old2 = _history(q_x, q_window, count - 1, q_stride, channels, ck)
    k_old0 = _history(k_x, k_window, count - 3, k_stride, channels, ck)
    k_old1 = _history(k_x, k_window, count - 2, k_stride, channels, ck)
    k_old2 = _history(k_x, k_window, count - 1, k_stride, channels, ck)
    v_old0 = _history(v_x, v_window, count - 3, v_stride, channels, cv)
    v_old1 = _history(v_x, v_window, count - 2, v_stride, channels, cv)
    v_old2 = _history(v_x, v_window, count - 1, v_stride, channels, cv)

    for i in range(1 if ONE else count):
        q = _unit(_conv(q_x, q_window, conv_q_CW + h * K * _WIDTH, i, q_stride, channels, ck)) * (K**-0.5)
        k = _unit(_conv(k_x, k_window, conv_k_CW + h * K * _WIDTH, i, k_stride, channels, ck))
        v = _conv(v_x, v_window, conv_v_CW + h * V * _WIDTH, i, v_stride, channels, cv)
        row = first + i
        g_raw = tl.load(g_raw_THK + row * g_stride + h * K + ck).to(tl.float32)
        beta = tl.sigmoid(tl.load(beta_logit_TH + row * beta_stride + h).to(tl.float32))
        out_gate = tl.load(out_gate_THV + row * gate_stride + h * V + cv).to(tl.float32)
        decay = tl.exp(_log_decay(g_raw, dt_bias, A_log, lower_bound, SAFE))
        # Both reads of the decayed matrix in one pass; q then meets the token's own write through q . k.
        u = beta * (v - tl.sum(S * (decay * k)[:, None], 0))
        y = tl.sum(S * (decay * q)[:, None], 0) + tl.sum(q * k, 0) * u
        S = S * decay[:, None] + k[:, None] * u[None, :]
        tl.store(o + i * heads * V, _gated_norm(y, norm, out_gate, eps, V).to(o_THV.dtype.element_ty))
    for i in range(count, tokens):
        tl.store(o + i * heads * V, tl.zeros([V], tl.float32).to(o_THV.dtype.element_ty))
    if store != 0:
        # Several threads may hold the same element: all have loaded it before one stores it.
        tl.debug_barrier()
        tl.store(at, S, eviction_policy="evict_first")
        tl.store(q_window + ck, q_old0)
        tl.store(q_window + channels + ck, q_old1)
        tl.store(q_window + 2 * channels + ck, q_old2)
        tl.store(k_window + ck, k_old0)
        tl.store(k_window + channels + ck, k_old1)
        tl.store(k_window + 2 * channels + ck, k_old2)
        tl.store(v_window + cv, v_old0)
        tl.store(v_window + channels + cv, v_old1)
        tl.store(v_window + 2 * channels + cv, v_old2)


@triton.jit(do_not_specialize=_RUNTIME)
def _tail_kernel(
    q_THK, k_THK, v_THV, g_raw_THK, beta_logit_TH, out_gate_THV,
    conv_q_CW, conv_k_CW, conv_v_CW, A_log_H, dt_bias_HK, norm_V,
    matrix_SHKV, window_S3C, slots_N, lengths_N, k_SHRK, u_SHRV, g_SHRK, o_THV,
    q_stride, k_stride, v_stride, g_stride, beta_stride, gate_stride,
    heads, tokens, shift, eps, lower_bound,
    SAFE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    n = tl.program_id(1)
    ck = tl.arange(0, K)
    cv = tl.arange(0, V)
    cr = tl.arange(0, _BLOCK)
    first = n.to(tl.int64) * tokens
    o = o_THV + (first * heads + h) * V + cv
    slot = tl.load(slots_N + n).to(tl.int64)
    if slot < 0:
        for i in range(tokens):
            tl.store(o + i * heads * V, tl.zeros([V], tl.float32).to(o_THV.dtype.element_ty))
        return
    length = tl.load(lengths_N + n)
    slab = slot * heads + h
    S = tl.load(matrix_SHKV + slab * (K * V) + ck[:, None] * V + cv[None, :], eviction_policy="evict_first")

    channels = heads * (2 * K + V)
    q_window = window_S3C + slot * 3 * channels + h * K
    k_window = q_window + heads * K
    v_window = window_S3C + slot * 3 * channels + heads * 2 * K + h * V
    q_x = q_THK + first * q_stride + h * K
    k_x = k_THK + first * k_stride + h * K
    v_x = v_THV + first * v_stride + h * V
    k_ring = k_SHRK + slab * (_CAPACITY * K)
    u_ring = u_SHRV + slab * (_CAPACITY * V)
    g_ring = g_SHRK + slab * (_CAPACITY * K)
    A_log = tl.load(A_log_H + h).to(tl.float32)
    dt_bias = tl.load(dt_bias_HK + h * K + ck).to(tl.float32)
    norm = tl.load(norm_V + cv).to(tl.float32)
    q_old0 = _history(q_x, q_window, tokens - 3, q_stride, channels, ck)
    q_old1 = _history(q_x, q_window, tokens - 2, q_stride, channels, ck)
    q_old2 = _history(q_x, q_window, tokens - 1, q_stride, channels, ck)
    k_old0 = _history(k_x, k_window, tokens - 3, k_stride, channels, ck)
    k_old1 = _history(k_x, k_window, tokens - 2, k_stride, channels, ck)
    k_old2 = _history(k_x, k_window, tokens - 1, k_stride, channels, ck)
    v_old0 = _history(v_x, v_window, tokens - 3, v_stride, channels, cv)
    v_old1 = _history(v_x, v_window, tokens - 2, v_stride, channels, cv)
    v_old2 = _history(v_x, v_window, tokens - 1, v_stride, channels, cv)

    for i in range(tokens):
        q = _unit(_conv(q_x, q_window, conv_q_CW + h * K * _WIDTH, i, q_stride, channels, ck)) * (K**-0.5)
        k = _unit(_conv(k_x, k_window, conv_k_CW + h * K * _WIDTH, i, k_stride, channels, ck))
        v = _conv(v_x, v_window, conv_v_CW + h * V * _WIDTH, i, v_stride, channels, cv)
        row = first + i
        g_raw = tl.load(g_raw_THK + row * g_stride + h * K + ck).to(tl.float32)
        beta = tl.sigmoid(tl.load(beta_logit_TH + row * beta_stride + h).to(tl.float32))
        out_gate = tl.load(out_gate_THV + row * gate_stride + h * V + cv).to(tl.float32)
        g = _log_decay(g_raw, dt_bias, A_log, lower_bound, SAFE)

        entry = length + i
        own = entry // _BLOCK
        local = g + tl.load(g_ring + (entry - 1) * K + ck, mask=(ck >= 0) & (entry % _BLOCK != 0), other=0.0)
        run = local  # log decay from the end of the blocks not yet visited to this token
        read_k = tl.zeros([_BLOCK, V], tl.float32)
        read_q = tl.zeros([_BLOCK, V], tl.float32)
        for back in tl.range(0, own + 1, num_stages=STAGES):
            block = own - back
            rows = block * _BLOCK + cr
            live = rows[:, None] < entry
            keys = tl.load(k_ring + rows[:, None] * K + ck[None, :], mask=live, other=0.0).to(tl.float32)
            written = tl.load(u_ring + rows[:, None] * V + cv[None, :], mask=live, other=0.0).to(tl.float32)
            last = tl.minimum(block * _BLOCK + _BLOCK, entry) - 1
            total = tl.load(g_ring + last * K + ck, mask=(ck >= 0) & (back > 0), other=0.0)
            upto = tl.where(back > 0, total, local)
            after = tl.where(back > 0, run, 0.0)
            if SAFE:
                keys = keys * tl.exp(upto + _CENTRE)[None, :]
            else:
                each = tl.load(g_ring + rows[:, None] * K + ck[None, :], mask=live, other=0.0)
                keys = keys * tl.exp(tl.where(live, upto[None, :] - each, 0.0))
            away = tl.exp(after)
            read_k += tl.sum(keys * (k * away)[None, :], 1)[:, None] * written
            read_q += tl.sum(keys * (q * away)[None, :], 1)[:, None] * written
            run += total
        since = tl.exp(run)
        u = beta * (v - (tl.sum(S * (since * k)[:, None], 0) + tl.sum(read_k, 0)))
        y = (tl.sum(S * (since * q)[:, None], 0) + tl.sum(read_q, 0)) + tl.sum(q * k, 0) * u
        tl.store(o + i * heads * V, _gated_norm(y, norm, out_gate, eps, V).to(o_THV.dtype.element_ty))
        if SAFE:
            k = k * tl.exp(-_CENTRE - local)
        tl.store(k_ring + entry * K + ck, k.to(k_SHRK.dtype.element_ty))
        tl.store(u_ring + entry * V + cv, u.to(u_SHRV.dtype.element_ty))
        tl.store(g_ring + entry * K + ck, local)
        # The next token's program threads read this entry.
        tl.debug_barrier()
    if shift != 0:
        tl.store(q_window + ck, q_old0)
        tl.store(q_window + channels + ck, q_old1)
        tl.store(q_window + 2 * channels + ck, q_old2)
        tl.store(k_window + ck, k_old0)
        tl.store(k_window + channels + ck, k_old1)
        tl.store(k_window + 2 * channels + ck, k_old2)
        tl.store(v_window + cv, v_old0)
        tl.store(v_window + channels + cv, v_old1)
        tl.store(v_window + 2 * channels + cv, v_old2)


@triton.jit(do_not_specialize=_RUNTIME)
def _fold_kernel(
    matrix_SHKV, k_SHRK, u_SHRV, g_SHRK, lengths_N, slots_N, target_N, heads,
    SAFE: tl.constexpr, PRECISION: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    n = tl.program_id(1)
    length = tl.load(lengths_N + n)
    slot = tl.load(slots_N + n).to(tl.int64)
    if (length < _GRID) | (slot < 0):
        return
    ck = tl.arange(0, K)
    cv = tl.arange(0, V)
    cr = tl.arange(0, _BLOCK)
    slab = slot * heads + h
    square = ck[:, None] * V + cv[None, :]
    S = tl.load(matrix_SHKV + slab * (K * V) + square)
    k_ring = k_SHRK + slab * (_CAPACITY * K)
    u_ring = u_SHRV + slab * (_CAPACITY * V)
    g_ring = g_SHRK + slab * (_CAPACITY * K)
    for block in range(_GRID // _BLOCK):
        rows = block * _BLOCK + cr
        # Keys come transposed, [K, R], ready to meet the corrections in a product over R.
        keys = tl.load(k_ring + rows[None, :] * K + ck[:, None]).to(tl.float32)
        written = tl.load(u_ring + rows[:, None] * V + cv[None, :]).to(tl.float32)
        total = tl.load(g_ring + (block * _BLOCK + _BLOCK - 1) * K + ck)
        if SAFE:
            keys = keys * tl.exp(total + _CENTRE)[:, None]
        else:
            each = tl.load(g_ring + rows[None, :] * K + ck[:, None])
            keys = keys * tl.exp(total[:, None] - each)
        S = tl.dot(keys, written, acc=S * tl.exp(total)[:, None], input_precision=PRECISION)
    # What is left of the tail, at most eight entries, moves to its start.
    rest = (cr[:, None] < length - _GRID) & (cr[:, None] < _CAPACITY - _GRID)
    key_at = cr[:, None] * K + ck[None, :]
    value_at = cr[:, None] * V + cv[None, :]
    k_rest = tl.load(k_ring + _GRID * K + key_at, mask=rest, other=0.0)
    u_rest = tl.load(u_ring + _GRID * V + value_at, mask=rest, other=0.0)
    g_rest = tl.load(g_ring + _GRID * K + key_at, mask=rest, other=0.0)
    tl.debug_barrier()
    target = tl.load(target_N + n).to(tl.int64)
    tl.store(matrix_SHKV + (target * heads + h) * (K * V) + square, S)
    tl.store(k_ring + key_at, k_rest, mask=rest)
    tl.store(u_ring + value_at, u_rest, mask=rest)
    tl.store(g_ring + key_at, g_rest, mask=rest)


@triton.jit(do_not_specialize=_RUNTIME)
def _shift_kernel(
    q_THK, k_THK, v_THV, window_S3C, slots_N, accepted_N, q_stride, k_stride, v_stride, heads, tokens,
    K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    n = tl.program_id(1)
    slot = tl.load(slots_N + n).to(tl.int64)
    if slot < 0:
        return
    count = tl.load(accepted_N + n)
    ck = tl.arange(0, K)
    cv = tl.arange(0, V)
    first = n.to(tl.int64) * tokens
    channels = heads * (2 * K + V)
    q_window = window_S3C + slot * 3 * channels + h * K
    k_window = q_window + heads * K
    v_window = window_S3C + slot * 3 * channels + heads * 2 * K + h * V
    q_x = q_THK + first * q_stride + h * K
    k_x = k_THK + first * k_stride + h * K
    v_x = v_THV + first * v_stride + h * V
    # Row by row from the oldest: row j of the new window comes from row j or later of the old one.
    for j in tl.static_range(3):
        q_row = _history(q_x, q_window, count + j - 3, q_stride, channels, ck)
        k_row = _history(k_x, k_window, count + j - 3, k_stride, channels, ck)
        v_row = _history(v_x, v_window, count + j - 3, v_stride, channels, cv)
        tl.debug_barrier()
        tl.store(q_window + j * channels + ck, q_row)
        tl.store(k_window + j * channels + ck, k_row)
        tl.store(v_window + j * channels + cv, v_row)


# -- launches ---------------------------------------------------------------------------------------------------------


def _arguments(inputs: Projected, weights: Weights) -> list[torch.Tensor]:
    return [
        inputs.q_THK,
        inputs.k_THK,
        inputs.v_THV,
        inputs.g_raw_THK,
        inputs.beta_logit_TH,
        inputs.out_gate_THV,
        weights.conv_q_CW,
        weights.conv_k_CW,
        weights.conv_v_CW,
        weights.A_log_H,
        weights.dt_bias_HK,
        weights.norm_V,
    ]


def _strides(inputs: Projected) -> list[int]:
    return [x.stride(0) for x in vars(inputs).values()]


def step(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    slots_N: torch.Tensor,
    tokens: int,
    counts_N: torch.Tensor | None,
    store: bool,
    warps: int = STEP_WARPS,
) -> torch.Tensor:
    """The in-place form; see `decode_step_inplace`, `verify`, `replay_inplace`."""
    _, heads, K, V = matrix_SHKV.shape
    o_THV = torch.empty_like(inputs.v_THV, memory_format=torch.contiguous_format)
    _step_kernel[(heads, slots_N.shape[0])](
        *_arguments(inputs, weights), matrix_SHKV, window_S3C, slots_N, slots_N if counts_N is None else counts_N, o_THV,
        *_strides(inputs), heads, tokens, int(store), weights.eps, weights.gate.lower_bound or 0.0,
        SAFE=weights.gate.mode == "safe", COUNTED=counts_N is not None, ONE=False, K=K, V=V, num_warps=warps,
    )  # fmt: skip
    return o_THV


def tail_step(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    tail: Tail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    tokens: int,
    shift: bool,
    warps: int = TAIL_WARPS,
    stages: int = 2,
) -> torch.Tensor:
    """The tail form; see `tail_step_inplace`, `tail_verify_inplace`."""
    _, heads, K, V = matrix_SHKV.shape
    o_THV = torch.empty_like(inputs.v_THV, memory_format=torch.contiguous_format)
    _tail_kernel[(heads, slots_N.shape[0])](
        *_arguments(inputs, weights), matrix_SHKV, window_S3C, slots_N, lengths_N,
        tail.k_SHRK, tail.u_SHRV, tail.g_SHRK, o_THV, *_strides(inputs), heads, tokens, int(shift),
        weights.eps, weights.gate.lower_bound or 0.0,
        SAFE=weights.gate.mode == "safe", K=K, V=V, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return o_THV


def fold(
    matrix_SHKV: torch.Tensor,
    tail: Tail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    target_N: torch.Tensor,
    gate: Gate,
    warps: int = FOLD_WARPS,
    precision: str = "tf32x3",
) -> None:
    """See `fold_inplace`."""
    _, heads, K, V = matrix_SHKV.shape
    _fold_kernel[(heads, slots_N.shape[0])](
        matrix_SHKV, tail.k_SHRK, tail.u_SHRV, tail.g_SHRK, lengths_N, slots_N, target_N, heads,
        SAFE=gate.mode == "safe", PRECISION=precision, K=K, V=V, num_warps=warps,
    )  # fmt: skip


def shift_window(
    inputs: Projected, window_S3C: torch.Tensor, slots_N: torch.Tensor, accepted_N: torch.Tensor, tokens: int
) -> None:
    """See `shift_window_inplace`."""
    heads, K = inputs.q_THK.shape[1:]
    _shift_kernel[(heads, slots_N.shape[0])](
        inputs.q_THK, inputs.k_THK, inputs.v_THV, window_S3C, slots_N, accepted_N, *_strides(inputs)[:3],
        heads, tokens, K=K, V=inputs.v_THV.shape[2], num_warps=1,
    )  # fmt: skip
