"""Triton kernels of KDA decode, launched by decode_triton.py: what `decode.py` specifies, in fp32 inside.

One program a (head, sequence). It works in three phases, whatever the number of tokens: prepare every token
(convolution, norms, gate) into a scratch row, stream the matrix once in column tiles through all tokens, finish every
token (output norm). One decode step and the verification of eight drafts run the same instructions in the same order:
they agree bit for bit.

Few warps a program and many programs on a multiprocessor hide the latencies; with 8 warps the barriers between the
phases of small vectors dominate (docs/kda-decode.md).

Legend as in decode_call.py; pointer arguments carry the name of their tensor.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc,unused-ignore"

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.kda.decode_call import CAPACITY, CENTRE, GRID

_CENTRE = tl.constexpr(CENTRE)
_CAPACITY = tl.constexpr(CAPACITY)
_GRID = tl.constexpr(GRID)
_BLOCK = tl.constexpr(16)
_L2_EPS = tl.constexpr(1e-6)
_WIDTH = tl.constexpr(4)
# Scratch rows of a token and head.
_Q, _K, _DECAY, _V, _SCALARS, _Y = (tl.constexpr(i) for i in range(6))
ROWS = tl.constexpr(8)
_RUNTIME = ["tokens", "store", "shift", "heads", "beta_stride"]


@triton.jit
def _history(x, window, row, x_stride, window_stride, at, live):
    """Row `row` of the pre-convolution inputs: token `row` of this call, or row + 3 of the window if negative.

    In the window's dtype: a later call would find the token there.
    """
    new = tl.load(x + row * x_stride + at, mask=live & (row >= 0), other=0.0)
    old = tl.load(window + (row + 3) * window_stride + at, mask=live & (row < 0), other=0.0)
    return tl.where(row >= 0, new.to(old.dtype), old)


@triton.jit
def _conv(x, window, taps, i, x_stride, window_stride, at):
    """SiLU of the width-4 convolution at token i; x, window and taps point at the head's first channel."""
    now = tl.load(x + i * x_stride + at).to(tl.float32)
    acc = now * tl.load(taps + at * _WIDTH + 3).to(tl.float32)
    for j in tl.static_range(3):
        past = _history(x, window, i + j - 3, x_stride, window_stride, at, at >= 0).to(tl.float32)
        acc += past * tl.load(taps + at * _WIDTH + j).to(tl.float32)
    return acc * tl.sigmoid(acc)


@triton.jit
def move_window(x, window, count, x_stride, window_stride, at):
    """Move the window past `count` tokens."""
    row0 = _history(x, window, count - 3, x_stride, window_stride, at, at >= 0)
    row1 = _history(x, window, count - 2, x_stride, window_stride, at, at >= 0)
    row2 = _history(x, window, count - 1, x_stride, window_stride, at, at >= 0)
    # Several threads may hold the same element: all have loaded it before one stores it.
    tl.debug_barrier()
    tl.store(window + at, row0)
    tl.store(window + window_stride + at, row1)
    tl.store(window + 2 * window_stride + at, row2)


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
def _finish(o, y, norm_V, out_gate, eps, cv, V: tl.constexpr):
    """Gated RMSNorm of one token and head, stored."""
    y = y * tl.rsqrt(tl.sum(y * y, 0) / V + eps) * tl.load(norm_V + cv).to(tl.float32)
    tl.store(o + cv, (y * tl.sigmoid(tl.load(out_gate + cv).to(tl.float32))).to(o.dtype.element_ty))


@triton.jit
def _blank(o, first, last, stride, cv, V: tl.constexpr):
    """Zero outputs for tokens first .. last - 1."""
    for i in range(first, last):
        tl.store(o + i * stride + cv, tl.zeros([V], tl.float32).to(o.dtype.element_ty))


@triton.jit(do_not_specialize=_RUNTIME)
def step_kernel(
    q_THK, k_THK, v_THV, g_raw_THK, beta_logit_TH, out_gate_THV,
    conv_q_CW, conv_k_CW, conv_v_CW, A_log_H, dt_bias_HK, norm_V,
    matrix_SHKV, window_S3C, slots_N, counts_N, scratch, o_THV,
    q_stride, k_stride, v_stride, g_stride, beta_stride, gate_stride,
    heads, tokens, store, eps, lower_bound,
    SAFE: tl.constexpr, COUNTED: tl.constexpr, D: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    n = tl.program_id(1)
    ck = tl.arange(0, K)
    cv = tl.arange(0, V)
    ct = tl.arange(0, BV)
    first = n.to(tl.int64) * tokens
    o = o_THV + (first * heads + h) * V
    slot = tl.load(slots_N + n).to(tl.int64)
    if slot < 0:
        _blank(o, 0, tokens, heads * V, cv, V)
        return
    count = tokens
    if COUNTED:
        count = tl.load(counts_N + n)
    at = matrix_SHKV + (slot * heads + h) * (K * V) + ck[:, None] * V + ct[None, :]
    S = tl.load(at, eviction_policy="evict_first")

    channels = heads * (2 * K + V)
    q_window = window_S3C + slot * 3 * channels + h * K
    k_window = q_window + heads * K
    v_window = window_S3C + slot * 3 * channels + heads * 2 * K + h * V
    q_x = q_THK + first * q_stride + h * K
    k_x = k_THK + first * k_stride + h * K
    v_x = v_THV + first * v_stride + h * V
    rows = scratch + (first * heads + h) * (ROWS * D)
    rows_stride = heads * ROWS * D
    A_log = tl.load(A_log_H + h).to(tl.float32)
    dt_bias = tl.load(dt_bias_HK + h * K + ck).to(tl.float32)

    for i in range(count):
        q = _unit(_conv(q_x, q_window, conv_q_CW + h * K * _WIDTH, i, q_stride, channels, ck)) * (K**-0.5)
        k = _unit(_conv(k_x, k_window, conv_k_CW + h * K * _WIDTH, i, k_stride, channels, ck))
        v = _conv(v_x, v_window, conv_v_CW + h * V * _WIDTH, i, v_stride, channels, cv)
        g_raw = tl.load(g_raw_THK + (first + i) * g_stride + h * K + ck).to(tl.float32)
        beta = tl.sigmoid(tl.load(beta_logit_TH + (first + i) * beta_stride + h).to(tl.float32))
        mine = rows + i * rows_stride
        tl.store(mine + _Q * D + ck, q)
        tl.store(mine + _K * D + ck, k)
        tl.store(mine + _DECAY * D + ck, tl.exp(_log_decay(g_raw, dt_bias, A_log, lower_bound, SAFE)))
        tl.store(mine + _V * D + cv, v)
        tl.store(mine + _SCALARS * D, beta)
        tl.store(mine + _SCALARS * D + 1, tl.sum(q * k, 0))
    if store != 0:
        move_window(q_x, q_window, count, q_stride, channels, ck)
        move_window(k_x, k_window, count, k_stride, channels, ck)
        move_window(v_x, v_window, count, v_stride, channels, cv)
    tl.debug_barrier()
    for tile in range(0, V, BV):
        for i in range(count):
            mine = rows + i * rows_stride
            q = tl.load(mine + _Q * D + ck)
            k = tl.load(mine + _K * D + ck)
            decay = tl.load(mine + _DECAY * D + ck)
            beta = tl.load(mine + _SCALARS * D)
            along = tl.load(mine + _SCALARS * D + 1)
            # Both reads of the decayed matrix in one pass; q then meets the token's own write through q . k.
            S = S * decay[:, None]
            u = beta * (tl.load(mine + _V * D + tile + ct) - tl.sum(S * k[:, None], 0))
            tl.store(mine + _Y * D + tile + ct, tl.sum(S * q[:, None], 0) + along * u)
            S += k[:, None] * u[None, :]
        if store != 0:
            tl.debug_barrier()
            tl.store(at + tile, S, eviction_policy="evict_first")
        S = tl.load(at + tile + BV, mask=(ct[None, :] >= 0) & (tile + BV < V), eviction_policy="evict_first")
    tl.debug_barrier()
    for i in range(count):
        y = tl.load(rows + i * rows_stride + _Y * D + cv)
        out_gate = out_gate_THV + (first + i) * gate_stride + h * V
        _finish(o + i * heads * V, y, norm_V, out_gate, eps, cv, V)
    _blank(o, count, tokens, heads * V, cv, V)


@triton.jit(do_not_specialize=_RUNTIME)
def tail_kernel(
    q_THK, k_THK, v_THV, g_raw_THK, beta_logit_TH, out_gate_THV,
    conv_q_CW, conv_k_CW, conv_v_CW, A_log_H, dt_bias_HK, norm_V,
    matrix_SHKV, window_S3C, slots_N, matrices_N, lengths_N, k_SHRK, u_SHRV, g_SHRK, scratch, o_THV,
    q_stride, k_stride, v_stride, g_stride, beta_stride, gate_stride,
    heads, tokens, shift, eps, lower_bound,
    SAFE: tl.constexpr, D: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    n = tl.program_id(1)
    ck = tl.arange(0, K)
    cv = tl.arange(0, V)
    ct = tl.arange(0, BV)
    cr = tl.arange(0, BR)
    first = n.to(tl.int64) * tokens
    o = o_THV + (first * heads + h) * V
    slot = tl.load(slots_N + n).to(tl.int64)
    if slot < 0:
        _blank(o, 0, tokens, heads * V, cv, V)
        return
    length = tl.load(lengths_N + n)
    slab = slot * heads + h
    at = matrix_SHKV + (tl.load(matrices_N + n).to(tl.int64) * heads + h) * (K * V) + ck[:, None] * V + ct[None, :]
    S = tl.load(at, eviction_policy="evict_first")

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
    rows = scratch + (first * heads + h) * (ROWS * D)
    rows_stride = heads * ROWS * D
    A_log = tl.load(A_log_H + h).to(tl.float32)
    dt_bias = tl.load(dt_bias_HK + h * K + ck).to(tl.float32)

    for i in range(tokens):
        q = _unit(_conv(q_x, q_window, conv_q_CW + h * K * _WIDTH, i, q_stride, channels, ck)) * (K**-0.5)
        k = _unit(_conv(k_x, k_window, conv_k_CW + h * K * _WIDTH, i, k_stride, channels, ck))
        v = _conv(v_x, v_window, conv_v_CW + h * V * _WIDTH, i, v_stride, channels, cv)
        g_raw = tl.load(g_raw_THK + (first + i) * g_stride + h * K + ck).to(tl.float32)
        beta = tl.sigmoid(tl.load(beta_logit_TH + (first + i) * beta_stride + h).to(tl.float32))
        entry = length + i
        local = _log_decay(g_raw, dt_bias, A_log, lower_bound, SAFE)
        local += tl.load(g_ring + (entry - 1) * K + ck, mask=(ck >= 0) & (entry % _BLOCK != 0), other=0.0)
        mine = rows + i * rows_stride
        tl.store(mine + _Q * D + ck, q)
        tl.store(mine + _K * D + ck, k)
        tl.store(mine + _V * D + cv, v)
        tl.store(mine + _SCALARS * D, beta)
        tl.store(mine + _SCALARS * D + 1, tl.sum(q * k, 0))
        stored = k
        if SAFE:
            stored = k * tl.exp(-_CENTRE - local)
        tl.store(k_ring + entry * K + ck, stored.to(k_SHRK.dtype.element_ty))
        tl.store(g_ring + entry * K + ck, local)
        # The decay from the boundary to this token, for the reads of the matrix.
        run = local
        for back in range(1, entry // _BLOCK + 1):
            run += tl.load(g_ring + ((entry // _BLOCK - back) * _BLOCK + _BLOCK - 1) * K + ck)
        tl.store(mine + _DECAY * D + ck, tl.exp(run))
        # The next token, and the threads that hold these values otherwise, read them back.
        tl.debug_barrier()
    if shift != 0:
        move_window(q_x, q_window, tokens, q_stride, channels, ck)
        move_window(k_x, k_window, tokens, k_stride, channels, ck)
        move_window(v_x, v_window, tokens, v_stride, channels, cv)
    for tile in range(0, V, BV):
        for i in range(tokens):
            mine = rows + i * rows_stride
            since = tl.load(mine + _DECAY * D + ck)
            q = tl.load(mine + _Q * D + ck) * since
            k = tl.load(mine + _K * D + ck) * since
            tl.store(mine + _Y * D + tile + ct, tl.sum(S * q[:, None], 0))
            tl.store(mine + (_Y + 1) * D + tile + ct, tl.sum(S * k[:, None], 0))
        S = tl.load(at + tile + BV, mask=(ct[None, :] >= 0) & (tile + BV < V), eviction_policy="evict_first")
    tl.debug_barrier()
    for i in range(tokens):
        mine = rows + i * rows_stride
        q = tl.load(mine + _Q * D + ck)
        k = tl.load(mine + _K * D + ck)
        entry = length + i
        own = entry // _BLOCK
        local = tl.load(g_ring + entry * K + ck)
        run = tl.zeros([K], tl.float32)  # log decay from the end of the blocks not yet visited to this token
        read_k = tl.zeros([BR, V], tl.float32)
        read_q = tl.zeros([BR, V], tl.float32)
        for back in range(own + 1):
            block = own - back
            if back == 0:
                upto = local
            else:
                upto = tl.load(g_ring + (block * _BLOCK + _BLOCK - 1) * K + ck)
            k_away = k * tl.exp(run)
            q_away = q * tl.exp(run)
            for part in tl.static_range(0, _BLOCK, BR):
                ring = block * _BLOCK + part + cr
                live = ring[:, None] < entry
                keys = tl.load(k_ring + ring[:, None] * K + ck[None, :], mask=live, other=0.0).to(tl.float32)
                written = tl.load(u_ring + ring[:, None] * V + cv[None, :], mask=live, other=0.0).to(tl.float32)
                if SAFE:
                    keys = keys * tl.exp(upto + _CENTRE)[None, :]
                else:
                    each = tl.load(g_ring + ring[:, None] * K + ck[None, :], mask=live, other=0.0)
                    keys = keys * tl.exp(tl.where(live, upto[None, :] - each, 0.0))
                read_k += tl.sum(keys * k_away[None, :], 1)[:, None] * written
                read_q += tl.sum(keys * q_away[None, :], 1)[:, None] * written
            if back == 0:
                run = local
            else:
                run += upto
        old_k = tl.load(mine + (_Y + 1) * D + cv) + tl.sum(read_k, 0)
        old_q = tl.load(mine + _Y * D + cv) + tl.sum(read_q, 0)
        u = tl.load(mine + _SCALARS * D) * (tl.load(mine + _V * D + cv) - old_k)
        tl.store(u_ring + entry * V + cv, u.to(u_SHRV.dtype.element_ty))
        y = old_q + tl.load(mine + _SCALARS * D + 1) * u
        out_gate = out_gate_THV + (first + i) * gate_stride + h * V
        _finish(o + i * heads * V, y, norm_V, out_gate, eps, cv, V)
        tl.debug_barrier()
