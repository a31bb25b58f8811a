"""The router on the GPU: scores, biased choice, weights and threshold in one pass over the logits, and its gradient.

A token is one warp's. Score and expert index are packed into one 64-bit key, so that a plain maximum finds the best
and, of equal ones, the lowest index; J + 1 rounds give the J choices and the threshold.

Legend: T tokens, E experts, J choices a token.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def ordered(x):
    """int32 that orders as the float x does: the sign bit turns the order of negative numbers around."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def route_kernel(
    logits, bias, ids, weights, scores, threshold, E, scale,
    J: tl.constexpr, BE: tl.constexpr, BJ: tl.constexpr,
    RENORMALIZE: tl.constexpr, THRESHOLD: tl.constexpr, DEVICE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    x = tl.load(logits + t * E + e, mask=e < E, other=0.0).to(tl.float32)
    # The very operations of the reference (accurate exp, rounded division), so that ids agree with it to the bit.
    if DEVICE:
        s = tl.div_rn(1.0, 1.0 + libdevice.exp(-x))
    else:
        s = 1.0 / (1.0 + tl.exp(-x))
    tl.store(scores + t * E + e, s, mask=e < E)
    biased = s + tl.load(bias + e, mask=e < E, other=0.0)
    key = (ordered(biased).to(tl.int64) << 32) | (BE - 1 - e).to(tl.int64)
    lowest = tl.full([], -(2**63), tl.int64)
    key = tl.where(e < E, key, lowest)
    j = tl.arange(0, BJ)
    chosen = tl.zeros([BJ], tl.int32)
    for i in tl.static_range(J):
        best = tl.max(key, 0)
        chosen = tl.where(j == i, BE - 1 - (best & 0xFFFFFFFF).to(tl.int32), chosen)
        key = tl.where(key == best, lowest, key)
    if THRESHOLD:
        last = BE - 1 - (tl.max(key, 0) & 0xFFFFFFFF).to(tl.int32)
        tl.store(threshold + t, tl.sum(tl.where(e == last, biased, 0.0), 0))
    w = tl.where(j < J, tl.gather(s, chosen, 0), 0.0)
    if RENORMALIZE:
        w = w / (tl.sum(w, 0) + 1e-20)
    tl.store(ids + t * J + j, chosen.to(tl.int64), mask=j < J)
    tl.store(weights + t * J + j, w * scale, mask=j < J)


@triton.jit
def route_backward_kernel(
    d_weights, d_scores, ids, scores, d_logits, E, scale,
    J: tl.constexpr, BE: tl.constexpr, BJ: tl.constexpr, RENORMALIZE: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """d_logits [T, E]: through the chosen weights and, with SCORES, through the scores themselves."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    j = tl.arange(0, BJ)
    s = tl.load(scores + t * E + e, mask=e < E, other=0.0)
    chosen = tl.load(ids + t * J + j, mask=j < J, other=0).to(tl.int32)
    d = tl.load(d_weights + t * J + j, mask=j < J, other=0.0) * scale
    if RENORMALIZE:
        w = tl.where(j < J, tl.gather(s, chosen, 0), 0.0)
        total = tl.sum(w, 0) + 1e-20
        d = tl.where(j < J, (d - tl.sum(d * w, 0) / total) / total, 0.0)
    d_s = tl.zeros([BE], tl.float32)
    for i in tl.static_range(J):
        here = e == tl.sum(tl.where(j == i, chosen, 0), 0)
        d_s = tl.where(here, tl.sum(tl.where(j == i, d, 0.0), 0), d_s)
    if SCORES:
        d_s += tl.load(d_scores + t * E + e, mask=e < E, other=0.0)
    tl.store(d_logits + t * E + e, (d_s * s * (1.0 - s)).to(d_logits.dtype.element_ty), mask=e < E)
