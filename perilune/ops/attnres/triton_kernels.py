"""The attention-residual kernels. One program has one token at a time, whole rows in registers.

A token's sums run in one order, whatever the number of tokens: bitwise-batch, but for the gradients of the weights,
which every program adds up over its tokens (bitwise-layout).

Legend: T tokens, D model width, N sources, P programs of the backward pass.
"""

# ruff: noqa: RUF005 (Triton's tuples grow by addition)
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _row(sources, row, inside, i: tl.constexpr, HINT: tl.constexpr):
    """A source's row. The cache hints also keep the compiler from merging the loads of two passes into one."""
    return tl.load(sources[i] + row, inside, 0.0, eviction_policy=HINT).to(tl.float32)


@triton.jit
def _add_rows(h, sources, row, inside, p, i: tl.constexpr, N: tl.constexpr):
    """h and the next up to three sources, whose loads are under way together."""
    a = _row(sources, row, inside, i, "evict_last")
    if i + 1 < N:
        b = _row(sources, row, inside, i + 1, "evict_last")
    if i + 2 < N:
        c = _row(sources, row, inside, i + 2, "evict_last")
    h += a * p[i]
    if i + 1 < N:
        h += b * p[i + 1]
    if i + 2 < N:
        h += c * p[i + 2]
    return h


@triton.jit
def _softmax(s_N, N: tl.constexpr):
    """A token's weights, a tuple of scalars."""
    largest = tl.load(s_N)
    for i in tl.static_range(1, N):
        largest = tl.maximum(largest, tl.load(s_N + i))
    z = 0.0
    for i in tl.static_range(N):
        z += tl.exp(tl.load(s_N + i) - largest)
    scale = 1 / z
    p = ()
    for i in tl.static_range(N):
        p = p + (tl.exp(tl.load(s_N + i) - largest) * scale,)
    return p


@triton.jit
def mix_kernel(
    sources, norm_w_D, query_w_D, out_w_D, y_TD, s_TN, r_TN, r_out_T,
    D, eps, out_eps,
    N: tl.constexpr, B: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """y = h, or rms_norm(h) with NORM; the softmax runs online over the sources, each of which is read once."""
    t = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, B)
    inside = offs < D
    row = t * D + offs
    w = tl.load(norm_w_D + offs, inside, 0.0).to(tl.float32) * tl.load(query_w_D + offs, inside, 0.0).to(tl.float32)
    x = tl.load(sources[0] + row, inside, 0.0)
    h = tl.zeros((B,), tl.float32)
    largest, z = -float("inf"), 0.0
    for i in tl.static_range(N):
        wide = x.to(tl.float32)
        if i + 1 < N:
            x = tl.load(sources[i + 1] + row, inside, 0.0)
        square, dot = tl.reduce((wide * wide, wide * w), 0, _add2)
        r = 1 / tl.sqrt_rn(square / D + eps)
        s = dot * r
        tl.store(s_TN + t * N + i, s)
        tl.store(r_TN + t * N + i, r)
        if i == 0:
            largest, z, h = s, 1.0, wide
        else:
            before = largest
            largest = tl.maximum(before, s)
            shrink, e = tl.exp(before - largest), tl.exp(s - largest)
            z = z * shrink + e
            h = h * shrink + wide * e
    narrow = (h * (1 / z)).to(y_TD.dtype.element_ty)
    if NORM:
        h = narrow.to(tl.float32)
        r = 1 / tl.sqrt_rn(tl.sum(h * h, 0) / D + out_eps)
        tl.store(r_out_T + t, r)
        # Rounded before the weight, as rms_norm does.
        out_w = tl.load(out_w_D + offs, inside, 0.0).to(narrow.dtype)
        narrow = ((h * r).to(narrow.dtype).to(tl.float32) * out_w.to(tl.float32)).to(narrow.dtype)
    tl.store(y_TD + row, narrow, inside)


@triton.jit(do_not_specialize=["T"])
def mix_backward_kernel(
    sources, norm_w_D, query_w_D, out_w_D, d_y_TD, s_TN, r_TN, r_out_T, d_later, d_sources, d_w_PD, d_out_w_PD,
    T, D, n,
    N: tl.constexpr, B: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """The gradients of `mix_kernel`; with ADD those of the sources' later uses, d_later, are added.

    Three passes over a token's sources: the mixture, the slopes of the softmax, the gradients; the last two find the
    rows in the L1 or L2 cache. n is N: `if i < n` gives each step a block of its own, without which the compiler
    moves the sums of all sources to the end and spills the rows.
    """
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    offs = tl.arange(0, B)
    inside = offs < D
    kind = d_y_TD.dtype.element_ty
    d_w = tl.zeros((B,), tl.float32)
    d_out_w = tl.zeros((B,), tl.float32)
    for t in tl.range(program, T, programs):
        row = t * D + offs
        d_h = tl.load(d_y_TD + row, inside, 0.0).to(tl.float32)
        p = _softmax(s_TN + t * N, N)
        if NORM:
            h = tl.zeros((B,), tl.float32)
            for i in tl.static_range(0, N, 3):
                if i < n:
                    h = _add_rows(h, sources, row, inside, p, i, N)
            h = h.to(kind).to(tl.float32)
            r = tl.load(r_out_T + t)
            d_out_w += d_h * h * r
            d_h = d_h * tl.load(out_w_D + offs, inside, 0.0).to(tl.float32)
            mean = tl.sum(d_h * h, 0) / D
            d_h = d_h * r - h * (mean * r * r * r)
        if ADD:
            later = tl.load(d_later[0] + row, inside, 0.0, eviction_policy="evict_first")
        slopes = ()
        # Last row first: it is the freshest in the cache.
        for j in tl.static_range(0, N, 3):
            a = _row(sources, row, inside, N - 1 - j, "") * d_h
            if j + 2 < N:
                b = _row(sources, row, inside, N - 2 - j, "") * d_h
                c = _row(sources, row, inside, N - 3 - j, "") * d_h
                a, b, c = tl.reduce((a, b, c), 0, _add3)
                slopes = (c, b, a) + slopes
            elif j + 1 < N:
                b = _row(sources, row, inside, N - 2 - j, "") * d_h
                a, b = tl.reduce((a, b), 0, _add2)
                slopes = (b, a) + slopes
            else:
                slopes = (tl.sum(a, 0),) + slopes
        middle = 0.0
        for i in tl.static_range(N):
            middle += slopes[i] * p[i]
        w = tl.load(norm_w_D + offs, inside, 0.0).to(tl.float32) * tl.load(query_w_D + offs, inside, 0.0).to(tl.float32)
        for i in tl.static_range(N):
            if i < n:
                # s = r <w, x>, so ds/dx = r w - s r^2 x / D.
                r = tl.load(r_TN + t * N + i)
                on_w = (slopes[i] - middle) * p[i] * r
                on_x = -on_w * r * tl.load(s_TN + t * N + i) / D
                wide = _row(sources, row, inside, i, "evict_first")
                d_x = d_h * p[i] + w * on_w
                if ADD:
                    d_x += later.to(tl.float32)
                    if i + 1 < N:
                        later = tl.load(d_later[i + 1] + row, inside, 0.0, eviction_policy="evict_first")
                d_w += wide * on_w
                d_x += wide * on_x
                tl.store(d_sources[i] + row, d_x.to(kind), inside, eviction_policy="evict_first")
    tl.store(d_w_PD + program * D + offs, d_w, inside)
    if NORM:
        tl.store(d_out_w_PD + program * D + offs, d_out_w, inside)


@triton.jit(do_not_specialize=["P"])
def weight_gradient_kernel(
    d_w_PD, d_out_w_PD, norm_w_D, query_w_D, d_norm_w_D, d_query_w_D, d_out_w_D,
    P, D,
    B: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Add the programs' parts in order; norm_w and query_w only act through their product w."""
    cols = tl.program_id(0) * B + tl.arange(0, B)
    rows = tl.arange(0, ROWS)
    d_w = tl.zeros((ROWS, B), tl.float32)
    d_out_w = tl.zeros((ROWS, B), tl.float32)
    for first in tl.range(0, P, ROWS):
        at = (first + rows)[:, None] * D + cols[None, :]
        mask = (first + rows < P)[:, None] & (cols < D)[None, :]
        d_w += tl.load(d_w_PD + at, mask, 0.0)
        if NORM:
            d_out_w += tl.load(d_out_w_PD + at, mask, 0.0)
    inside = cols < D
    d_w_B = tl.sum(d_w, 0)
    tl.store(d_norm_w_D + cols, d_w_B * tl.load(query_w_D + cols, inside, 0.0).to(tl.float32), inside)
    tl.store(d_query_w_D + cols, d_w_B * tl.load(norm_w_D + cols, inside, 0.0).to(tl.float32), inside)
    if NORM:
        tl.store(d_out_w_D + cols, tl.sum(d_out_w, 0), inside)


__all__ = ["mix_backward_kernel", "mix_kernel", "weight_gradient_kernel"]
