"""KDA kernel K2: the serial scan over a sequence's chunks, and the outputs.

One program owns a slice of the value dim of one head of one sequence and walks its chunks:
    U  = (A beta) v - w S,    o = q~ S + P U,    S <- diag(e^(G_C)) S + k-^T U
As a map of the state (S -> M S + B) a run of chunks is walked twice: from zero gives B, and without v from the
identity, whose columns stand for value channels then, gives M.
The state is kept transposed, S^T [V, K], in float32 registers: then S^T and U^T are always the left operand of a
matrix product and never leave the registers, so the chain from chunk to chunk is two products and no copy.

Legend: N sequences, H heads, C chunk rows (64), K key dim, V value dim.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scan_kernel(
    w, q, k, A, P, decay, v, o, initial, final, states, kept_S, kept_U, first_chunk, cu, shift, slots,
    sv_t, sv_h, sv_c, H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    INITIAL: tl.constexpr, VALUES: tl.constexpr, OUTPUT: tl.constexpr,
    STATES: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """first_chunk [N+1]: chunks of sequence n; shift[n]: rows of its first chunk that lie before its first token.

    INITIAL: "zero", "given" or "identity". VALUES: False leaves v out.
    """
    splits: tl.constexpr = V // BV
    pid = tl.program_id(0)
    part = pid % splits
    h = (pid // splits) % H
    n = pid // (splits * H)
    begin = tl.load(cu + n).to(tl.int64)
    end = tl.load(cu + n + 1).to(tl.int64)
    c0 = tl.load(first_chunk + n).to(tl.int64)
    count = tl.load(first_chunk + n + 1) - tl.load(first_chunk + n)
    token = begin - tl.load(shift + n)

    rows = tl.arange(0, 64)
    keys = tl.arange(0, K)
    cols = part * BV + tl.arange(0, BV)
    wide = rows[:, None] * K + keys[None, :]
    square = rows[:, None] * 64 + rows[None, :]
    state = cols[:, None] + keys[None, :] * V
    nh = n.to(tl.int64) * H + h
    v += h.to(tl.int64) * sv_h
    dtype = w.dtype.element_ty

    if INITIAL == "given":
        S = tl.load(initial + nh * (K * V) + state)
    elif INITIAL == "identity":
        S = tl.where(cols[:, None] == keys[None, :], 1.0, 0.0)
    else:
        S = tl.zeros([BV, K], tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        ch = (c0 + i) * H + h
        t = token + i * 64 + rows
        valid = (t >= begin) & (t < end)
        w_tile = tl.load(w + ch * (64 * K) + wide)
        k_tile = tl.load(k + ch * (64 * K) + wide)
        eG = tl.load(decay + ch * K + keys)
        S_low = S.to(dtype)
        if VALUES:
            v_tile = tl.load(v + t[:, None] * sv_t + cols[None, :] * sv_c, mask=valid[:, None], other=0.0)
            A_tile = tl.load(A + ch * (64 * 64) + square)
            U = tl.dot(tl.trans(v_tile), tl.trans(A_tile))
        else:
            U = tl.zeros([BV, 64], tl.float32)
        U = tl.dot(S_low, tl.trans(w_tile), acc=U)
        U_low = U.to(dtype)
        if OUTPUT:
            q_tile = tl.load(q + ch * (64 * K) + wide)
            P_tile = tl.load(P + ch * (64 * 64) + square)
            out = tl.dot(S_low, tl.trans(q_tile))
            out = tl.dot(U_low, tl.trans(P_tile), acc=out)
            o_ptr = o + (t[:, None] * H + h) * V + cols[None, :]
            tl.store(o_ptr, tl.trans(out).to(o.dtype.element_ty), mask=valid[:, None])
        if KEEP:
            tl.store(kept_S + ch * (K * V) + cols[:, None] * K + keys[None, :], S_low)
            tl.store(kept_U + ch * (64 * V) + rows[None, :] * V + cols[:, None], U_low)
        S = tl.dot(U_low, k_tile, acc=S * eG[None, :])
        if STATES:
            slot = tl.load(slots + c0 + i)
            if slot >= 0:
                tl.store(states + (slot.to(tl.int64) * H + h) * (K * V) + state, S)
    tl.store(final + nh * (K * V) + state, S)
