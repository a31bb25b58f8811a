"""Triton kernels of KDA decode: what `decode.py` specifies, one program a (head, sequence), fp32 inside.

A program works in three phases, whatever the number of tokens: prepare every token (convolution, norms, gate) into a
scratch row, stream the matrix once in column tiles through all tokens, finish every token (output norm). One decode
step and the verification of eight drafts run the same instructions in the same order: they agree bit for bit.

Few warps a program and many programs on a multiprocessor hide the latencies; with 8 warps the barriers between the
phases of small vectors dominate (docs/kda-decode.md).

Legend as in decode.py; pointer arguments carry the name of their tensor.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc,unused-ignore"

from __future__ import annotations

from dataclasses import dataclass

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
# Scratch rows of a token and head.
_Q, _K, _DECAY, _V, _SCALARS, _Y = (tl.constexpr(i) for i in range(6))
_ROWS = tl.constexpr(8)
_RUNTIME = ["tokens", "store", "shift", "heads", "beta_stride"]


@dataclass(frozen=True)
class Launch:
    """How a kernel is compiled: warps of a program, columns of the matrix in a tile, registers a thread at most,
    whether the next tile is loaded ahead, and (tail) ring entries in a tile."""

    warps: int
    columns: int
    registers: int | None = None
    ahead: bool = False
    ring_rows: int = 8


# The fastest of those measured on one H200 (docs/kda-decode.md). One configuration for every batch size, so that a
# sequence's bits do not depend on its neighbours.
STEP = Launch(4, 64)
TAIL = Launch(2, 32, ring_rows=16)
FOLD_WARPS = 4


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
def _shift(x, window, count, x_stride, window_stride, at):
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
def _step_kernel(
    q_THK, k_THK, v_THV, g_raw_THK, beta_logit_TH, out_gate_THV,
    conv_q_CW, conv_k_CW, conv_v_CW, A_log_H, dt_bias_HK, norm_V,
    matrix_SHKV, window_S3C, slots_N, counts_N, scratch, o_THV,
    q_stride, k_stride, v_stride, g_stride, beta_stride, gate_stride,
    heads, tokens, store, eps, lower_bound,
    SAFE: tl.constexpr, COUNTED: tl.constexpr, AHEAD: tl.constexpr, D: tl.constexpr,
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
    rows = scratch + (first * heads + h) * (_ROWS * D)
    rows_stride = heads * _ROWS * D
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
        _shift(q_x, q_window, count, q_stride, channels, ck)
        _shift(k_x, k_window, count, k_stride, channels, ck)
        _shift(v_x, v_window, count, v_stride, channels, cv)
    tl.debug_barrier()
    for tile in range(0, V, BV):
        if AHEAD:
            following = tl.load(
                at + tile + BV, mask=(ct[None, :] >= 0) & (tile + BV < V), eviction_policy="evict_first"
            )
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
        if AHEAD:
            S = following
        else:
            S = tl.load(at + tile + BV, mask=(ct[None, :] >= 0) & (tile + BV < V), eviction_policy="evict_first")
    tl.debug_barrier()
    for i in range(count):
        y = tl.load(rows + i * rows_stride + _Y * D + cv)
        out_gate = out_gate_THV + (first + i) * gate_stride + h * V
        _finish(o + i * heads * V, y, norm_V, out_gate, eps, cv, V)
    _blank(o, count, tokens, heads * V, cv, V)


@triton.jit(do_not_specialize=_RUNTIME)
def _tail_kernel(
    q_THK, k_THK, v_THV, g_raw_THK, beta_logit_TH, out_gate_THV,
    conv_q_CW, conv_k_CW, conv_v_CW, A_log_H, dt_bias_HK, norm_V,
    matrix_SHKV, window_S3C, slots_N, lengths_N, k_SHRK, u_SHRV, g_SHRK, scratch, o_THV,
    q_stride, k_stride, v_stride, g_stride, beta_stride, gate_stride,
    heads, tokens, shift, eps, lower_bound,
    SAFE: tl.constexpr, AHEAD: tl.constexpr, D: tl.constexpr,
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
    at = matrix_SHKV + slab * (K * V) + ck[:, None] * V + ct[None, :]
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
    rows = scratch + (first * heads + h) * (_ROWS * D)
    rows_stride = heads * _ROWS * D
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
        _shift(q_x, q_window, tokens, q_stride, channels, ck)
        _shift(k_x, k_window, tokens, k_stride, channels, ck)
        _shift(v_x, v_window, tokens, v_stride, channels, cv)
    for tile in range(0, V, BV):
        if AHEAD:
            following = tl.load(
                at + tile + BV, mask=(ct[None, :] >= 0) & (tile + BV < V), eviction_policy="evict_first"
            )
        for i in range(tokens):
            mine = rows + i * rows_stride
            since = tl.load(mine + _DECAY * D + ck)
            q = tl.load(mine + _Q * D + ck) * since
            k = tl.load(mine + _K * D + ck) * since
            tl.store(mine + _Y * D + tile + ct, tl.sum(S * q[:, None], 0))
            tl.store(mine + (_Y + 1) * D + tile + ct, tl.sum(S * k[:, None], 0))
        if AHEAD:
            S = following
        else:
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
    _shift(q_x, q_window, count, q_stride, channels, ck)
    _shift(k_x, k_window, count, k_stride, channels, ck)
    _shift(v_x, v_window, count, v_stride, channels, cv)


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


def _scratch(inputs: Projected, K: int, V: int) -> torch.Tensor:
    """fp32 rows for what the phases of a program hand on; stays in the L2 cache."""
    tokens, heads = inputs.q_THK.shape[:2]
    return torch.empty(tokens, heads, _ROWS.value, max(K, V), dtype=torch.float32, device=inputs.q_THK.device)


def step(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    slots_N: torch.Tensor,
    tokens: int,
    counts_N: torch.Tensor | None,
    store: bool,
    launch: Launch = STEP,
) -> torch.Tensor:
    """The in-place form; see `decode_step_inplace`, `verify`, `replay_inplace`."""
    _, heads, K, V = matrix_SHKV.shape
    o_THV = torch.empty_like(inputs.v_THV, memory_format=torch.contiguous_format)
    _step_kernel[(heads, len(slots_N))](
        *_arguments(inputs, weights), matrix_SHKV, window_S3C, slots_N, slots_N if counts_N is None else counts_N,
        _scratch(inputs, K, V), o_THV, *_strides(inputs), heads, tokens, int(store),
        weights.eps, weights.gate.lower_bound or 0.0,
        SAFE=weights.gate.mode == "safe", COUNTED=counts_N is not None, AHEAD=launch.ahead, D=max(K, V), K=K, V=V,
        BV=min(launch.columns, V), num_warps=launch.warps, maxnreg=launch.registers,
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
    target_N: torch.Tensor | None = None,
    launch: Launch = TAIL,
) -> torch.Tensor:
    """The tail form; see `tail_step_inplace`, `tail_verify_inplace`."""
    _, heads, K, V = matrix_SHKV.shape
    o_THV = torch.empty_like(inputs.v_THV, memory_format=torch.contiguous_format)
    _tail_kernel[(heads, len(slots_N))](
        *_arguments(inputs, weights), matrix_SHKV, window_S3C, slots_N, lengths_N,
        tail.k_SHRK, tail.u_SHRV, tail.g_SHRK, _scratch(inputs, K, V), o_THV,
        *_strides(inputs), heads, tokens, int(shift),
        weights.eps, weights.gate.lower_bound or 0.0,
        SAFE=weights.gate.mode == "safe", AHEAD=launch.ahead, D=max(K, V), K=K, V=V,
        BV=min(launch.columns, V), BR=launch.ring_rows, num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    if target_N is not None:
        fold(matrix_SHKV, tail, lengths_N + tokens, slots_N, target_N, weights.gate)
    return o_THV


def fold(
    matrix_SHKV: torch.Tensor,
    tail: Tail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    target_N: torch.Tensor,
    gate: Gate,
    warps: int = FOLD_WARPS,
    precision: str = "ieee",
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
