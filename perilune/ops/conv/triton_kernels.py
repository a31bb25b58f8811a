"""The short convolution's kernels.

A token reads its own document alone: `bounds` has, for each token, the first row of its document and the row after its
last. Rows before the first are those of the document's window. bitwise-batch, but for the gradient of the weights.

Legend: T tokens, N sequences, C channels, S tokens of a span, P spans.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.triton_math import divide, exp


@triton.jit
def _input(u_TC, stride, window_N3C, n, t, first, cols, inside, C, WINDOW: tl.constexpr):
    """Row t of a document that begins at row `first`; earlier rows come from its window, or are zeros."""
    x = tl.load(u_TC + t * stride + cols, inside & (t >= first), 0.0).to(tl.float32)
    if WINDOW:
        held = (n * 3 + 3 + t - first) * C + cols
        x += tl.load(window_N3C + held, inside & (t < first), 0.0).to(tl.float32)
    return x


@triton.jit
def _taps(w0, w1, w2, w3, x0, x1, x2, x3):
    """Fused by hand: copies of the loop's body must not be free to round in different places."""
    return tl.fma(w3, x0, tl.fma(w2, x1, tl.fma(w1, x2, w0 * x3)))


@triton.jit(do_not_specialize=["T"])
def conv_kernel(
    u_TC, w_CW, window_N3C, ids_T, bounds_2T, y_TC,
    T, C, stride,
    S: tl.constexpr, B: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A span of S tokens one after the other by B channels; the last three inputs stay in registers.

    Four tokens a round, so that inputs need not move from register to register.
    """
    start = tl.program_id(0).to(tl.int64) * S
    cols = tl.program_id(1) * B + tl.arange(0, B)
    inside = cols < C
    w0 = tl.load(w_CW + cols * 4, inside, 0.0).to(tl.float32)
    w1 = tl.load(w_CW + cols * 4 + 1, inside, 0.0).to(tl.float32)
    w2 = tl.load(w_CW + cols * 4 + 2, inside, 0.0).to(tl.float32)
    w3 = tl.load(w_CW + cols * 4 + 3, inside, 0.0).to(tl.float32)
    zero = tl.zeros((B,), tl.float32)
    x1, x2, x3 = zero, zero, zero
    x_next = tl.load(u_TC + start * stride + cols, inside & (start < T), 0.0)
    x_then = tl.load(u_TC + (start + 1) * stride + cols, inside & (start + 1 < T), 0.0)
    first_next = tl.load(bounds_2T + start, start < T, 0).to(tl.int64)
    for k in tl.range(0, S, loop_unroll_factor=4):
        t = start + k
        alive = t < T
        first = first_next
        here = inside & alive
        if (k == 0) | (t == first):
            n = tl.load(ids_T + t, alive, 0).to(tl.int64) if WINDOW else 0
            x1 = _input(u_TC, stride, window_N3C, n, t - 1, first, cols, here, C, WINDOW)
            x2 = _input(u_TC, stride, window_N3C, n, t - 2, first, cols, here, C, WINDOW)
            x3 = _input(u_TC, stride, window_N3C, n, t - 3, first, cols, here, C, WINDOW)
        x0 = x_next.to(tl.float32)
        # Under way while this token and the next are worked on.
        x_next = x_then
        x_then = tl.load(u_TC + (t + 2) * stride + cols, inside & (t + 2 < T), 0.0)
        first_next = tl.load(bounds_2T + t + 1, t + 1 < T, 0).to(tl.int64)
        z = _taps(w0, w1, w2, w3, x0, x1, x2, x3)
        tl.store(y_TC + t * C + cols, divide(z, 1 + exp(tl.minimum(-z, 80.0))).to(y_TC.dtype.element_ty), here)
        x3, x2, x1 = x2, x1, x0


@triton.jit
def _slope(z):
    """silu'(z) = s (1 + z (1 - s))."""
    s = divide(1.0, 1 + exp(tl.minimum(-z, 80.0)))
    return s * tl.fma(z, 1 - s, 1.0)


@triton.jit(do_not_specialize=["T"])
def conv_backward_kernel(
    u_TC, w_CW, window_N3C, ids_T, bounds_2T, d_y_TC, d_after_N3C, d_u_TC, d_w_P4C,
    T, C, stride, d_stride,
    S: tl.constexpr, B: tl.constexpr, WINDOW: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """One pass over a span and the three tokens behind it; the sums of the last three tokens stay in registers."""
    span = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * B + tl.arange(0, B)
    inside = cols < C
    w0 = tl.load(w_CW + cols * 4, inside, 0.0).to(tl.float32)
    w1 = tl.load(w_CW + cols * 4 + 1, inside, 0.0).to(tl.float32)
    w2 = tl.load(w_CW + cols * 4 + 2, inside, 0.0).to(tl.float32)
    w3 = tl.load(w_CW + cols * 4 + 3, inside, 0.0).to(tl.float32)
    zero = tl.zeros((B,), tl.float32)
    d_w0, d_w1, d_w2, d_w3 = zero, zero, zero, zero
    # Sums of dz that tokens t-1, t-2, t-3 have so far.
    d1, d2, d3 = zero, zero, zero
    start = span * S
    x1, x2, x3 = zero, zero, zero
    x_next = tl.load(u_TC + start * stride + cols, inside & (start < T), 0.0)
    d_y_next = tl.load(d_y_TC + start * d_stride + cols, inside & (start < T), 0.0)
    first_next = tl.load(bounds_2T + start, start < T, 0).to(tl.int64)
    for k in tl.range(0, S + 3):
        t = start + k
        alive = t < T
        first = first_next
        n = tl.load(ids_T + t, alive, 0).to(tl.int64) if WINDOW or AFTER else 0
        here = inside & alive
        if (k == 0) | (t == first):
            x1 = _input(u_TC, stride, window_N3C, n, t - 1, first, cols, here, C, WINDOW)
            x2 = _input(u_TC, stride, window_N3C, n, t - 2, first, cols, here, C, WINDOW)
            x3 = _input(u_TC, stride, window_N3C, n, t - 3, first, cols, here, C, WINDOW)
        x0, d_y = x_next.to(tl.float32), d_y_next.to(tl.float32)
        # Under way while this token is worked on.
        x_next = tl.load(u_TC + (t + 1) * stride + cols, inside & (t + 1 < T), 0.0)
        d_y_next = tl.load(d_y_TC + (t + 1) * d_stride + cols, inside & (t + 1 < T), 0.0)
        first_next = tl.load(bounds_2T + t + 1, t + 1 < T, 0).to(tl.int64)
        dz = d_y * _slope(_taps(w0, w1, w2, w3, x0, x1, x2, x3))
        if k < S:
            d_w0 = tl.fma(dz, x3, d_w0)
            d_w1 = tl.fma(dz, x2, d_w1)
            d_w2 = tl.fma(dz, x1, d_w2)
            d_w3 = tl.fma(dz, x0, d_w3)
        if t - first >= 3:
            d1 = tl.fma(dz, w2, d1)
            d2 = tl.fma(dz, w1, d2)
            d3 = tl.fma(dz, w0, d3)
        else:
            # Token t - j belongs to the same document when it is not before its first row.
            d1 = tl.where(t - 1 >= first, tl.fma(dz, w2, d1), d1)
            d2 = tl.where(t - 2 >= first, tl.fma(dz, w1, d2), d2)
        if k >= 3:
            _store(d_u_TC, d_after_N3C, ids_T, bounds_2T, d3, t - 3, T, cols, inside, C, AFTER)
        d3, d2, d1 = d2, d1, dz * w3
        x3, x2, x1 = x2, x1, x0
    at = span * 4 * C + cols
    tl.store(d_w_P4C + at, d_w0, inside)
    tl.store(d_w_P4C + at + C, d_w1, inside)
    tl.store(d_w_P4C + at + 2 * C, d_w2, inside)
    tl.store(d_w_P4C + at + 3 * C, d_w3, inside)


@triton.jit
def _store(d_u_TC, d_after_N3C, ids_T, bounds_2T, d, t, T, cols, inside, C, AFTER: tl.constexpr):
    here = inside & (t < T)
    if AFTER:
        n = tl.load(ids_T + t, t < T, 0).to(tl.int64)
        j = t - tl.load(bounds_2T + T + t, t < T, 0).to(tl.int64) + 3
        d += tl.load(d_after_N3C + (n * 3 + j) * C + cols, here & (j >= 0), 0.0).to(tl.float32)
    tl.store(d_u_TC + t * C + cols, d.to(d_u_TC.dtype.element_ty), here)


@triton.jit
def window_after_kernel(u_TC, window_N3C, cu_N, after_N3C, C, stride, B: tl.constexpr, WINDOW: tl.constexpr):
    """The last three inputs of each document, reaching back into its window."""
    n = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * B + tl.arange(0, B)
    first, last = tl.load(cu_N + n).to(tl.int64), tl.load(cu_N + n + 1).to(tl.int64)
    for j in tl.static_range(3):
        x = _input(u_TC, stride, window_N3C, n, last - 3 + j, first, cols, cols < C, C, WINDOW)
        tl.store(after_N3C + (n * 3 + j) * C + cols, x.to(after_N3C.dtype.element_ty), cols < C)


@triton.jit
def window_gradient_kernel(
    u_TC, w_CW, window_N3C, cu_N, d_y_TC, d_after_N3C, d_window_N3C,
    C, stride, d_stride,
    B: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Row r of a window weighs in tokens 0..r of its document, and in the window after it when that reaches back."""
    n = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * B + tl.arange(0, B)
    inside = cols < C
    first, last = tl.load(cu_N + n).to(tl.int64), tl.load(cu_N + n + 1).to(tl.int64)
    for r in tl.static_range(3):
        d = tl.zeros((B,), tl.float32)
        for k in tl.static_range(r + 1):
            t = first + k
            here = inside & (t < last)
            z = tl.zeros((B,), tl.float32)
            for j in tl.static_range(4):
                tap = tl.load(w_CW + cols * 4 + j, inside, 0.0).to(tl.float32)
                z += tap * _input(u_TC, stride, window_N3C, n, t - 3 + j, first, cols, here, C, True)
            d_y = tl.load(d_y_TC + t * d_stride + cols, here, 0.0).to(tl.float32)
            d += d_y * _slope(z) * tl.load(w_CW + cols * 4 + r - k, inside, 0.0).to(tl.float32)
        if AFTER:
            # The window after is the rows last - 3 ..., and this row lies at first - 3 + r.
            j = first - last + r
            d += tl.load(d_after_N3C + (n * 3 + j) * C + cols, inside & (j >= 0), 0.0).to(tl.float32)
        tl.store(d_window_N3C + (n * 3 + r) * C + cols, d.to(d_window_N3C.dtype.element_ty), inside)


__all__ = ["conv_backward_kernel", "conv_kernel", "window_after_kernel", "window_gradient_kernel"]
