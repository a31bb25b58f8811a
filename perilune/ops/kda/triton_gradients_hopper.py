"""KDA kernel B3 for Hopper in Gluon: `triton_gradients.key_gradient_kernel` with the data layouts written out.

All arithmetic happens in the layout in which the tensor cores return their results, so that nothing is converted or
computed twice: plain Triton keeps two copies of most values here and spills. Sums over rows (cumulative decay, decay to
the block's end, the other block's total, and the way back) are products with 0/1 matrices built in registers.

Only K = 128, bfloat16 and bounded gates. Formulas and letters are those of `triton_gradients`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from perilune.ops.kda.triton_prepare_hopper import HALF, LOG2E, PLAIN2, ROWS, TILE64, TINY, exp2, reciprocal

MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def ones(KIND: gl.constexpr):
    """0/1 matrices as left operands, rows i, columns j.

    Some of their registers are compile-time constants, which ptxas (CUDA 12.8) can leave unset when one operand feeds
    two groups of products: docs/kda.md tells how this shows. Check the machine code after changing this kernel.
    """
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, OPERAND))[:, None]
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, OPERAND))[None, :]
    own = (i ^ j) < 32
    if KIND == "cumulative":  # j <= i in the own block
        pick = own & (j <= i)
    elif KIND == "from":  # j >= i in the chunk
        pick = j >= i
    else:  # "before": j < i in the chunk
        pick = j < i
    return gl.where(pick, 1.0, 0.0).to(gl.bfloat16)


@gluon.jit
def zeros():
    return gl.full([64, 64], 0.0, gl.float32, MMA)


@gluon.jit
def halves(x, high_tile, low_tile):
    """Split float32 into two bfloat16 parts, 16 bits together, in shared memory."""
    high = x.to(gl.bfloat16)
    high_tile.store(high)
    low_tile.store((x - high.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def triangle_sum(KIND: gl.constexpr, high_tile, low_tile, acc):
    pick = ones(KIND)
    acc = warpgroup_mma(pick, high_tile, acc, is_async=True)
    return warpgroup_mma(pick, low_tile, acc, is_async=True)


@gluon.jit
def half_rows(x, stride_t, stride_c, first, end, block):
    """64 rows of the 64 channels of this program; rows outside the sequence repeat one of its rows."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, TILE64))
    row = gl.minimum(gl.maximum(row, first), end - 1)
    col = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, TILE64))
    return gl.load(x + (row[:, None] * stride_t + col[None, :] * stride_c))


@gluon.jit
def biased_gate(g, stride_t, stride_c, first, end, block, bias):
    x = gl.convert_layout(half_rows(g, stride_t, stride_c, first, end, block), MMA).to(gl.float32)
    return x + gl.load(bias + block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, MMA)))[None, :]


@gluon.jit
def inverse_norm(x, stride_t, stride_c, first, end, eps):
    """1 / |x| of the 64 rows; 0 outside the sequence."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    at = gl.minimum(gl.maximum(row, first), end - 1)
    col = gl.arange(0, 128, layout=gl.SliceLayout(0, ROWS))
    v = gl.load(x + (at[:, None] * stride_t + col[None, :] * stride_c)).to(gl.float32)
    r = gl.where((row >= first) & (row < end), gl.rsqrt(gl.sum(v * v, axis=1) + eps), 0.0)
    return gl.convert_layout(r, gl.SliceLayout(1, MMA))[:, None]


@gluon.jit
def pair_gradients(dq, row, column, dP, M, k_raw, q_raw, rk, rq, up, down, k_down_tile, k_up_tile, q_up_tile):
    """Add the dq, row and column parts of the pairs kept in dP and M, with e^(G_i - G_j) = up_i down_j.

    One product at a time: its result is folded in before the next one needs registers.
    """
    gl.thread_barrier()
    k = k_raw.load(MMA).to(gl.float32) * rk
    k_down_tile.store((k * down).to(gl.bfloat16))
    k_up_tile.store((k * up).to(gl.bfloat16))
    q_up_tile.store((q_raw.load(MMA).to(gl.float32) * rq * up).to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    dq += up * warpgroup_mma_wait(0, [warpgroup_mma(dP, k_down_tile, zeros(), is_async=True)])
    row += up * warpgroup_mma_wait(0, [warpgroup_mma(M, k_down_tile, zeros(), is_async=True)])
    back = warpgroup_mma(M.permute((1, 0)), k_up_tile, zeros(), is_async=True)
    back = warpgroup_mma_wait(0, [warpgroup_mma(dP.permute((1, 0)), q_up_tile, back, is_async=True)])
    column += down * back
    return dq, row, column


@gluon.jit
def store_rows(out, x, stride, first, end):
    """Rows inside the sequence, converted for full-width stores."""
    x = gl.convert_layout(x.to(out.dtype.element_ty), TILE64)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, TILE64))
    col = gl.arange(0, 64, layout=gl.SliceLayout(0, TILE64))
    inside = (row >= first) & (row < end)
    gl.store(out + (row[:, None] * stride + col[None, :]), x, mask=inside[:, None])


@gluon.jit
def packed(x):
    """A [64, 64] half of a contiguous [64, 128] tile."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, TILE64))
    col = gl.arange(0, 64, layout=gl.SliceLayout(0, TILE64))
    return gl.convert_layout(gl.load(x + (row[:, None] * 128 + col[None, :])), MMA).to(gl.float32)


@gluon.jit
def pair_tile(x, OWN: gl.constexpr):
    """The own-block or the cross-block part of a strictly lower triangular [64, 64] tile, in shared memory."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, TILE64))[:, None]
    col = gl.arange(0, 64, layout=gl.SliceLayout(0, TILE64))[None, :]
    same = (row < 32) == (col < 32)
    tile = gl.load(x + (row * 64 + col), mask=same == OWN, other=0.0)
    return gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED, tile)


@gluon.jit
def new_tile():
    return gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)


@gluon.jit
def key_gradient_hopper_kernel(
    q, k, g, A_log, dt_bias, table, M, dP, diagonal, q_start, k_start, k_stop, last,
    dq_out, dk_out, dg_out, d_bias, d_A, radial,
    sq_t, sq_h, sq_c, sk_t, sk_h, sk_c, sg_t, sg_h, sg_c,
    scale, lower_bound, eps, H,
):  # fmt: skip
    """64 channels of one chunk of one head, four warps; arguments as `triton_gradients.key_gradient_kernel`."""
    block = gl.program_id(0) % 2
    chunk_head = gl.program_id(0) // 2
    c = chunk_head // H
    h = chunk_head % H
    base = gl.load(table + 3 * c)
    first = (gl.load(table + 3 * c + 1) - base).to(gl.int32)
    end = (gl.load(table + 3 * c + 2) - base).to(gl.int32)
    h64 = h.to(gl.int64)
    ch = chunk_head.to(gl.int64)
    q += h64 * sq_h + base * sq_t
    k += h64 * sk_h + base * sk_t
    g += h64 * sg_h + base * sg_t
    out = (base * H + h64) * 128 + block * 64
    at = ch * (64 * 128) + block * 64
    i1 = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    i = i1[:, None]
    cols = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, MMA))
    inside = (i >= first) & (i < end)

    exp_A = exp2(gl.load(A_log + h) * LOG2E)
    bias = dt_bias + h * 128
    x = biased_gate(g, sg_t, sg_c, first, end, block, bias)
    s = reciprocal(1.0 + exp2(-LOG2E * exp_A * x))
    high = new_tile()
    low = new_tile()
    halves(gl.where(inside, lower_bound * LOG2E, 0.0) * s, high, low)
    M_own = pair_tile(M + ch * (64 * 64), True)
    M_cross = pair_tile(M + ch * (64 * 64), False)
    dP_own = pair_tile(dP + ch * (64 * 64), True)
    dP_cross = pair_tile(dP + ch * (64 * 64), False)
    k_raw = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED, half_rows(k, sk_t, sk_c, first, end, block))
    q_raw = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED, half_rows(q, sq_t, sq_c, first, end, block))
    fence_async_shared()
    gl.thread_barrier()
    G = triangle_sum("cumulative", high, low, zeros())
    rk = inverse_norm(k, sk_t, sk_c, first, end, eps)
    rq = inverse_norm(q, sq_t, sq_c, first, end, eps) * scale
    tile0 = new_tile()
    tile1 = new_tile()
    tile2 = new_tile()
    G = warpgroup_mma_wait(0, [G])
    # The totals of the two blocks are the last rows of G.
    rows = gl.allocate_shared_memory(gl.float32, [64, 64], PLAIN2, G)
    E0 = rows.slice(31, 1, dim=0).load(MMA)
    E1 = rows.slice(63, 1, dim=0).load(MMA)
    G += HALF
    up = exp2(G)
    down = exp2(-G)
    dq, row, column = pair_gradients(
        zeros(), zeros(), zeros(), dP_own, M_own, k_raw, q_raw, rk, rq, up, down, tile0, tile1, tile2
    )
    start = up * TINY
    stop = down * exp2(gl.where(i < 32, E0, E1) + HALF)
    dq, row, column = pair_gradients(
        dq, row, column, dP_cross, M_cross, k_raw, q_raw, rk, rq, start, stop, tile0, tile1, tile2
    )
    # Through the states; decays from the chunk's start and to its end.
    start = start * gl.where(i >= 32, exp2(E0), 1.0)
    stop = stop * gl.where(i < 32, exp2(E1), 1.0)
    dq += start * packed(q_start + at)
    row += start * packed(k_start + at)
    to_stop = stop * packed(k_stop + at)
    kn = k_raw.load(MMA).to(gl.float32) * rk
    qn = q_raw.load(MMA).to(gl.float32) * rq
    # dg_i = sum_(t >= i) (q dq + k row - k column)_t + sum_(t < i) (k to_stop)_t + e^(G_C) rowsum(S dS')
    gl.thread_barrier()
    halves(qn * dq + kn * (row - column), tile0, tile1)
    halves(kn * to_stop, high, low)
    fence_async_shared()
    gl.thread_barrier()
    dg = triangle_sum("from", tile0, tile1, zeros())
    dg = triangle_sum("before", high, low, dg)
    p = gl.load(diagonal + ch * 64 + i)
    dq += p * kn
    dk = row + column + to_stop + p * qn
    split = ch * 4 + 2 * block
    gl.store(radial + split * 64 + i1, gl.sum(qn * dq, axis=1))
    gl.store(radial + split * 64 + 64 + i1, gl.sum(kn * dk, axis=1))
    store_rows(dq_out + out, dq * rq, H * 128, first, end)
    store_rows(dk_out + out, dk * rk, H * 128, first, end)
    dg = warpgroup_mma_wait(0, [dg])
    dg += gl.load(last + ch * 128 + cols)[None, :]
    # s (1 - s) = e s^2 with s = 1 / (1 + e), exact also where s rounds to 1; the cap keeps e finite.
    x = biased_gate(g, sg_t, sg_c, first, end, block, bias)
    e = exp2(gl.minimum(-LOG2E * exp_A * x, 43.0))
    s = reciprocal(1.0 + e)
    dx = gl.where(inside, dg * (lower_bound * exp_A) * e * s * s, 0.0)
    gl.store(d_bias + ch * 128 + cols, gl.sum(dx, axis=0))
    gl.store(d_A + ch * 2 + block, gl.sum(gl.sum(gl.where(inside, dx * x, 0.0), axis=1), axis=0))
    store_rows(dg_out + out, dx, H * 128, first, end)
