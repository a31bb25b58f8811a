"""The normalisation kernels, on tiles of R whole rows.

A row's sum runs in an order that its width alone decides: bitwise-batch. The gradient of the weight is added up by
every program over its rows (bitwise-layout).

Legend: R rows of a tile, D width, P programs of the backward pass.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def rms_kernel(
    x_MD, added_MD, gate_MD, w_D, sum_MD, y_MD, r_M,
    M, D, eps,
    R: tl.constexpr, B: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """y = rms_norm(x), of x + added with ADD (the sum is kept too), times sigmoid(gate) with GATE."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    cols = tl.arange(0, B)
    inside = (rows < M)[:, None] & (cols < D)[None, :]
    at = rows[:, None] * D + cols[None, :]
    x = tl.load(x_MD + at, inside, 0.0)
    kind = x.dtype
    if ADD:
        x = (x.to(tl.float32) + tl.load(added_MD + at, inside, 0.0).to(tl.float32)).to(kind)
        tl.store(sum_MD + at, x, inside)
    wide = x.to(tl.float32)
    r = 1 / tl.sqrt_rn(tl.sum(wide * wide, 1) / D + eps)
    tl.store(r_M + rows, r, rows < M)
    w = tl.load(w_D + cols, cols < D, 0.0)
    if GATE:
        gate = tl.load(gate_MD + at, inside, 0.0).to(tl.float32)
        y = wide * r[:, None] * w.to(tl.float32)[None, :] / (1 + tl.exp(-gate))
    else:
        # Rounded before the weight, as the released model code does.
        y = (wide * r[:, None]).to(kind).to(tl.float32) * w.to(kind).to(tl.float32)[None, :]
    tl.store(y_MD + at, y.to(kind), inside)


@triton.jit(do_not_specialize=["M"])
def rms_backward_kernel(
    x_MD, gate_MD, w_D, r_M, d_y_MD, d_sum_MD, d_x_MD, d_gate_MD, d_w_PD,
    M, D,
    R: tl.constexpr, B: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d x = r w d - x r^3 mean(x w d), plus d_sum with ADD; d = d_y, times sigmoid(gate) with GATE."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    cols = tl.arange(0, B)
    w = tl.load(w_D + cols, cols < D, 0.0).to(tl.float32)[None, :]
    d_w = tl.zeros((R, B), tl.float32)
    for first in tl.range(program * R, M, programs * R, num_stages=STAGES):
        rows = first + tl.arange(0, R)
        inside = (rows < M)[:, None] & (cols < D)[None, :]
        at = rows[:, None] * D + cols[None, :]
        x = tl.load(x_MD + at, inside, 0.0).to(tl.float32)
        d = tl.load(d_y_MD + at, inside, 0.0).to(tl.float32)
        r = tl.load(r_M + rows, rows < M, 0.0)[:, None]
        if GATE:
            s = 1 / (1 + tl.exp(-tl.load(gate_MD + at, inside, 0.0).to(tl.float32)))
            d_gate = d * s * (1 - s) * x * w * r
            tl.store(d_gate_MD + at, d_gate.to(d_gate_MD.dtype.element_ty), inside)
            d = d * s
        d_w += x * d * r
        d = d * w
        mean = tl.sum(x * d, 1)[:, None] / D
        d_x = d * r - x * (mean * r * r * r)
        if ADD:
            d_x += tl.load(d_sum_MD + at, inside, 0.0).to(tl.float32)
        tl.store(d_x_MD + at, d_x.to(d_x_MD.dtype.element_ty), inside)
    tl.store(d_w_PD + program * D + cols, tl.sum(d_w, 0), cols < D)


__all__ = ["rms_backward_kernel", "rms_kernel"]
