"""Attention residuals without gradients on the GPU: the completed sources once for several mixers, then the stream.

A token's numbers depend on that token alone, and on a mixer alone: bitwise-batch, and over how the mixers are grouped.

Legend: T tokens, D model width, N completed sources, M mixers of a program.
"""

# ruff: noqa: RUF005 (Triton's tuples grow by addition)
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment,var-annotated"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from perilune.ops.attnres import cuda
from perilune.ops.attnres.partial import Partial
from perilune.ops.attnres.triton import block, warps
from perilune.ops.attnres.triton_kernels import _add2, _add3

MIXERS, WARPS, MERGE_WARPS = 8, 16, 8
# Few tokens: more programs, each with fewer mixers; the sources are then read again from the L2 cache.
FEW_TOKENS, FEW_MIXERS = 264, 2


def mix_completed(
    sources: Sequence[torch.Tensor], norm_w_D: Sequence[torch.Tensor], query_w_D: Sequence[torch.Tensor], eps: float
) -> list[Partial]:
    """`attnres.mix_completed`."""
    rows = tuple(x.contiguous() for x in sources)
    norm_w_D, query_w_D = ([w.contiguous() for w in some] for some in (norm_w_D, query_w_D))
    T, D = rows[0].shape
    count = len(norm_w_D)
    vectors = (*norm_w_D, *query_w_D)
    few = len(rows) < cuda.MAX_SOURCES and 1 <= count <= cuda.MAX_MIXERS
    if few and cuda.why_not(rows, vectors, vectors) is None:
        return cuda.mix_completed(rows, norm_w_D, query_w_D, eps)
    h_MTD = rows[0].new_empty(count, T, D)
    lse_MT = h_MTD.new_empty(count, T, dtype=torch.float32)
    M = FEW_MIXERS if T <= FEW_TOKENS else MIXERS
    for first in range(0, count if T else 0, M):
        last = min(first + M, count)
        # A short group repeats its last mixer, which the kernel then leaves out.
        mine = [min(m, last - 1) for m in range(first, first + M)]
        _completed_kernel[(T,)](
            rows, tuple(norm_w_D[m] for m in mine), tuple(query_w_D[m] for m in mine), h_MTD[first:], lse_MT[first:],
            T, D, eps, last - first, N=len(rows), M=M, B=block(D), num_warps=warps(D, WARPS),
        )  # fmt: skip
    return [Partial(h_MTD[m], lse_MT[m]) for m in range(count)]


def merge_norm(
    partial: Partial,
    live_TD: torch.Tensor,
    norm_w_D: torch.Tensor,
    query_w_D: torch.Tensor,
    eps: float,
    out_w_D: torch.Tensor,
    out_eps: float,
) -> torch.Tensor:
    """`attnres.merge_norm`."""
    live_TD, norm_w_D, query_w_D, out_w_D = (x.contiguous() for x in (live_TD, norm_w_D, query_w_D, out_w_D))
    partial = Partial(partial.h_TD.contiguous(), partial.lse_T.contiguous())
    if cuda.why_not([live_TD], (norm_w_D, query_w_D, out_w_D), [partial.h_TD]) is None:
        return cuda.merge_norm(partial, live_TD, norm_w_D, query_w_D, eps, out_w_D, out_eps)
    T, D = live_TD.shape
    x_TD = torch.empty_like(live_TD)
    if T:
        _merge_kernel[(T,)](
            partial.h_TD, partial.lse_T, live_TD, norm_w_D, query_w_D, out_w_D, x_TD, D, eps, out_eps,
            B=block(D), num_warps=warps(D, MERGE_WARPS),
        )  # fmt: skip
    return x_TD


@triton.jit
def _scores(x, w, N: tl.constexpr):
    """<w, x_i> of every source, a tuple of scalars; three sums a reduction."""
    dots = ()
    for i in tl.static_range(0, N, 3):
        a = x[i].to(tl.float32) * w
        if i + 2 < N:
            a, b, c = tl.reduce((a, x[i + 1].to(tl.float32) * w, x[i + 2].to(tl.float32) * w), 0, _add3)
            dots = dots + (a, b, c)
        elif i + 1 < N:
            a, b = tl.reduce((a, x[i + 1].to(tl.float32) * w), 0, _add2)
            dots = dots + (a, b)
        else:
            dots = dots + (tl.sum(a, 0),)
    return dots


@triton.jit
def _mixture(x, r, w, N: tl.constexpr):
    """(h, log sum e^s) over the sources."""
    dots = _scores(x, w, N)
    largest = dots[0] * r[0]
    for i in tl.static_range(1, N):
        largest = tl.maximum(largest, dots[i] * r[i])
    z = 0.0
    h = tl.zeros(w.shape, tl.float32)
    for i in tl.static_range(N):
        e = tl.exp(dots[i] * r[i] - largest)
        z += e
        h += x[i].to(tl.float32) * e
    return h * (1 / z), largest + tl.log(z)


@triton.jit(do_not_specialize=["T", "mixers"])
def _completed_kernel(
    sources, norm_w_D, query_w_D, h_MTD, lse_MT,
    T, D, eps, mixers,
    N: tl.constexpr, M: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One token: its sources stay in registers while mixer after mixer goes over them."""
    t = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, B)
    inside = offs < D
    x = ()
    for i in tl.static_range(N):
        x = x + (tl.load(sources[i] + t * D + offs, inside, 0.0),)
    r = ()
    for i in tl.static_range(N):
        wide = x[i].to(tl.float32)
        r = r + (1 / tl.sqrt_rn(tl.sum(wide * wide, 0) / D + eps),)
    for m in tl.static_range(M):
        # A block of its own keeps the compiler from mixing the mixers' work, for which registers do not suffice.
        if m < mixers:
            w = tl.load(norm_w_D[m] + offs, inside, 0.0).to(tl.float32)
            w *= tl.load(query_w_D[m] + offs, inside, 0.0).to(tl.float32)
            h, lse = _mixture(x, r, w, N)
            at = (t + m * T.to(tl.int64)) * D
            tl.store(h_MTD + at + offs, h.to(h_MTD.dtype.element_ty), inside)
            tl.store(lse_MT + (t + m * T.to(tl.int64)), lse)


@triton.jit
def _merge_kernel(
    h_TD, lse_T, live_TD, norm_w_D, query_w_D, out_w_D, x_TD,
    D, eps, out_eps,
    B: tl.constexpr,
):  # fmt: skip
    """h + p (live - h) with p the live sum's weight; then the norm."""
    t = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, B)
    inside = offs < D
    narrow = tl.load(live_TD + t * D + offs, inside, 0.0)
    h = tl.load(h_TD + t * D + offs, inside, 0.0).to(tl.float32)
    live = narrow.to(tl.float32)
    w = tl.load(norm_w_D + offs, inside, 0.0).to(tl.float32) * tl.load(query_w_D + offs, inside, 0.0).to(tl.float32)
    square, dot = tl.reduce((live * live, live * w), 0, _add2)
    s = dot * (1 / tl.sqrt_rn(square / D + eps))
    p = 1 / (1 + tl.exp(tl.load(lse_T + t) - s))
    h = (h + p * (live - h)).to(narrow.dtype).to(tl.float32)
    r = 1 / tl.sqrt_rn(tl.sum(h * h, 0) / D + out_eps)
    out_w = tl.load(out_w_D + offs, inside, 0.0).to(narrow.dtype)
    x = (h * r).to(narrow.dtype).to(tl.float32) * out_w.to(tl.float32)
    tl.store(x_TD + t * D + offs, x.to(narrow.dtype), inside)


__all__ = ["merge_norm", "mix_completed"]
