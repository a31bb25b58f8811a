"""KDA kernel K1: everything of a chunk that does not depend on the state.

One program prepares one chunk of one head: gate, L2 norms, sigmoid, cumulative decay, the triangular inverse, and
the operands of the scan. With G the inclusive cumulative sum of the log decay g inside the chunk, it writes
    w  = A diag(beta) (k e^G)            (stored negated, so that the scan only adds)
    q~ = K^-0.5 q e^G
    k- = k e^(G_C - G)
    A diag(beta), A = (I + L)^-1,        L_ij = beta_i sum_c k_ic k_jc e^(G_ic - G_jc), j < i
    P_ij = K^-0.5 sum_c q_ic k_jc e^(G_ic - G_jc), j <= i
    e^(G_C), 1 / |k| and K^-0.5 / |q| of each row
The chunk is handled as two blocks of 32 rows, because e^(G_i - G_j) can be factored into two numbers in float32's
range only over 32 rows (at -5 nats a token). Anchors use past gates only, so a row never depends on later rows, not
even by rounding.

Legend: C rows of a chunk (64), K key dim, H heads. All exponents are base 2: a gate in nats times log2(e).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

# Half of 32 rows * 5 nats in base 2: e^(G_i - G_j) = 2^(G_i + HALF) * 2^(-HALF - G_j), both within 2^+-115.5.
HALF: tl.constexpr = tl.constexpr(115.0)
TINY: tl.constexpr = tl.constexpr(2.0**-115)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
FLOOR: tl.constexpr = tl.constexpr(-128.0)
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
        logs = -(exp_A * LOG2E) * softplus
        # Nothing is left at 2^-128; sums of larger numbers would round by more than a token's decay.
        return tl.where(logs < FLOOR, FLOOR, logs)


@triton.jit
def load_rows(ptr, t, valid, cols, stride_t, stride_c):
    """Rows t of a [T, cols] matrix; rows that are not valid are never read and come back as zeros."""
    return tl.load(ptr + t[:, None] * stride_t + cols[None, :] * stride_c, mask=valid[:, None], other=0.0)


@triton.jit
def inverse_norm(x, eps):
    """1 / sqrt(sum x^2 + eps) per row, in float32."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) + eps)


@triton.jit
def level_mask(i, j, n: tl.constexpr):
    """For i > j: true where i and j lie in the same group of 2^(n+1) but in different halves of it."""
    return ((i ^ j) >> n) == 1


@triton.jit
def level_exponents(G, s: tl.constexpr, B: tl.constexpr):
    """Exponents of the pairs (right half row, left half column) in groups of 2s rows, anchored at the last left row.

    Row part G_i - a and column part a - G_j are both <= 0 for the rows that use them, whatever the gates are.
    """
    Gg = tl.reshape(G, [16 // s, 2 * s, B])
    row = tl.arange(0, 2 * s)[None, :, None]
    anchor = tl.sum(tl.where(row == s - 1, Gg, 0.0), axis=1, keep_dims=True)
    rows_part = tl.where(row >= s, Gg - anchor, 0.0)
    cols_part = tl.where(row < s, anchor - Gg, 0.0)
    return tl.reshape(rows_part, [32, B]), tl.reshape(cols_part, [32, B])


@triton.jit
def add_pairs(kk, qk, k_up, q_up, k_down, LOW: tl.constexpr):
    """Add sum_c x_ic k_jc, x = k in tf32 and q in the working dtype."""
    kk = tl.dot(k_up, tl.trans(k_down), acc=kk)
    qk = tl.dot(q_up.to(LOW), tl.trans(k_down.to(LOW)), acc=qk)
    return kk, qk


@triton.jit
def cumulative(logs, LOW: tl.constexpr):
    """Inclusive cumulative sum over 32 rows, on the tensor cores: exact ones times the value split in two."""
    i = tl.arange(0, 32)
    ones = tl.where(i[:, None] >= i[None, :], 1.0, 0.0).to(LOW)
    high = logs.to(LOW)
    G = tl.dot(ones, high)
    if tl.float32 != LOW:
        G = tl.dot(ones, (logs - high.to(tl.float32)).to(LOW), acc=G)
    return G


@triton.jit
def own_pairs(kk, qk, k, q, G, E, SAFE: tl.constexpr, B: tl.constexpr, LOW: tl.constexpr):
    """Products inside one block; also k 2^G, q 2^G (decayed from the block's start) and k 2^(E - G) (to its end)."""
    if SAFE:
        up = tl.exp2(G + HALF)
        down = k * tl.exp2(-HALF - G)
        kk, qk = add_pairs(kk, qk, k * up, q * up, down, LOW)
        start = up * TINY
        k_stop = down * tl.exp2(E + HALF)[None, :]
    else:
        i = tl.arange(0, 32)[:, None]
        j = tl.arange(0, 32)[None, :]
        qk += tl.where(i == j, tl.sum(q * k, axis=1)[:, None], 0.0)
        for n in tl.static_range(5):
            rows_part, cols_part = level_exponents(G, 1 << n, B)
            up = tl.exp2(rows_part)
            zero = tl.zeros([32, 32], tl.float32)
            kn, qn = add_pairs(zero, zero, k * up, q * up, k * tl.exp2(cols_part), LOW)
            kk += tl.where((i > j) & level_mask(i, j, n), kn, 0.0)
            qk += tl.where((i > j) & level_mask(i, j, n), qn, 0.0)
        start = tl.exp2(G)
        k_stop = k * tl.exp2(E[None, :] - G)
    return kk, qk, k * start, q * start, k_stop


@triton.jit
def unit_inverse(L):
    """(I + L)^-1 of a strictly lower [32, 32] by merging 1, 2, .. 16 rows: 16-row blocks in float32, the rest tf32.

    [[X, 0], [-Y M X, Y]] inverts [[X^-1, 0], [M, Y^-1]]: one merge is X - X M X over all blocks at once. Doubling
    (the Neumann product) would be shorter and fails on similar keys.
    """
    a = tl.arange(0, 2)[:, None, None, None]
    b = tl.arange(0, 2)[None, None, :, None]
    D = tl.sum(tl.where(a == b, tl.reshape(L, [2, 16, 2, 16]), 0.0), axis=2)
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    X16 = tl.where(i == j, 1.0, tl.where(level_mask(i, j, 0), -D, 0.0))
    for n in tl.static_range(1, 4):
        M = tl.where(level_mask(i, j, n), D, 0.0)
        MX = tl.dot(M, X16, input_precision="tf32x3")
        X16 -= tl.dot(X16, MX, input_precision="tf32x3")
    X = tl.reshape(tl.where(a == b, X16[:, :, None, :], 0.0), [32, 32])
    i = tl.arange(0, 32)[:, None]
    j = tl.arange(0, 32)[None, :]
    M = tl.where(level_mask(i, j, 4), L, 0.0)
    return X - tl.dot(X, tl.dot(M, X))


@triton.jit
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, table, w_out, q_out, k_out, A_out, P_out, decay_out, norm_out,
    sq_t, sq_h, sq_c, sk_t, sk_h, sk_c, sg_t, sg_h, sg_c, sb_t, sb_h,
    scale, lower_bound, eps, H,
    K: tl.constexpr, B: tl.constexpr, SAFE: tl.constexpr,
):  # fmt: skip
    """One chunk of one head, B key channels at a time. table[c] = (token of row 0, first token, end token)."""
    c = tl.program_id(0) // H
    h = tl.program_id(0) % H
    base = tl.load(table + 3 * c)
    first = (tl.load(table + 3 * c + 1) - base).to(tl.int32)
    end = (tl.load(table + 3 * c + 2) - base).to(tl.int32)
    h64 = h.to(tl.int64)
    q += h64 * sq_h + base * sq_t
    k += h64 * sk_h + base * sk_t
    g += h64 * sg_h + base * sg_t
    beta += h64 * sb_h + base * sb_t
    dt_bias += h * K
    LOW: tl.constexpr = w_out.dtype.element_ty
    ch = tl.program_id(0).to(tl.int64)
    w_out += ch * (64 * K)
    q_out += ch * (64 * K)
    k_out += ch * (64 * K)
    A_out += ch * (64 * 64)
    norm_out += ch * 128
    P_out += ch * (64 * 64)

    r0 = tl.arange(0, 32)
    r1 = 32 + r0
    in0 = (r0 >= first) & (r0 < end)
    in1 = (r1 >= first) & (r1 < end)
    every = tl.arange(0, K)
    rk0 = inverse_norm(load_rows(k, r0, in0, every, sk_t, sk_c), eps)[:, None]
    rk1 = inverse_norm(load_rows(k, r1, in1, every, sk_t, sk_c), eps)[:, None]
    rq0 = inverse_norm(load_rows(q, r0, in0, every, sq_t, sq_c), eps)[:, None] * scale
    rq1 = inverse_norm(load_rows(q, r1, in1, every, sq_t, sq_c), eps)[:, None] * scale
    column = r0[:, None]
    tl.store(norm_out + column, tl.where(in0[:, None], rk0, 0.0))
    tl.store(norm_out + 32 + column, tl.where(in1[:, None], rk1, 0.0))
    tl.store(norm_out + 64 + column, tl.where(in0[:, None], rq0, 0.0))
    tl.store(norm_out + 96 + column, tl.where(in1[:, None], rq1, 0.0))
    b0 = tl.where(in0, sigmoid(tl.load(beta + r0 * sb_t, mask=in0, other=0.0).to(tl.float32)), 0.0)
    b1 = tl.where(in1, sigmoid(tl.load(beta + r1 * sb_t, mask=in1, other=0.0).to(tl.float32)), 0.0)
    exp_A = tl.exp2(tl.load(A_log + h).to(tl.float32) * LOG2E)

    kk00 = tl.zeros([32, 32], tl.float32)
    kk10 = tl.zeros([32, 32], tl.float32)
    kk11 = tl.zeros([32, 32], tl.float32)
    qk00 = tl.zeros([32, 32], tl.float32)
    qk10 = tl.zeros([32, 32], tl.float32)
    qk11 = tl.zeros([32, 32], tl.float32)
    for block in tl.range(0, K // B, num_stages=1):
        cols = block * B + tl.arange(0, B)
        bias = tl.load(dt_bias + cols).to(tl.float32)[None, :]
        at0 = r0[:, None] * K + cols[None, :]
        at1 = r1[:, None] * K + cols[None, :]

        x = load_rows(g, r0, in0, cols, sg_t, sg_c).to(tl.float32) + bias
        G = cumulative(tl.where(in0[:, None], log2_decay(x, exp_A, lower_bound, SAFE), 0.0), LOW)
        E0 = tl.min(G, axis=0)
        k_n = load_rows(k, r0, in0, cols, sk_t, sk_c).to(tl.float32) * rk0
        q_n = load_rows(q, r0, in0, cols, sq_t, sq_c).to(tl.float32) * rq0
        kk00, qk00, k_start, q_start, k_stop0 = own_pairs(kk00, qk00, k_n, q_n, G, E0, SAFE, B, LOW)
        tl.store(w_out + at0, k_start.to(LOW))  # k^, until A is there
        tl.store(q_out + at0, q_start.to(LOW))

        x = load_rows(g, r1, in1, cols, sg_t, sg_c).to(tl.float32) + bias
        G = cumulative(tl.where(in1[:, None], log2_decay(x, exp_A, lower_bound, SAFE), 0.0), LOW)
        E1 = tl.min(G, axis=0)
        k_n = load_rows(k, r1, in1, cols, sk_t, sk_c).to(tl.float32) * rk1
        q_n = load_rows(q, r1, in1, cols, sq_t, sq_c).to(tl.float32) * rq1
        kk11, qk11, k_start, q_start, k_stop1 = own_pairs(kk11, qk11, k_n, q_n, G, E1, SAFE, B, LOW)
        kk10, qk10 = add_pairs(kk10, qk10, k_start, q_start, k_stop0, LOW)
        before = tl.exp2(E0)[None, :]
        tl.store(w_out + at1, (k_start * before).to(LOW))
        tl.store(q_out + at1, (q_start * before).to(LOW))
        tl.store(k_out + at0, (k_stop0 * tl.exp2(E1)[None, :]).to(LOW))
        tl.store(k_out + at1, k_stop1.to(LOW))
        tl.store(decay_out + ch * K + cols, tl.exp2(E0 + E1))

    i = r0[:, None]
    j = r0[None, :]
    at = i * 64 + j
    # Select, never multiply by a mask: where j > i the products may be inf.
    zero = tl.zeros([32, 32], LOW)
    tl.store(P_out + at, tl.where(i >= j, qk00, 0.0).to(LOW))
    tl.store(P_out + at + 32, zero)
    tl.store(P_out + at + 32 * 64, qk10.to(LOW))
    tl.store(P_out + at + 32 * 64 + 32, tl.where(i >= j, qk11, 0.0).to(LOW))
    X0 = unit_inverse(tl.where(i > j, kk00 * b0[:, None], 0.0))
    X1 = unit_inverse(tl.where(i > j, kk11 * b1[:, None], 0.0))
    A10 = (-tl.dot(X1, tl.dot(kk10 * b1[:, None], X0)) * b0[None, :]).to(LOW)
    A00 = (X0 * b0[None, :]).to(LOW)
    A11 = (X1 * b1[None, :]).to(LOW)
    tl.store(A_out + at, A00)
    tl.store(A_out + at + 32, zero)
    tl.store(A_out + at + 32 * 64, A10)
    tl.store(A_out + at + 32 * 64 + 32, A11)
    tl.debug_barrier()
    at = i * K + every[None, :]
    k_hat = tl.load(w_out + at)
    tl.store(w_out + at, (-tl.dot(A00, k_hat)).to(LOW))
    w1 = tl.dot(A10, k_hat)
    w1 = tl.dot(A11, tl.load(w_out + at + 32 * K), acc=w1)
    tl.store(w_out + at + 32 * K, (-w1).to(LOW))
