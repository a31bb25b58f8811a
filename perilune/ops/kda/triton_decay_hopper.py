"""Decays of KDA kernel K1 on Hopper in Gluon, for `triton_prepare_hopper`: gates, their running sums, windows.

A bounded gate keeps 2^(G_i + 115) and 2^(-115 - G_j) in float32's range over a block of 32 rows. A softplus gate has no
bound, so its columns are sorted into windows of 208 powers of two, channel by channel: window w holds the rows with
-208 (w + 1) < G <= -208 w, and its factors are 2^(G_i + 208 w + 115) and 2^(-115 - 208 w - G_j). Every pair of rows
meets in the window of its column j:
- row i, at or after j, has a factor of at most 2^115; where it underflows, the pair is below 2^-33;
- columns of other windows are exact zeros, so a window adds nothing to pairs that it does not own. Later gates add
  windows and change no earlier sum, not by a bit.
A block whose channels fall by less than 208 powers of two (144 nats) has the first window only, and no loop.

Legend: G running log2 decay of a block (in the code plus HALF), E log2 decay of the whole block.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language import PropagateNan

from perilune.ops.kda.triton_inverse_hopper import tf32

HALF = gl.constexpr(115.0)
LOG2E = gl.constexpr(1.4426950408889634)
WINDOW = gl.constexpr(208.0)
# 2^-128 is 0 where subnormal numbers are: a token's decay is cut there, so sums stay small and the windows few.
FLOOR = gl.constexpr(-128.0)
WINDOWS = gl.constexpr(20)  # 32 rows at FLOOR
# log2 of the smallest and the largest e^A: beyond them no decay changes, and inf * 0 stays out.
LEAST = gl.constexpr(-100.0)
MOST = gl.constexpr(115.0)
NAN = gl.constexpr(PropagateNan.ALL)
# A warp spans 8 rows x 64 channels, two channels a lane: every load and store of a row is 128 or 256 bytes.
STRIP = gl.constexpr(gl.BlockedLayout([8, 2], [1, 32], [4, 1], [1, 0]))
STRIP3 = gl.constexpr(gl.BlockedLayout([1, 8, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def exp2(x):
    """2^x by the hardware, without the extra steps for results below 2^-126 (they become 0)."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sigmoid(x):
    return reciprocal(1.0 + exp2(x * -LOG2E))


@gluon.jit
def slope_of(A, SAFE: gl.constexpr):
    """What multiplies the gate: -e^A log2(e) inside the sigmoid, or -e^A outside the softplus (base 2 on both)."""
    if SAFE:
        slope = -LOG2E * exp2(A * LOG2E)
    else:
        x = gl.maximum(A * LOG2E, LEAST, propagate_nan=NAN)
        slope = -exp2(gl.minimum(x, MOST, propagate_nan=NAN))
    return slope


@gluon.jit
def limit_of(bound, slope, SAFE: gl.constexpr):
    """The most that a gate can be: of the decay, or before e^A multiplies it. Rows outside the sequence have 0."""
    if SAFE:
        limit = bound * LOG2E
    else:
        limit = FLOOR * reciprocal(slope)
    return limit


@gluon.jit
def bounded(x, limit, slope, bias):
    """limit sigmoid(e^A (x + b)) with slope = -e^A log2(e) and bias = slope b."""
    return limit * reciprocal(1.0 + exp2(x * slope + bias))


@gluon.jit
def softplus(x, limit, slope, bias):
    """slope log2(1 + 2^z), z = x log2(e) + bias, to 1e-5 of its own size however small; cut at slope limit."""
    z = x * LOG2E + bias
    t = exp2(-gl.abs(z))
    # log2(1 + t) / t for 0 <= t <= 1, minimax in relative error (8.4e-6); lg2.approx is short of digits next to 1.
    p = gl.fma(t, -0.034435905516147614, 0.1460328847169876)
    p = gl.fma(t, p, -0.3030362129211426)
    p = gl.fma(t, p, 0.4691740572452545)
    p = gl.fma(t, p, -0.7204261422157288)
    p = gl.fma(t, p, 1.4426828622817993)
    y = gl.fma(t, p, gl.maximum(z, 0.0, propagate_nan=NAN))
    return gl.minimum(y, limit, propagate_nan=NAN) * slope


@gluon.jit
def gate(x, limits, slope, bias, FROM: gl.constexpr, totals, SAFE: gl.constexpr):
    """Running log2 decay within groups of 8 rows; their totals go to shared memory."""
    limit = limits.slice(FROM, 32).load(gl.SliceLayout(1, STRIP))[:, None]
    if SAFE:
        logs = bounded(x.to(gl.float32), limit, slope, bias[None, :])
    else:
        logs = softplus(x.to(gl.float32), limit, slope, bias[None, :])
    logs = gl.convert_layout(gl.reshape(logs, [4, 8, 64]), STRIP3, assert_trivial=True)
    G = gl.associative_scan(logs, 1, add)
    j = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, STRIP3)))[None, :, None]
    last = gl.sum(gl.where(j == 7, G.to(gl.int32, bitcast=True), 0), axis=1).to(gl.float32, bitcast=True)
    totals.slice(FROM // 8, 4, dim=0).store(last)
    return gl.convert_layout(gl.reshape(G, [32, 64]), STRIP, assert_trivial=True)


@gluon.jit
def before_group(e0, e1, e2):
    """The decay from a block's first row to the group of 8 of each of its 32 rows, plus HALF."""
    group = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, STRIP3)))[:, None, None]
    e0 = gl.convert_layout(gl.reshape(e0, [1, 1, 64]), STRIP3, assert_trivial=True)
    e1 = gl.convert_layout(gl.reshape(e1, [1, 1, 64]), STRIP3, assert_trivial=True)
    e2 = gl.convert_layout(gl.reshape(e2, [1, 1, 64]), STRIP3, assert_trivial=True)
    zero = gl.full([4, 8, 64], HALF, gl.float32, STRIP3)
    x = zero + (gl.where(group > 0, e0, 0.0) + gl.where(group > 1, e1, 0.0) + gl.where(group > 2, e2, 0.0))
    return gl.convert_layout(gl.reshape(x, [32, 64]), STRIP, assert_trivial=True)


@gluon.jit
def unit_rows(tile, scales, FROM: gl.constexpr):
    """The 32 normalised rows from row FROM."""
    r = scales.slice(FROM, 32).load(gl.SliceLayout(1, STRIP))
    return tile.slice(FROM, 32, dim=0).load(STRIP).to(gl.float32) * r[:, None]


@gluon.jit
def down(G, SAFE: gl.constexpr):
    """Column factors of the first window; under a bounded gate there is no other."""
    x = exp2(-G)
    if not SAFE:
        x = gl.where(G > HALF - WINDOW, x, 0.0)
    return x


@gluon.jit
def stop(k_unit, k_down, G, E, SAFE: gl.constexpr):
    """k decayed from each row to the block's end."""
    if SAFE:
        x = k_down * exp2(E + HALF)
    else:
        x = k_unit * exp2((E + HALF) - G)  # k_down may be 0 here
    return x


@gluon.jit
def later_windows(E):
    """How many windows a block needs beside the first, over all channels."""
    # The running sums and E round apart: the 1 keeps a last row just below an edge inside.
    count = ((1.0 - E) * (1.0 / WINDOW)).to(gl.int32)
    return gl.minimum(gl.max(gl.max(count, axis=1), axis=0), WINDOWS)


@gluon.jit
def add_windows(acc, kt, qt, k_norm, q_norm, G, count, rows_k_q, columns, FROM: gl.constexpr):
    """Add the pairs of a block's later windows to its products. No product is in flight before or after."""
    for w in range(1, count + 1):
        y = G + w * WINDOW
        k_unit = unit_rows(kt, k_norm, FROM)
        x = gl.where((y > HALF - WINDOW) & (y <= HALF), k_unit * exp2(-y), 0.0)
        gl.thread_barrier()
        columns.slice(FROM, 32, dim=0).store(tf32(x))
        if FROM == 32:
            columns.slice(0, 32, dim=0).store(gl.full([32, 64], 0.0, gl.float32, STRIP))
        up = exp2(gl.minimum(y, HALF))
        rows_k_q.slice(0, 32, dim=0).store(tf32(k_unit * up))
        rows_k_q.slice(32, 32, dim=0).store(unit_rows(qt, q_norm, FROM) * up)
        fence_async_shared()
        gl.thread_barrier()
        right = columns.slice(0, FROM + 32, dim=0).permute((1, 0))
        acc = warpgroup_mma(rows_k_q, right, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
    return acc


__all__ = [
    "HALF",
    "LOG2E",
    "STRIP",
    "add_windows",
    "before_group",
    "down",
    "exp2",
    "gate",
    "later_windows",
    "limit_of",
    "sigmoid",
    "slope_of",
    "stop",
    "unit_rows",
]
