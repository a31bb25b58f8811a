"""KDA kernel K1: everything of a chunk that does not depend on the state.

One program prepares one chunk of one head: gate, L2 norms, sigmoid, cumulative decay, the triangular inverse, and
the operands of the scan. With G the inclusive cumulative sum of the log decay g inside the chunk, it writes
    w  = A diag(beta) (k e^G)            (stored negated, so that the scan only adds)
    q~ = K^-0.5 q e^G
    k- = k e^(G_C - G)
    A diag(beta), A = (I + L)^-1,        L_ij = beta_i sum_c k_ic k_jc e^(G_ic - G_jc), j < i
    P_ij = K^-0.5 sum_c q_ic k_jc e^(G_ic - G_jc), j <= i
    e^(G_C)
The chunk is handled as two blocks of 32 rows, because e^(G_i - G_j) can be factored into two numbers in float32's
range only over 32 rows (at -5 nats a token). Anchors use past gates only, so a row never depends on later rows, not
even by rounding.

Legend: C rows of a chunk (64), K key dim, H heads. All exponents are base 2: a gate in nats times log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 64
# Half of 32 rows * 5 nats in base 2: e^(G_i - G_j) = 2^(G_i + HALF) * 2^(-HALF - G_j), both within 2^+-115.5.
HALF: tl.constexpr = tl.constexpr(115.0)
TINY: tl.constexpr = tl.constexpr(2.0**-115)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Beyond +-30 a float32 sigmoid is 0 or 1 to rounding; the clamp keeps inf * 0 out of the gradients.
CLAMP: tl.constexpr = tl.constexpr(30.0)


@triton.jit
def sigmoid(x):
    """Logistic function with the argument clamped to where float32 can tell it from 0 and 1."""
    x = tl.minimum(tl.maximum(x, -CLAMP), CLAMP)
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def log2_decay(x, exp_A, lower_bound, SAFE: tl.constexpr):
    """Log decay in base 2 of the biased raw gate x = raw + dt_bias."""
    if SAFE:
        return (lower_bound * LOG2E) * sigmoid(exp_A * x)
    else:
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp2(-tl.abs(x) * LOG2E))
        return -(exp_A * LOG2E) * softplus


@triton.jit
def load_rows(ptr, t, valid, cols, stride_t, stride_c):
    """Rows t of a [T, cols] matrix; rows that are not valid are never read and come back as zeros."""
    return tl.load(ptr + t[:, None] * stride_t + cols[None, :] * stride_c, mask=valid[:, None], other=0.0)


@triton.jit
def normalised(x, eps):
    """x / sqrt(sum x^2 + eps) per row, float32, and the reciprocal norm."""
    x = x.to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, axis=1) + eps)
    return x * r[:, None], r


@triton.jit
def level_exponents(G, s: tl.constexpr, R: tl.constexpr, K: tl.constexpr):
    """Exponents of the pair (right half row, left half column) in groups of 2s rows, anchored at the last left row.

    Row part G_i - a and column part a - G_j are both <= 0 for the rows that use them, whatever the gates are.
    """
    groups: tl.constexpr = R // (2 * s)
    Gg = tl.reshape(G, [groups, 2 * s, K])
    row = tl.arange(0, 2 * s)[None, :, None]
    anchor = tl.sum(tl.where(row == s - 1, Gg, 0.0), axis=1, keep_dims=True)
    rows_part = tl.where(row >= s, Gg - anchor, 0.0)
    cols_part = tl.where(row < s, anchor - Gg, 0.0)
    return tl.reshape(rows_part, [R, K]), tl.reshape(cols_part, [R, K])


@triton.jit
def level_mask(i, j, s: tl.constexpr):
    """True where i lies in the right half and j in the left half of the same group of 2s rows."""
    return (i // (2 * s) == j // (2 * s)) & (i % (2 * s) >= s) & (j % (2 * s) < s)


@triton.jit
def pair_products(k, q, G, K: tl.constexpr):
    """The two [32, 32] products of one block for unbounded gates: sum_c x_ic k_jc 2^(G_ic - G_jc), x = k and q."""
    i = tl.arange(0, 32)[:, None]
    j = tl.arange(0, 32)[None, :]
    kk = tl.zeros([32, 32], tl.float32)
    qk = tl.where(i == j, tl.sum(q * k, axis=1)[:, None], 0.0)
    for n in tl.static_range(5):
        s: tl.constexpr = 1 << n
        rows_part, cols_part = level_exponents(G, s, 32, K)
        up = tl.exp2(rows_part)
        down = tl.trans(k * tl.exp2(cols_part))
        use = level_mask(i, j, s)
        kk = tl.where(use, tl.dot(k * up, down), kk)
        qk = tl.where(use, tl.dot(q * up, down), qk)
    return kk, qk


@triton.jit
def inverse16(L):
    """(I + L)^-1 of [2, 16, 16] strictly lower blocks by merging 1, 2, 4, 8 rows; the products keep float32 accuracy.

    [[X, 0], [-Y M X, Y]] inverts [[X^-1, 0], [M, Y^-1]]: one merge is X - X M X over all blocks at once.
    """
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    X = tl.where(i == j, 1.0, tl.where(level_mask(i, j, 1), -L, 0.0))
    for n in tl.static_range(1, 4):
        M = tl.where(level_mask(i, j, 1 << n), L, 0.0)
        MX = tl.dot(M, X, input_precision="tf32x3")
        X -= tl.dot(X, MX, input_precision="tf32x3")
    return X


@triton.jit
def inverse32(L):
    """(I + L)^-1 of a [32, 32] strictly lower block: 16-row blocks in float32, the last merge in tf32."""
    a = tl.arange(0, 2)[:, None, None, None]
    b = tl.arange(0, 2)[None, None, :, None]
    diagonal = tl.sum(tl.where(a == b, tl.reshape(L, [2, 16, 2, 16]), 0.0), axis=2)
    X16 = inverse16(diagonal)
    X = tl.reshape(tl.where(a == b, X16[:, :, None, :], 0.0), [32, 32])
    i = tl.arange(0, 32)[:, None]
    j = tl.arange(0, 32)[None, :]
    M = tl.where((i >= 16) & (j < 16), L, 0.0)
    return X - tl.dot(X, tl.dot(M, X))


@triton.jit
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, table, w_out, q_out, k_out, A_out, P_out, decay_out,
    sq_t, sq_h, sq_c, sk_t, sk_h, sk_c, sg_t, sg_h, sg_c, sb_t, sb_h,
    scale, lower_bound, eps, H,
    K: tl.constexpr, SAFE: tl.constexpr,
):  # fmt: skip
    """One chunk of one head. table[c] = (token of row 0, first token, end token) of chunk c."""
    c = tl.program_id(0) // H
    h = tl.program_id(0) % H
    base = tl.load(table + 3 * c)
    first = tl.load(table + 3 * c + 1)
    end = tl.load(table + 3 * c + 2)
    cols = tl.arange(0, K)
    r = tl.arange(0, 32)
    h64 = h.to(tl.int64)
    q += h64 * sq_h
    k += h64 * sk_h
    g += h64 * sg_h
    beta += h64 * sb_h
    exp_A = tl.exp2(tl.load(A_log + h).to(tl.float32) * LOG2E)
    bias = tl.load(dt_bias + h * K + cols).to(tl.float32)

    t0 = base + r
    t1 = base + 32 + r
    valid0 = (t0 >= first) & (t0 < end)
    valid1 = (t1 >= first) & (t1 < end)
    b0 = tl.where(valid0, sigmoid(tl.load(beta + t0 * sb_t, mask=valid0, other=0.0).to(tl.float32)), 0.0)
    b1 = tl.where(valid1, sigmoid(tl.load(beta + t1 * sb_t, mask=valid1, other=0.0).to(tl.float32)), 0.0)
    g0 = log2_decay(load_rows(g, t0, valid0, cols, sg_t, sg_c).to(tl.float32) + bias[None, :], exp_A, lower_bound, SAFE)
    g1 = log2_decay(load_rows(g, t1, valid1, cols, sg_t, sg_c).to(tl.float32) + bias[None, :], exp_A, lower_bound, SAFE)
    g0 = tl.where(valid0[:, None], g0, 0.0)
    g1 = tl.where(valid1[:, None], g1, 0.0)
    k0, _ = normalised(load_rows(k, t0, valid0, cols, sk_t, sk_c), eps)
    k1, _ = normalised(load_rows(k, t1, valid1, cols, sk_t, sk_c), eps)
    q0, _ = normalised(load_rows(q, t0, valid0, cols, sq_t, sq_c), eps)
    q1, _ = normalised(load_rows(q, t1, valid1, cols, sq_t, sq_c), eps)
    q0 *= scale
    q1 *= scale

    # Cumulative decay inside each block, and each block's total.
    G0 = tl.cumsum(g0, axis=0)
    G1 = tl.cumsum(g1, axis=0)
    E0 = tl.sum(g0, axis=0)
    E1 = tl.sum(g1, axis=0)
    i = r[:, None]
    j = r[None, :]
    if SAFE:
        up0 = tl.exp2(G0 + HALF)
        up1 = tl.exp2(G1 + HALF)
        down0 = k0 * tl.exp2(-HALF - G0)
        down1 = k1 * tl.exp2(-HALF - G1)
        L00 = tl.dot(k0 * up0, tl.trans(down0))
        P00 = tl.dot(q0 * up0, tl.trans(down0))
        L11 = tl.dot(k1 * up1, tl.trans(down1))
        P11 = tl.dot(q1 * up1, tl.trans(down1))
        from0 = up0 * TINY  # 2^G: decay from the start of the block
        from1 = up1 * TINY
        kend0 = down0 * tl.exp2(E0 + HALF)[None, :]  # k 2^(E - G): decay to the end of the block
        kend1 = down1 * tl.exp2(E1 + HALF)[None, :]
    else:
        L00, P00 = pair_products(k0, q0, G0, K)
        L11, P11 = pair_products(k1, q1, G1, K)
        from0 = tl.exp2(G0)
        from1 = tl.exp2(G1)
        kend0 = k0 * tl.exp2(E0[None, :] - G0)
        kend1 = k1 * tl.exp2(E1[None, :] - G1)
    # Select, never multiply by a mask: the acausal half may be inf.
    L00 = tl.where(i > j, L00 * b0[:, None], 0.0)
    L11 = tl.where(i > j, L11 * b1[:, None], 0.0)
    P00 = tl.where(i >= j, P00, 0.0)
    P11 = tl.where(i >= j, P11, 0.0)
    kfrom1 = k1 * from1
    qfrom1 = q1 * from1
    L10 = tl.dot(kfrom1, tl.trans(kend0)) * b1[:, None]
    P10 = tl.dot(qfrom1, tl.trans(kend0))

    X00 = inverse32(L00)
    X11 = inverse32(L11)
    A00 = X00 * b0[None, :]
    A11 = X11 * b1[None, :]
    A10 = -tl.dot(X11, tl.dot(L10, A00))

    eE0 = tl.exp2(E0)[None, :]
    eE1 = tl.exp2(E1)[None, :]
    khat0 = k0 * from0
    khat1 = kfrom1 * eE0
    w0 = tl.dot(A00, khat0)
    w1 = tl.dot(A11, khat1, acc=tl.dot(A10, khat0))

    ch = tl.program_id(0).to(tl.int64)
    wide = ch * (64 * K) + i * K + cols[None, :]
    low: tl.constexpr = 32 * K
    dtype = w_out.dtype.element_ty
    tl.store(w_out + wide, (-w0).to(dtype))
    tl.store(w_out + wide + low, (-w1).to(dtype))
    tl.store(q_out + wide, (q0 * from0).to(dtype))
    tl.store(q_out + wide + low, (qfrom1 * eE0).to(dtype))
    tl.store(k_out + wide, (kend0 * eE1).to(dtype))
    tl.store(k_out + wide + low, kend1.to(dtype))
    square = ch * (64 * 64) + i * 64 + j
    zero = tl.zeros([32, 32], dtype)
    tl.store(A_out + square, A00.to(dtype))
    tl.store(A_out + square + 32, zero)
    tl.store(A_out + square + 32 * 64, A10.to(dtype))
    tl.store(A_out + square + 32 * 64 + 32, A11.to(dtype))
    tl.store(P_out + square, P00.to(dtype))
    tl.store(P_out + square + 32, zero)
    tl.store(P_out + square + 32 * 64, P10.to(dtype))
    tl.store(P_out + square + 32 * 64 + 32, P11.to(dtype))
    tl.store(decay_out + ch * K + cols, tl.exp2(E0 + E1))
