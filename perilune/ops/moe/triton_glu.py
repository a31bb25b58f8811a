"""The gated activation between the two grouped products: h -> a, and (u, h) -> (d_h, a, d_w), each in one pass.

    a = w left(g) right(u'),   SiTU: left = beta tanh(g / beta) sigmoid(g), right = linear_beta tanh(u' / linear_beta);
                               SwiGLU: left = g sigmoid(g), right = u'.
Computed in fp32 from what stands in memory and rounded once. A row is one program's, so d_w adds in a fixed order.

Legend: R rows, E experts, F expert width; h [R, 2F] holds g then u'; u [R, F] is d_y through the down weights.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.triton_math import at_most, divide, exp, glu, situ_parts


@triton.jit
def glu_kernel(
    h, w, a, offs, E, beta, linear_beta,
    F: tl.constexpr, BF: tl.constexpr, SITU: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64)
    for step in range(tl.cdiv(tl.load(offs + E - 1) - first, tl.num_programs(0))):
        r = first + step * tl.num_programs(0)
        weight = 1.0
        if WEIGHTED:
            weight = tl.load(w + r)
        for start in range(0, F, BF):
            f = start + tl.arange(0, BF)
            inside = f < F
            gate = tl.load(h + r * 2 * F + f, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(h + r * 2 * F + F + f, mask=inside, other=0.0).to(tl.float32)
            out = glu(gate, up, beta, linear_beta, SITU) * weight
            tl.store(a + r * F + f, out.to(a.dtype.element_ty), mask=inside)


@triton.jit
def glu_backward_kernel(
    u, h, w, d_h, a, d_w, offs, R, E, beta, linear_beta,
    F: tl.constexpr, BF: tl.constexpr, SITU: tl.constexpr, WEIGHTED: tl.constexpr, NEED_A: tl.constexpr,
):  # fmt: skip
    """Rows past offs[-1] get d_w = 0 and nothing else; `a` is the weighted activation."""
    first = tl.program_id(0).to(tl.int64)
    used = tl.load(offs + E - 1)
    for step in range(tl.cdiv(used - first, tl.num_programs(0))):
        r = first + step * tl.num_programs(0)
        weight = 1.0
        if WEIGHTED:
            weight = tl.load(w + r)
        total = tl.zeros([BF], tl.float32)
        for start in range(0, F, BF):
            f = start + tl.arange(0, BF)
            inside = f < F
            gate = tl.load(h + r * 2 * F + f, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(h + r * 2 * F + F + f, mask=inside, other=0.0).to(tl.float32)
            d = tl.load(u + r * F + f, mask=inside, other=0.0).to(tl.float32)
            out = glu(gate, up, beta, linear_beta, SITU)
            if SITU:
                left, right, away = situ_parts(gate, up, beta, linear_beta)
                s = divide(1.0, away)
                t = divide(left, left + 2.0)
                v = divide(right, right + 2.0)
                d_up = beta * t * s * (1.0 - v * v)
                d_gate = s * (1.0 - t * t + beta * t * (1.0 - s)) * (linear_beta * v)
            else:
                s = divide(1.0, 1.0 + exp(at_most(-gate, 80.0)))
                d_up = gate * s
                d_gate = s * (1.0 + gate * (1.0 - s)) * up
            total += d * out
            d *= weight
            tl.store(d_h + r * 2 * F + f, (d * d_gate).to(d_h.dtype.element_ty), mask=inside)
            tl.store(d_h + r * 2 * F + F + f, (d * d_up).to(d_h.dtype.element_ty), mask=inside)
            if NEED_A:
                tl.store(a + r * F + f, (out * weight).to(a.dtype.element_ty), mask=inside)
        if WEIGHTED:
            tl.store(d_w + r, tl.sum(total, 0))
    if WEIGHTED:
        for step in range(tl.cdiv(R - used - first * BF, tl.num_programs(0) * BF)):
            r = used + first * BF + step * tl.num_programs(0) * BF + tl.arange(0, BF)
            tl.store(d_w + r, tl.zeros([BF], tl.float32), mask=r < R)


@triton.jit
def zero_tail_kernel(x, offs, E, R, L: tl.constexpr, BL: tl.constexpr):
    """Zero the rows of [R, L] past offs[-1]."""
    first = tl.load(offs + E - 1).to(tl.int64) + tl.program_id(0)
    for step in range(tl.cdiv(R - first, tl.num_programs(0))):
        row = first + step * tl.num_programs(0)
        for start in range(0, L, BL):
            c = start + tl.arange(0, BL)
            tl.store(x + row * L + c, tl.zeros([BL], x.dtype.element_ty), mask=c < L)
