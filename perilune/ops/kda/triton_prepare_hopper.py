"""KDA kernel K1 for Hopper in Gluon: the same outputs as `triton_prepare`, with the data layouts written out.

Plain Triton spends most of its instructions on moving values between layouts here. Three choices avoid that:
- a thread owns 16 rows of two neighbouring channels, so the cumulative sum of the gate never leaves the thread;
- k and q of a 32-row block are stacked to 64 rows, so one product per block gives L and P without wasted rows, and
  the second block's product carries the first block's columns (decayed to that block's end) in the same instruction;
- (I + L)^-1 of each 32-row block is forward substitution with one column a thread, float32 throughout.

Only K = 128, bfloat16 and bounded gates. Formulas and letters are those of `triton_prepare`.
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

HALF = gl.constexpr(115.0)
TINY = gl.constexpr(2.0**-115)
LOG2E = gl.constexpr(1.4426950408889634)
# A warp spans 16 rows x 64 channels, two channels a lane: every load and store of a row is 128 bytes.
STRIP = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [2, 2], [1, 0]))
STRIP3 = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [2, 1, 2], [2, 1, 0]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
TILE64 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Two blocks, eight rows in the thread, a column a lane.
COLUMN = gl.constexpr(gl.BlockedLayout([1, 8, 1], [1, 1, 32], [2, 1, 2], [2, 1, 0]))
MMA32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 8]))
MMA64 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 8]))
MMAW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
SMALL = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8]))
WIDE32 = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
WIDE16 = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PLAIN1 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PAD32 = gl.constexpr(gl.PaddedSharedLayout.with_identity_for([[32, 4]], [64, 32], [1, 0]))
PAD64 = gl.constexpr(gl.PaddedSharedLayout.with_identity_for([[64, 4]], [64, 64], [1, 0]))
PLAIN3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


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
def tf32(x):
    """Round to nearest before the tensor core cuts the low 13 bits off."""
    return (x.to(gl.int32, bitcast=True) + 0x1000).to(gl.float32, bitcast=True)


@gluon.jit
def clamped(first, end, FROM: gl.constexpr, LAYOUT: gl.constexpr):
    """The 32 rows from row FROM, those outside the sequence replaced by one inside, and which are inside."""
    row = FROM + gl.arange(0, 32, layout=LAYOUT)
    return gl.minimum(gl.maximum(row, first), end - 1), (row >= first) & (row < end)


@gluon.jit
def fetch(tile, x, stride_t, stride_c, first, end):
    """Start copying the chunk's 64 rows to shared memory; rows outside the sequence repeat one of its rows."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    row = gl.minimum(gl.maximum(row, first), end - 1)
    col = gl.arange(0, 128, layout=gl.SliceLayout(0, ROWS))
    async_copy.async_copy_global_to_shared(tile, x + (row[:, None] * stride_t + col[None, :] * stride_c))


@gluon.jit
def norms(tile, first, end, eps, scale, out):
    """1 / |x| of each row to shared memory; 0 outside the sequence."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    v = tile.load(ROWS).to(gl.float32)
    out.store(gl.where((row >= first) & (row < end), gl.rsqrt(gl.sum(v * v, axis=1) + eps) * scale, 0.0))


@gluon.jit
def unit_rows(tile, scales, FROM: gl.constexpr):
    """The 32 normalised rows from row FROM."""
    r = scales.slice(FROM, 32).load(gl.SliceLayout(1, STRIP))
    return tile.slice(FROM, 32, dim=0).load(STRIP).to(gl.float32) * r[:, None]


@gluon.jit
def gate(g, stride_t, stride_c, first, end, slope, bias, lower, FROM: gl.constexpr, totals):
    """Cumulative log2 decay within 16 rows; the totals of the two 16-row groups go to shared memory."""
    row, inside = clamped(first, end, FROM, gl.SliceLayout(1, STRIP))
    col = gl.arange(0, 128, layout=gl.SliceLayout(0, STRIP))
    x = gl.load(g + (row[:, None] * stride_t + col[None, :] * stride_c)).to(gl.float32)
    # Rows outside the sequence decay nothing.
    logs = gl.where(inside, lower, 0.0)[:, None] * reciprocal(1.0 + exp2(x * slope + bias[None, :]))
    logs = gl.convert_layout(gl.reshape(logs, [2, 16, 128]), STRIP3, assert_trivial=True)
    G = gl.associative_scan(logs, 1, add)
    totals.slice(FROM // 16, 2, dim=0).store(gl.sum(logs, axis=1))
    return gl.convert_layout(gl.reshape(G, [32, 128]), STRIP, assert_trivial=True)


@gluon.jit
def row_of(X, r: gl.constexpr):
    """Row r of eight that one thread holds; integers, so that the compiler sees a plain pick."""
    j = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, COLUMN)))[None, :, None]
    return gl.sum(gl.where(j == r, X.to(gl.int32, bitcast=True), 0), axis=1).to(gl.float32, bitcast=True)


@gluon.jit
def eliminate(X, x, Lt, r: gl.constexpr, g: gl.constexpr):
    """Take L[8g .. 8g+7, r] times the finished row x = X[r] from the eight rows of group g."""
    column = Lt.index(r).slice(8 * g, 8, dim=1).load(gl.SliceLayout(2, COLUMN))
    return X - column[:, :, None] * x[:, None, :]


@gluon.jit
def identity_rows(g: gl.constexpr):
    j = 8 * g + gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, COLUMN)))[None, :, None]
    c = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, COLUMN)))[None, None, :]
    return gl.where(j == c, 1.0, 0.0) + gl.full([2, 8, 32], 0.0, gl.float32, COLUMN)


@gluon.jit
def unit_inverse(Lt, out):
    """(I + L)^-1 of two strictly lower [32, 32] blocks by forward substitution. Lt [j, block, i], out [block, i, c]."""
    X0 = identity_rows(0)
    X1 = identity_rows(1)
    X2 = identity_rows(2)
    X3 = identity_rows(3)
    for r in gl.static_range(8):
        x = row_of(X0, r)
        X0 = eliminate(X0, x, Lt, r, 0)
        X1 = eliminate(X1, x, Lt, r, 1)
        X2 = eliminate(X2, x, Lt, r, 2)
        X3 = eliminate(X3, x, Lt, r, 3)
    out.slice(0, 8, dim=1).store(X0)
    for r in gl.static_range(8):
        x = row_of(X1, r)
        X1 = eliminate(X1, x, Lt, 8 + r, 1)
        X2 = eliminate(X2, x, Lt, 8 + r, 2)
        X3 = eliminate(X3, x, Lt, 8 + r, 3)
    out.slice(8, 8, dim=1).store(X1)
    for r in gl.static_range(8):
        x = row_of(X2, r)
        X2 = eliminate(X2, x, Lt, 16 + r, 2)
        X3 = eliminate(X3, x, Lt, 16 + r, 3)
    out.slice(16, 8, dim=1).store(X2)
    for r in gl.static_range(7):
        X3 = eliminate(X3, row_of(X3, r), Lt, 24 + r, 3)
    out.slice(24, 8, dim=1).store(X3)


@gluon.jit
def small_dot(a, b):
    """[32, 32] times [32, 32], both in shared memory, tf32."""
    x = tf32(a.load(gl.DotOperandLayout(0, SMALL, 1)))
    y = tf32(b.load(gl.DotOperandLayout(1, SMALL, 1)))
    return mma_v2(x, y, gl.full([32, 32], 0.0, gl.float32, SMALL), input_precision="tf32")


@gluon.jit
def prepare_hopper_kernel(
    q, k, g, beta, A_log, dt_bias, table, w_out, q_out, k_out, A_out, P_out, decay_out, norm_out,
    sq_t, sq_h, sq_c, sk_t, sk_h, sk_c, sg_t, sg_h, sg_c, sb_t, sb_h,
    scale, lower_bound, eps, H,
    SAME: gl.constexpr,
):  # fmt: skip
    """One chunk of one head, four warps. table[c] = (token of row 0, first token, end token) of chunk c.

    SAME: q, k and g have the same strides, so that addresses are computed once.
    """
    if SAME:
        sk_t = sq_t
        sk_c = sq_c
        sg_t = sq_t
        sg_c = sq_c
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

    k_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 128], WIDE16)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 128], WIDE16)
    fetch(k_tile, k, sk_t, sk_c, first, end)
    fetch(q_tile, q, sq_t, sq_c, first, end)
    async_copy.commit_group()

    # Gates of both blocks; groups of 16 rows meet through shared memory.
    cols = gl.arange(0, 128, layout=gl.SliceLayout(0, STRIP))
    # sigmoid(e^A (x + bias)) = 1 / (1 + 2^(slope x + slope bias))
    slope = -LOG2E * exp2(gl.load(A_log + h) * LOG2E)
    bias = gl.load(dt_bias + h * 128 + cols) * slope
    lower = lower_bound * LOG2E
    r64 = gl.arange(0, 64, layout=LINE)
    here = (r64 >= first) & (r64 < end)
    b64 = gl.where(here, sigmoid(gl.load(beta + r64 * sb_t, mask=here, other=0.0).to(gl.float32)), 0.0)
    strengths = gl.allocate_shared_memory(gl.float32, [64], PLAIN1, b64)
    totals = gl.allocate_shared_memory(gl.float32, [4, 128], PLAIN2)
    G0 = gate(g, sg_t, sg_c, first, end, slope, bias, lower, 0, totals)
    G1 = gate(g, sg_t, sg_c, first, end, slope, bias, lower, 32, totals)
    e0 = totals.slice(0, 1, dim=0).load(STRIP)
    e1 = totals.slice(1, 1, dim=0).load(STRIP)
    e2 = totals.slice(2, 1, dim=0).load(STRIP)
    e3 = totals.slice(3, 1, dim=0).load(STRIP)
    E0 = e0 + e1
    E1 = e2 + e3
    row = gl.arange(0, 32, layout=gl.SliceLayout(1, STRIP))
    late = row[:, None] >= 16
    G0 += gl.where(late, e0, 0.0)
    G1 += gl.where(late, e2, 0.0)
    at = row[:, None] * 128 + cols[None, :]
    gl.store(decay_out + ch * 128 + cols[None, :], exp2(E0 + E1))

    k_norm = gl.allocate_shared_memory(gl.float32, [64], PLAIN1)
    q_norm = gl.allocate_shared_memory(gl.float32, [64], PLAIN1)
    async_copy.wait_group(0)
    gl.thread_barrier()
    norms(k_tile, first, end, eps, 1.0, k_norm)
    norms(q_tile, first, end, eps, scale, q_norm)
    gl.thread_barrier()
    gl.store(norm_out + ch * 128 + r64, k_norm.load(LINE))
    gl.store(norm_out + ch * 128 + 64 + r64, q_norm.load(LINE))
    rows_k_q = gl.allocate_shared_memory(gl.float32, [64, 128], WIDE32)
    columns = gl.allocate_shared_memory(gl.float32, [64, 128], WIDE32)

    # Block 0: rows (k, q) against its own columns.
    G0 += HALF
    up = exp2(G0)
    k_unit = unit_rows(k_tile, k_norm, 0)
    k_down = k_unit * exp2(-G0)
    k_up = k_unit * up
    q_up = unit_rows(q_tile, q_norm, 0) * up
    rows_k_q.slice(0, 32, dim=0).store(tf32(k_up))
    rows_k_q.slice(32, 32, dim=0).store(tf32(q_up))
    columns.slice(0, 32, dim=0).store(tf32(k_down))
    fence_async_shared()
    gl.thread_barrier()
    own = columns.slice(0, 32, dim=0).permute((1, 0))
    acc0 = warpgroup_mma(rows_k_q, own, gl.full([64, 32], 0.0, gl.float32, MMA32), is_async=True)
    gl.store(q_out + at, (q_up * TINY).to(gl.bfloat16))
    k_tile.slice(0, 32, dim=0).store((k_up * TINY).to(gl.bfloat16))  # from here on k^
    k_stop = k_down * exp2(E0 + HALF)
    gl.store(k_out + at, (k_stop * exp2(E1)).to(gl.bfloat16))

    # Block 1: against the first block's columns and its own. Its rows keep the factor 2^HALF, undone afterwards.
    G1 += HALF
    up = exp2(G1)
    k_unit = unit_rows(k_tile, k_norm, 32)
    k_down = k_unit * exp2(-G1)
    k_up = k_unit * up
    q_up = unit_rows(q_tile, q_norm, 32) * up
    acc0 = warpgroup_mma_wait(0, [acc0])
    gl.thread_barrier()
    rows_k_q.slice(0, 32, dim=0).store(tf32(k_up))
    rows_k_q.slice(32, 32, dim=0).store(tf32(q_up))
    columns.slice(0, 32, dim=0).store(tf32(k_stop))
    columns.slice(32, 32, dim=0).store(tf32(k_down))
    fence_async_shared()
    gl.thread_barrier()
    acc1 = warpgroup_mma(rows_k_q, columns.permute((1, 0)), gl.full([64, 64], 0.0, gl.float32, MMA64), is_async=True)
    # TINY and 2^E0 apart: their product alone would fall below float32's range.
    before = exp2(E0)
    gl.store(q_out + 32 * 128 + at, (q_up * TINY * before).to(gl.bfloat16))
    k_tile.slice(32, 32, dim=0).store((k_up * TINY * before).to(gl.bfloat16))
    gl.store(k_out + 32 * 128 + at, (k_down * exp2(E1 + HALF)).to(gl.bfloat16))
    acc1 = warpgroup_mma_wait(0, [acc1])

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
    w = warpgroup_mma(A, k_tile, gl.full([64, 128], 0.0, gl.float32, MMAW), is_async=True)
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, TILE64))[:, None]
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, TILE64))[None, :]
    A_tile = (square.load(TILE64) * strengths.load(gl.SliceLayout(0, TILE64))[None, :]).to(gl.bfloat16)
    gl.store(A_out + i * 64 + j, A_tile)
    w = warpgroup_mma_wait(0, [w])
    w = gl.convert_layout((-w).to(gl.bfloat16), ROWS)
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))[:, None]
    j = gl.arange(0, 128, layout=gl.SliceLayout(0, ROWS))[None, :]
    gl.store(w_out + i * 128 + j, w)
