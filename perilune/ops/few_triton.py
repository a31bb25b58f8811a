"""Matrix products of a handful of rows: a stream of weights past them, without matrix units.

Libraries tile such a product for matrix units and leave most of the device idle where the weight is small. Here each
program has a few rows of the weight, whole, so that hundreds of them read at once.

Legend: T rows of x (few), D input width, F output width; BT, BF, BD the piece that a program has at a time.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from perilune.config import Activation
from perilune.ops.triton_math import glu


def multiply_few(x_TD: torch.Tensor, w_FD: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """y_TF = x w^T for one to four rows, added in fp32 and rounded once to out_dtype (default: x's). No gradient.

    Rows of x and of w may lie apart, numbers of a row must not.
    """
    (T, D), F = x_TD.shape, w_FD.shape[0]
    y_TF = torch.empty(T, F, dtype=out_dtype or x_TD.dtype, device=x_TD.device)
    BT = triton.next_power_of_2(T)
    BF = 4 if BT == 1 else 2
    few_kernel[(triton.cdiv(F, BF),)](
        x_TD, w_FD, y_TF, T, F, x_TD.stride(0), w_FD.stride(0),
        D=D, BT=BT, BF=BF, BD=min(1024, triton.next_power_of_2(D)), num_warps=4,
    )  # fmt: skip
    return y_TF


def glu_few(x_TD: torch.Tensor, gate_FD: torch.Tensor, up_FD: torch.Tensor, activation: Activation) -> torch.Tensor:
    """a_TF = glu(x gate^T, x up^T) for one to four rows; the products are rounded to x's dtype before."""
    (T, D), F = x_TD.shape, gate_FD.shape[0]
    a_TF = x_TD.new_empty(T, F)
    glu_few_kernel[(triton.cdiv(F, 2),)](
        x_TD, gate_FD, up_FD, a_TF, T, F, x_TD.stride(0), gate_FD.stride(0), up_FD.stride(0),
        activation.beta, activation.linear_beta,
        D=D, BT=triton.next_power_of_2(T), BF=2, BD=min(1024, triton.next_power_of_2(D)),
        SITU=activation.kind == "situ", num_warps=4,
    )  # fmt: skip
    return a_TF


@triton.jit
def product(x_row, w_row, t_exist, f_exist, D: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr):
    """[BT, BF] fp32 of the rows that exist; zero elsewhere."""
    acc = tl.zeros([BT, BF, BD], tl.float32)
    for first in tl.static_range(0, D, BD):
        d = first + tl.arange(0, BD)
        inside = (d < D)[None, :]
        x_tile = tl.load(x_row + d[None, :], mask=t_exist[:, None] & inside, other=0.0).to(tl.float32)
        w_tile = tl.load(w_row + d[None, :], mask=f_exist[:, None] & inside, other=0.0).to(tl.float32)
        acc += x_tile[:, None, :] * w_tile[None, :, :]
    return tl.sum(acc, 2)


@triton.jit
def few_kernel(
    x, w, y, T, F, x_stride, w_stride, D: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr
):
    t = tl.arange(0, BT)
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    x_row = x + t.to(tl.int64)[:, None] * x_stride
    w_row = w + f.to(tl.int64)[:, None] * w_stride
    total = product(x_row, w_row, t < T, f < F, D, BT, BF, BD)
    inside = (t < T)[:, None] & (f < F)[None, :]
    tl.store(y + t[:, None] * F + f[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def glu_few_kernel(
    x, gate, up, y, T, F, x_stride, gate_stride, up_stride, beta, linear_beta,
    D: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, SITU: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, BT)
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    x_row = x + t.to(tl.int64)[:, None] * x_stride
    g = product(x_row, gate + f.to(tl.int64)[:, None] * gate_stride, t < T, f < F, D, BT, BF, BD)
    u = product(x_row, up + f.to(tl.int64)[:, None] * up_stride, t < T, f < F, D, BT, BF, BD)
    g = g.to(y.dtype.element_ty).to(tl.float32)
    u = u.to(y.dtype.element_ty).to(tl.float32)
    inside = (t < T)[:, None] & (f < F)[None, :]
    tl.store(y + t[:, None] * F + f[None, :], glu(g, u, beta, linear_beta, SITU).to(y.dtype.element_ty), mask=inside)


__all__ = ["glu_few", "multiply_few"]
