"""KDA kernels B3: gradients of one chunk of one head, once the scans have run in both directions.

With S the state before the chunk, dS' the gradient of the state after it, U, dU and dO:
    dv = (A beta)^T dU,    dP = tril(dO U^T),    M = beta dL = -stril(dv U^T)
    d beta_logit = (1 - beta) / beta (dv . U)
    dq  = sum_j dP_ij k_j e^(G_i - G_j) + e^G (dO S^T)
    dk  = row: sum_j M_ij k_j e^(G_i - G_j), column: sum_i (M_ij k_i + dP_ij q_i) e^(G_i - G_j),
          k^: -e^G (dv S^T), k-: e^(G_C - G) (U dS'^T)
    dG  = q dq + k (row + k^) - k (column + k-), its last row also sum_t k (k-) + e^(G_C) rowsum(S dS')
    dg  = reverse cumulative sum of dG
No gradient of the triangular inverse is formed. The diagonal of P does not depend on G: it is kept out of dG, where it
would be a difference of two large equal numbers. q carries the scale K^-0.5.

Legend: C chunk rows (64), K key dim, V value dim, B key channels handled at a time.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.kda.triton_prepare import CLAMP, FLOOR, HALF, LOG2E, TINY, level_mask, load_rows, log2_decay, sigmoid


@triton.jit
def state_gradient_kernel(
    A, P, kept_S, kept_dS, kept_U, kept_dU, decay, d_o, beta,
    dv_out, d_beta, diagonal, q_start, k_start, k_stop, last, table, so_t, so_h, so_c, sb_t, sb_h, H, blocks,
    K: tl.constexpr, V: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """All plain matrix products: dv and d beta_logit, the pair gradients, and what flows through states.

    M overwrites A; dP without its diagonal overwrites P, the diagonal goes to [X, H, C]. The gradients of q~, k^ and
    k- [X, H, C, K] go to q_start, k_start and k_stop; e^(G_C) rowsum(S dS') [X, H, K] to last. blocks = K / B.
    """
    c = tl.program_id(0) // H
    h = tl.program_id(0) % H
    base = tl.load(table + 3 * c)
    first = (tl.load(table + 3 * c + 1) - base).to(tl.int32)
    end = (tl.load(table + 3 * c + 2) - base).to(tl.int32)
    h64 = h.to(tl.int64)
    ch = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, 64)
    valid = (r >= first) & (r < end)
    values = tl.arange(0, V)
    square = ch * (64 * 64) + r[:, None] * 64 + r[None, :]
    wide = ch * (64 * V) + r[:, None] * V + values[None, :]
    LOW: tl.constexpr = A.dtype.element_ty

    A_tile = tl.load(A + square)
    U = tl.load(kept_U + wide)
    dU = tl.load(kept_dU + wide)
    dO = load_rows(d_o + h64 * so_h + base * so_t, r, valid, values, so_t, so_c).to(LOW)
    dv = tl.dot(tl.trans(A_tile), dU)
    dv_low = dv.to(LOW)
    tl.store(dv_out + ((base + r[:, None]) * H + h) * V + values[None, :], dv_low, mask=valid[:, None])
    logit = tl.load(beta + h64 * sb_h + (base + r) * sb_t, mask=valid, other=0.0).to(tl.float32)
    # (1 - beta) / beta = e^-logit
    odds = tl.exp2(-LOG2E * tl.minimum(tl.maximum(logit, -CLAMP), CLAMP))
    db = odds * tl.sum(dv * U.to(tl.float32), axis=1)
    tl.store(d_beta + (base + r) * H + h, db.to(d_beta.dtype.element_ty), mask=valid)
    i = r[:, None]
    j = r[None, :]
    M = tl.where(i > j, -tl.dot(dv_low, tl.trans(U)), 0.0)
    dP = tl.dot(dO, tl.trans(U))
    tl.store(diagonal + ch * 64 + r, tl.sum(tl.where(i == j, dP, 0.0), axis=1))
    dP = tl.where(i > j, dP, 0.0)
    tl.debug_barrier()
    tl.store(A + square, M.to(LOW))
    tl.store(P + square, dP.to(LOW))
    for block in tl.range(0, blocks, num_stages=1):
        cols = block * B + tl.arange(0, B)
        of_state = ch * (K * V) + values[:, None] * K + cols[None, :]
        at = ch * (64 * K) + i * K + cols[None, :]
        S = tl.load(kept_S + of_state)
        tl.store(q_start + at, tl.dot(dO, S).to(LOW))
        tl.store(k_start + at, (-tl.dot(dv_low, S)).to(LOW))
        dS = tl.load(kept_dS + of_state)
        tl.store(k_stop + at, tl.dot(U, dS).to(LOW))
        product = tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=0)
        tl.store(last + ch * K + cols, product * tl.load(decay + ch * K + cols))


@triton.jit
def triangle_sum(mask, x, LOW: tl.constexpr):
    """Sums of rows of x picked by a 0/1 matrix, on the tensor cores: the value is split in two working numbers."""
    ones = tl.where(mask, 1.0, 0.0).to(LOW)
    high = x.to(LOW)
    total = tl.dot(ones, high)
    if tl.float32 != LOW:
        total = tl.dot(ones, (x - high.to(tl.float32)).to(LOW), acc=total)
    return total


@triton.jit
def level_exponents64(G, s: tl.constexpr, B: tl.constexpr):
    """As `triton_prepare.level_exponents`, for 64 rows."""
    Gg = tl.reshape(G, [32 // s, 2 * s, B])
    row = tl.arange(0, 2 * s)[None, :, None]
    anchor = tl.sum(tl.where(row == s - 1, Gg, 0.0), axis=1, keep_dims=True)
    rows_part = tl.where(row >= s, Gg - anchor, 0.0)
    cols_part = tl.where(row < s, anchor - Gg, 0.0)
    return tl.reshape(rows_part, [64, B]), tl.reshape(cols_part, [64, B])


@triton.jit
def pairs_of_rows(dP, M, k_down, LOW: tl.constexpr):
    """sum_j dP_ij k_j and sum_j M_ij k_j."""
    k_down = k_down.to(LOW)
    return tl.dot(dP, k_down), tl.dot(M, k_down)


@triton.jit
def pairs_of_columns(dP, M, k_up, q_up, LOW: tl.constexpr):
    """sum_i M_ij k_i + dP_ij q_i."""
    return tl.dot(tl.trans(dP), q_up.to(LOW), acc=tl.dot(tl.trans(M), k_up.to(LOW)))


@triton.jit
def key_gradient_kernel(
    q, k, g, A_log, dt_bias, table, norms, M, dP, diagonal, q_start, k_start, k_stop, last,
    dq_out, dk_out, dg_out, d_bias, d_A, radial,
    sq_t, sq_h, sq_c, sk_t, sk_h, sk_c, sg_t, sg_h, sg_c,
    lower_bound, H,
    K: tl.constexpr, B: tl.constexpr, SAFE: tl.constexpr,
):  # fmt: skip
    """B channels of dq, dk, dg_raw, and this chunk's share of d dt_bias [X, H, K] and d A_log [X, H, K / B].

    dq and dk still hold the part along q and k, which needs all channels; radial [X, H, K / B, 2, C] says how much.
    """
    block = tl.program_id(0) % (K // B)
    chunk_head = tl.program_id(0) // (K // B)
    c = chunk_head // H
    h = chunk_head % H
    base = tl.load(table + 3 * c)
    first = (tl.load(table + 3 * c + 1) - base).to(tl.int32)
    end = (tl.load(table + 3 * c + 2) - base).to(tl.int32)
    h64 = h.to(tl.int64)
    ch = chunk_head.to(tl.int64)
    q += h64 * sq_h + base * sq_t
    k += h64 * sk_h + base * sk_t
    g += h64 * sg_h + base * sg_t
    outputs = (base * H + h64) * K
    LOW: tl.constexpr = M.dtype.element_ty
    r = tl.arange(0, 64)
    valid = (r >= first) & (r < end)
    cols = block * B + tl.arange(0, B)
    i = r[:, None]
    j = r[None, :]
    own = i // 32 == j // 32
    rk = tl.load(norms + ch * 128 + i)
    rq = tl.load(norms + ch * 128 + 64 + i)
    k_n = load_rows(k, r, valid, cols, sk_t, sk_c).to(tl.float32) * rk
    q_n = load_rows(q, r, valid, cols, sq_t, sq_c).to(tl.float32) * rq
    exp_A = tl.exp2(tl.load(A_log + h).to(tl.float32) * LOG2E)
    bias = tl.load(dt_bias + h * K + cols)[None, :]
    x = load_rows(g, r, valid, cols, sg_t, sg_c).to(tl.float32) + bias
    logs = tl.where(valid[:, None], log2_decay(x, exp_A, lower_bound, SAFE), 0.0)
    G = triangle_sum((i >= j) & own, logs, LOW)
    E0 = tl.min(tl.where(i < 32, G, 0.0), axis=0)[None, :]
    E1 = tl.min(tl.where(i < 32, 0.0, G), axis=0)[None, :]
    square = ch * (64 * 64) + i * 64 + j
    M_own = tl.load(M + square, mask=own, other=0.0)
    dP_own = tl.load(dP + square, mask=own, other=0.0)
    M_cross = tl.load(M + square, mask=(i >= 32) & (j < 32), other=0.0)
    dP_cross = tl.load(dP + square, mask=(i >= 32) & (j < 32), other=0.0)

    # Pairs inside a 32-row block.
    if SAFE:
        up = tl.exp2(G + HALF)
        down = tl.exp2(-HALF - G)
        dq, row = pairs_of_rows(dP_own, M_own, k_n * down, LOW)
        dq *= up
        row *= up
        column = down * pairs_of_columns(dP_own, M_own, k_n * up, q_n * up, LOW)
        start = up * TINY
        stop = down * tl.exp2(tl.where(i < 32, E0, E1) + HALF)
    else:
        dq = tl.zeros([64, B], tl.float32)
        row = tl.zeros([64, B], tl.float32)
        column = tl.zeros([64, B], tl.float32)
        for n in tl.static_range(5):
            rows_part, cols_part = level_exponents64(G, 1 << n, B)
            up = tl.exp2(rows_part)
            down = tl.exp2(cols_part)
            dP_level = tl.where(level_mask(i, j, n), dP_own, 0.0).to(LOW)
            M_level = tl.where(level_mask(i, j, n), M_own, 0.0).to(LOW)
            dq_n, row_n = pairs_of_rows(dP_level, M_level, k_n * down, LOW)
            dq += up * dq_n
            row += up * row_n
            column += down * pairs_of_columns(dP_level, M_level, k_n * up, q_n * up, LOW)
        start = tl.exp2(G)
        stop = tl.exp2(tl.where(i < 32, E0, E1) - G)
    # Rows of the second block with columns of the first.
    dq_n, row_n = pairs_of_rows(dP_cross, M_cross, k_n * stop, LOW)
    dq += start * dq_n
    row += start * row_n
    column += stop * pairs_of_columns(dP_cross, M_cross, k_n * start, q_n * start, LOW)
    # Through the states.
    at = ch * (64 * K) + i * K + cols[None, :]
    start *= tl.where(i < 32, 1.0, tl.exp2(E0))  # from the start of the chunk
    stop *= tl.where(i < 32, tl.exp2(E1), 1.0)  # to the end of the chunk
    dq += start * tl.load(q_start + at).to(tl.float32)
    row += start * tl.load(k_start + at).to(tl.float32)
    to_stop = stop * tl.load(k_stop + at).to(tl.float32)
    at_end = tl.load(last + ch * K + cols) + tl.sum(k_n * to_stop, axis=0)
    column += to_stop
    dG = q_n * dq + k_n * (row - column)
    p = tl.load(diagonal + ch * 64 + r)[:, None]
    dq += p * k_n
    dk = row + column + p * q_n

    out = outputs + i * (H * K) + cols[None, :]
    split = ch * (2 * (K // B)) + 2 * block
    tl.store(radial + split * 64 + r, tl.sum(q_n * dq, axis=1))
    tl.store(radial + split * 64 + 64 + r, tl.sum(k_n * dk, axis=1))
    tl.store(dq_out + out, (dq * rq).to(dq_out.dtype.element_ty), mask=valid[:, None])
    tl.store(dk_out + out, (dk * rk).to(dk_out.dtype.element_ty), mask=valid[:, None])
    # Through the gate: dg is the gradient of the log decay in nats.
    dg = triangle_sum(i <= j, dG, LOW) + at_end[None, :]
    if SAFE:
        # s (1 - s) = e s^2 with s = 1 / (1 + e), exact also where s rounds to 1.
        e = tl.exp2(-LOG2E * tl.minimum(tl.maximum(exp_A * x, -CLAMP), CLAMP))
        s = 1.0 / (1.0 + e)
        dx = dg * (lower_bound * exp_A) * e * s * s
        dA = dx * x
    else:
        # Where nothing is left dg is rounding noise, and e^A may be inf. A gate that is no number stays one.
        dx = tl.where(logs <= FLOOR, 0.0, -dg * exp_A * sigmoid(x))
        dA = tl.where(logs <= FLOOR, 0.0, dg * logs * (1.0 / LOG2E))
    dx = tl.where(valid[:, None], dx, 0.0)
    tl.store(d_A + ch * (K // B) + block, tl.sum(tl.where(valid[:, None], dA, 0.0)))
    tl.store(d_bias + ch * K + cols, tl.sum(dx, axis=0))
    tl.store(dg_out + out, dx.to(dg_out.dtype.element_ty), mask=valid[:, None])


@triton.jit
def norm_gradient_kernel(
    q, k, dq, dk, norms, radial, table, sq_t, sq_h, sq_c, sk_t, sk_h, sk_c, scale, H,
    K: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Take the parts along q and k off their gradients, in place: both were divided by their norms."""
    c = tl.program_id(0) // H
    h = tl.program_id(0) % H
    base = tl.load(table + 3 * c)
    first = (tl.load(table + 3 * c + 1) - base).to(tl.int32)
    end = (tl.load(table + 3 * c + 2) - base).to(tl.int32)
    r = tl.arange(0, 64)
    valid = (r >= first) & (r < end)
    cols = tl.arange(0, K)
    h64 = h.to(tl.int64)
    ch = tl.program_id(0).to(tl.int64)
    along_q = tl.zeros([64], tl.float32)
    along_k = tl.zeros([64], tl.float32)
    for block in tl.static_range(K // B):
        along_q += tl.load(radial + (ch * (2 * (K // B)) + 2 * block) * 64 + r)
        along_k += tl.load(radial + (ch * (2 * (K // B)) + 2 * block + 1) * 64 + r)
    rk = tl.load(norms + ch * 128 + r)
    rq = tl.load(norms + ch * 128 + 64 + r) / scale
    at = ((base + r[:, None]) * H + h) * K + cols[None, :]
    raw = load_rows(q + h64 * sq_h + base * sq_t, r, valid, cols, sq_t, sq_c).to(tl.float32)
    value = tl.load(dq + at, mask=valid[:, None], other=0.0).to(tl.float32) - raw * (rq * rq * along_q)[:, None]
    tl.store(dq + at, value.to(dq.dtype.element_ty), mask=valid[:, None])
    raw = load_rows(k + h64 * sk_h + base * sk_t, r, valid, cols, sk_t, sk_c).to(tl.float32)
    value = tl.load(dk + at, mask=valid[:, None], other=0.0).to(tl.float32) - raw * (rk * rk * along_k)[:, None]
    tl.store(dk + at, value.to(dk.dtype.element_ty), mask=valid[:, None])
