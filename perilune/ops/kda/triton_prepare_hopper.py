"""KDA kernel K1 for Hopper in Gluon: the same outputs as `triton_prepare`, with the data layouts written out.

Plain Triton spends most of its instructions on moving values between layouts here. What this does instead:
- a thread owns 8 rows of two neighbouring channels, so the running sum of the gate stays in the thread but for the
  totals of the groups of 8;
- the channels go by in two halves, so that registers and shared memory leave room for three programs a multiprocessor
  (the kernel is limited by instruction issue, not by bytes);
- k and q of a 32-row block are stacked to 64 rows, so one product per block gives L and P without wasted rows, and
  the second block's product carries the first block's columns (decayed to that block's end) in the same instruction;
- the squares of the L2 norms are the diagonal of x x^T, from the tensor cores;
- (I + L)^-1 of each 32-row block is forward substitution with a column on two lanes, float32 throughout.

Only K = 128 and bfloat16. Gates and their factors are in `triton_decay_hopper`; formulas and letters are those of
`triton_prepare`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from perilune.ops.kda.triton_decay_hopper import (
    LOG2E,
    STRIP,
    add_windows,
    before_group,
    down,
    exp2,
    gate,
    later_windows,
    limit_of,
    sigmoid,
    slope_of,
    stop,
    unit_rows,
)
from perilune.ops.kda.triton_inverse_hopper import small_dot, tf32, unit_inverse

TINY = gl.constexpr(2.0**-115)
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
MMA32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 8]))
MMA64 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 8]))
MMAW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
DIAGONAL = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
WIDE32 = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
WIDE16 = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PLAIN1 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PLAIN3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
PAD32 = gl.constexpr(gl.PaddedSharedLayout.with_identity_for([[32, 4]], [64, 32], [1, 0]))
PAD64 = gl.constexpr(gl.PaddedSharedLayout.with_identity_for([[64, 4]], [64, 64], [1, 0]))


@gluon.jit
def tiny(x):
    """x times 2^-115 in bfloat16, two at a time: exact."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 t; mov.b32 t, 0x06000600; mul.rn.bf16x2 $0, $1, t;}",
        "=r,r",
        [x.to(gl.bfloat16)],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def fetch(tile, x, stride_t, first, end):
    """Start copying 64 channels of the chunk's rows to shared memory; rows outside the sequence repeat one of its."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    row = gl.minimum(gl.maximum(row, first), end - 1)
    col = gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))
    async_copy.async_copy_global_to_shared(tile, x + (row[:, None] * stride_t + col[None, :]))


@gluon.jit
def norms(tile, first, end, eps, scale, out):
    """scale / |x| of each row to shared memory; 0 outside the sequence."""
    acc = gl.full([4, 16, 16], 0.0, gl.float32, DIAGONAL)
    for s in gl.static_range(2):
        x = tile.index(s).reshape([4, 16, 64])
        left = x.load(gl.DotOperandLayout(0, DIAGONAL, 2))
        acc = mma_v2(left, x.permute((0, 2, 1)).load(gl.DotOperandLayout(1, DIAGONAL, 2)), acc)
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, DIAGONAL)))
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, DIAGONAL)))
    squares = gl.sum(gl.where(i[None, :, None] == j[None, None, :], acc, 0.0), axis=2)
    row = 16 * gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, DIAGONAL)))[:, None] + i[None, :]
    out.reshape([4, 16]).store(gl.where((row >= first) & (row < end), gl.rsqrt(squares + eps) * scale, 0.0))


@gluon.jit
def prepare_hopper_kernel(
    q, k, g, beta, A_log, dt_bias, table, w_out, q_out, k_out, A_out, P_out, decay_out, norm_out,
    sq_t, sq_h, sk_t, sk_h, sg_t, sg_h, sb_t, sb_h,
    scale, lower_bound, eps, H,
    SAME: gl.constexpr, SAFE: gl.constexpr,
):  # fmt: skip
    """One chunk of one head, four warps. table[c] = (token of row 0, first token, end token) of chunk c.

    SAME: q, k and g have the same strides, so that addresses are computed once. SAFE: the gate is bounded.
    """
    if SAME:
        sk_t = sq_t
        sg_t = sq_t
    c = gl.program_id(0) // H
    h = gl.program_id(0) % H
    base = gl.load(table + 3 * c)
    first = (gl.load(table + 3 * c + 1) - base).to(gl.int32)
    end = (gl.load(table + 3 * c + 2) - base).to(gl.int32)
    h64 = h.to(gl.int64)
    q += h64 * sq_h + base * sq_t
    k += h64 * sk_h + base * sk_t
    g += h64 * sg_h + base * sg_t
    beta += h64 * sb_h + base * sb_t
    ch = gl.program_id(0).to(gl.int64)
    w_out += ch * (64 * 128)
    q_out += ch * (64 * 128)
    k_out += ch * (64 * 128)
    A_out += ch * (64 * 64)
    P_out += ch * (64 * 64)
    decay_out += ch * 128
    norm_out += ch * 128

    k_tile = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], WIDE16)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], WIDE16)
    rows_k_q = gl.allocate_shared_memory(gl.float32, [64, 64], WIDE32)
    columns = gl.allocate_shared_memory(gl.float32, [64, 64], WIDE32)
    # Raw gates: the first half lies where the products' rows come afterwards.
    g_first = rows_k_q._reinterpret(gl.bfloat16, [2, 64, 64], WIDE16).index(0)
    g_second = gl.allocate_shared_memory(gl.bfloat16, [64, 64], WIDE16)
    fetch(g_first, g, sg_t, first, end)
    fetch(g_second, g + 64, sg_t, first, end)
    for s in gl.static_range(2):
        fetch(k_tile.index(s), k + 64 * s, sk_t, first, end)
        fetch(q_tile.index(s), q + 64 * s, sq_t, first, end)
    async_copy.commit_group()

    cols = gl.arange(0, 64, layout=gl.SliceLayout(0, STRIP))
    slope = slope_of(gl.load(A_log + h), SAFE)
    bias_slope = slope if SAFE else LOG2E
    r64 = gl.arange(0, 64, layout=LINE)
    here = (r64 >= first) & (r64 < end)
    b64 = gl.where(here, sigmoid(gl.load(beta + r64 * sb_t, mask=here, other=0.0).to(gl.float32)), 0.0)
    strengths = gl.allocate_shared_memory(gl.float32, [64], PLAIN1, b64)
    # Rows outside the sequence decay nothing.
    limit = limit_of(lower_bound, slope, SAFE)
    limits = gl.allocate_shared_memory(gl.float32, [64], PLAIN1, gl.where(here, limit, 0.0))
    # The totals of the gates are read before the products' columns are written.
    totals = columns._reinterpret(gl.float32, [64, 64], PLAIN2).slice(0, 8, dim=0)
    k_norm = gl.allocate_shared_memory(gl.float32, [64], PLAIN1)
    q_norm = gl.allocate_shared_memory(gl.float32, [64], PLAIN1)
    async_copy.wait_group(0)
    gl.thread_barrier()
    norms(k_tile, first, end, eps, 1.0, k_norm)
    norms(q_tile, first, end, eps, scale, q_norm)
    gl.thread_barrier()
    gl.store(norm_out + r64, k_norm.load(LINE))
    gl.store(norm_out + 64 + r64, q_norm.load(LINE))
    x0 = g_first.slice(0, 32, dim=0).load(STRIP)
    x1 = g_first.slice(32, 32, dim=0).load(STRIP)

    at = gl.arange(0, 32, layout=gl.SliceLayout(1, STRIP))[:, None] * 128 + cols[None, :]
    acc0 = gl.full([64, 32], 0.0, gl.float32, MMA32)
    acc1 = gl.full([64, 64], 0.0, gl.float32, MMA64)
    for s in range(2):
        kt = k_tile.index(s)
        qt = q_tile.index(s)
        bias = gl.load(dt_bias + h * 128 + s * 64 + cols) * bias_slope
        G0 = gate(x0, limits, slope, bias, 0, totals, SAFE)
        G1 = gate(x1, limits, slope, bias, 32, totals, SAFE)
        e0 = totals.slice(0, 1, dim=0).load(STRIP)
        e1 = totals.slice(1, 1, dim=0).load(STRIP)
        e2 = totals.slice(2, 1, dim=0).load(STRIP)
        E0 = (e0 + e1) + (e2 + totals.slice(3, 1, dim=0).load(STRIP))
        G0 += before_group(e0, e1, e2)
        e0 = totals.slice(4, 1, dim=0).load(STRIP)
        e1 = totals.slice(5, 1, dim=0).load(STRIP)
        e2 = totals.slice(6, 1, dim=0).load(STRIP)
        E1 = (e0 + e1) + (e2 + totals.slice(7, 1, dim=0).load(STRIP))
        G1 += before_group(e0, e1, e2)
        later0 = later_windows(E0)
        later1 = later_windows(E1)
        gl.store(decay_out + s * 64 + cols[None, :], exp2(E0 + E1))
        to_q = q_out + s * 64
        to_k = k_out + s * 64

        # Block 0: rows (k, q) against its own columns.
        up = exp2(G0)
        k_unit = unit_rows(kt, k_norm, 0)
        k_down = k_unit * down(G0, SAFE)
        k_up = k_unit * up
        q_up = unit_rows(qt, q_norm, 0) * up
        rows_k_q.slice(0, 32, dim=0).store(tf32(k_up))
        rows_k_q.slice(32, 32, dim=0).store(q_up)
        columns.slice(0, 32, dim=0).store(tf32(k_down))
        fence_async_shared()
        gl.thread_barrier()
        own = columns.slice(0, 32, dim=0).permute((1, 0))
        acc0 = warpgroup_mma(rows_k_q, own, acc0, is_async=True)
        gl.store(to_q + at, tiny(q_up))
        k_hat = tiny(k_up)  # k^ takes k's place; later windows still read k
        if SAFE:
            kt.slice(0, 32, dim=0).store(k_hat)
        k_stop = stop(k_unit, k_down, G0, E0, SAFE)
        gl.store(to_k + at, (k_stop * exp2(E1)).to(gl.bfloat16))
        if not SAFE:
            acc0 = warpgroup_mma_wait(0, [acc0])
            acc0 = add_windows(acc0, kt, qt, k_norm, q_norm, G0, later0, rows_k_q, columns, 0)
            kt.slice(0, 32, dim=0).store(k_hat)

        # Block 1: against the first block's columns and its own. Its rows keep the factor 2^HALF, undone afterwards.
        up = exp2(G1)
        k_unit = unit_rows(kt, k_norm, 32)
        k_down = k_unit * down(G1, SAFE)
        k_up = k_unit * up
        q_up = unit_rows(qt, q_norm, 32) * up
        if SAFE:
            acc0 = warpgroup_mma_wait(0, [acc0])
        gl.thread_barrier()
        rows_k_q.slice(0, 32, dim=0).store(tf32(k_up))
        rows_k_q.slice(32, 32, dim=0).store(q_up)
        columns.slice(0, 32, dim=0).store(tf32(k_stop))
        columns.slice(32, 32, dim=0).store(tf32(k_down))
        fence_async_shared()
        gl.thread_barrier()
        acc1 = warpgroup_mma(rows_k_q, columns.permute((1, 0)), acc1, is_async=True)
        # 2^E0 and TINY apart: their product alone would fall below float32's range.
        before = exp2(E0)
        gl.store(to_q + 32 * 128 + at, tiny(q_up * before))
        k_hat = tiny(k_up * before)
        if SAFE:
            kt.slice(32, 32, dim=0).store(k_hat)
        gl.store(to_k + 32 * 128 + at, stop(k_unit, k_down, G1, E1, SAFE).to(gl.bfloat16))
        x0 = g_second.slice(0, 32, dim=0).load(STRIP)
        x1 = g_second.slice(32, 32, dim=0).load(STRIP)
        acc1 = warpgroup_mma_wait(0, [acc1])
        if not SAFE:
            acc1 = add_windows(acc1, kt, qt, k_norm, q_norm, G1, later1, rows_k_q, columns, 32)
            kt.slice(32, 32, dim=0).store(k_hat)
        gl.thread_barrier()

    # Rows 0-31 of the products are L before beta, rows 32-63 are P.
    first_cols = gl.allocate_shared_memory(gl.float32, [64, 32], PAD32, acc0)
    all_cols = gl.allocate_shared_memory(gl.float32, [64, 64], PAD64, acc1)
    i = gl.arange(0, 32, layout=gl.SliceLayout(1, TILE))[:, None]
    j = gl.arange(0, 32, layout=gl.SliceLayout(0, TILE))[None, :]
    b1 = strengths.slice(32, 32).load(gl.SliceLayout(1, TILE))[:, None]
    # Select, never multiply by a mask: where j > i the products may be inf.
    Lt = gl.allocate_shared_memory(gl.float32, [32, 2, 32], PLAIN3)
    b0_row = strengths.slice(0, 32).load(gl.SliceLayout(0, TILE))[None, :]
    b1_row = strengths.slice(32, 32).load(gl.SliceLayout(0, TILE))[None, :]
    x = gl.where(j > i, first_cols.slice(0, 32, dim=0).permute((1, 0)).load(TILE) * b0_row, 0.0)
    Lt.slice(0, 1, dim=1).store(gl.reshape(x, [32, 1, 32]))
    x = gl.where(j > i, all_cols.slice(0, 32, dim=0).slice(32, 32, dim=1).permute((1, 0)).load(TILE) * b1_row, 0.0)
    Lt.slice(1, 1, dim=1).store(gl.reshape(x, [32, 1, 32]))
    L10 = gl.allocate_shared_memory(gl.float32, [32, 32], PLAIN2)
    L10.store(all_cols.slice(0, 32, dim=0).slice(0, 32, dim=1).load(TILE) * (b1 * TINY))
    to = i * 64 + j
    zero = gl.full([32, 32], 0.0, gl.bfloat16, TILE)
    P00 = first_cols.slice(32, 32, dim=0).load(TILE)
    P10 = all_cols.slice(32, 32, dim=0).slice(0, 32, dim=1).load(TILE)
    P11 = all_cols.slice(32, 32, dim=0).slice(32, 32, dim=1).load(TILE)
    gl.store(P_out + to, gl.where(i >= j, P00, 0.0).to(gl.bfloat16))
    gl.store(P_out + to + 32, zero)
    gl.store(P_out + to + 32 * 64, (P10 * TINY).to(gl.bfloat16))
    gl.store(P_out + to + 32 * 64 + 32, gl.where(i >= j, P11, 0.0).to(gl.bfloat16))

    inverse = gl.allocate_shared_memory(gl.float32, [2, 32, 32], PLAIN3)
    unit_inverse(Lt._reinterpret(gl.float32, [32, 2, 32], PLAIN2), inverse)
    inverse = inverse._reinterpret(gl.float32, [2, 32, 32], PLAIN2)
    square = gl.allocate_shared_memory(gl.float32, [64, 64], PAD64)
    LX = gl.allocate_shared_memory(gl.float32, [32, 32], PLAIN2, small_dot(L10, inverse.index(0)))
    square.slice(32, 32, dim=0).slice(0, 32, dim=1).store(-small_dot(inverse.index(1), LX))
    square.slice(0, 32, dim=0).slice(0, 32, dim=1).store(inverse.index(0).load(TILE))
    square.slice(32, 32, dim=0).slice(32, 32, dim=1).store(inverse.index(1).load(TILE))
    square.slice(0, 32, dim=0).slice(32, 32, dim=1).store(gl.full([32, 32], 0.0, gl.float32, TILE))

    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMAW, 2)
    A = (square.load(OPERAND) * strengths.load(gl.SliceLayout(0, OPERAND))[None, :]).to(gl.bfloat16)
    fence_async_shared()
    gl.thread_barrier()
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))[:, None]
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))[None, :]
    A_tile = (square.load(ROWS) * strengths.load(gl.SliceLayout(0, ROWS))[None, :]).to(gl.bfloat16)
    for s in gl.static_range(2):
        w = warpgroup_mma(A, k_tile.index(s), gl.full([64, 64], 0.0, gl.float32, MMAW), is_async=True)
        if s == 0:
            gl.store(A_out + i * 64 + j, A_tile)
        w = warpgroup_mma_wait(0, [w])
        gl.store(w_out + s * 64 + i * 128 + j, gl.convert_layout((-w).to(gl.bfloat16), ROWS))


__all__ = ["prepare_hopper_kernel"]
