"""Element-wise functions that Triton kernels of several operations share.

SiTU-GLU, see `perilune.ops.activation`: g the gate, u the linear half, in fp32.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def divide(a, b):
    """a / b to 2 ulp for 2^-126 < b < 2^126."""
    if INTERPRETED:
        return a / b
    else:
        return libdevice.fast_dividef(a, b)


@triton.jit
def exp(x):
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.fast_expf(x)


@triton.jit
def at_most(x, limit):
    """min(x, limit), NaN where x is NaN."""
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def expm1(x):
    """e^x - 1 for x <= 60, relative error below 3e-6: the series where the difference would cancel."""
    series = x * (1.0 / 120) + 1.0 / 24
    series = x * series + 1.0 / 6
    series = x * series + 0.5
    series = x * series + 1.0
    return tl.where(tl.abs(x) < 0.25, x * series, exp(x) - 1.0)


@triton.jit
def situ_parts(g, u, beta, linear_beta):
    """e^(2g/beta) - 1, e^(2u/linear_beta) - 1 and 1 + e^-g: tanh(x) = m / (m + 2) with m = e^2x - 1.

    Exponents end where tanh is 1 in fp32 (20) and sigmoid 1e-26 (60): the product of the denominators stays finite.
    """
    left = expm1(at_most(g * (2.0 / beta), 20.0))
    right = expm1(at_most(u * (2.0 / linear_beta), 20.0))
    return left, right, 1.0 + exp(at_most(-g, 60.0))


@triton.jit
def situ(left, right, away, beta, linear_beta):
    """The activation from its parts, by one division."""
    return divide(beta * linear_beta * left * right, (left + 2.0) * (right + 2.0) * away)


@triton.jit
def glu(g, u, beta, linear_beta, SITU: tl.constexpr):
    """fp32 in, fp32 out."""
    if SITU:
        left, right, away = situ_parts(g, u, beta, linear_beta)
        return situ(left, right, away, beta, linear_beta)
    else:
        return divide(g, 1.0 + exp(at_most(-g, 80.0))) * u


__all__ = ["INTERPRETED", "at_most", "divide", "exp", "expm1", "glu", "situ", "situ_parts"]
