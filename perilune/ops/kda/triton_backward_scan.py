"""KDA kernel B2: the reverse scan, from the last chunk to the first.

One program owns a slice of the value dim of one head of one sequence, as in the forward scan. With dS' the gradient of
the state after a chunk and dO of its outputs:
    dU = P^T dO + k- dS',    dS = e^(G_C) dS' + q~^T dO - w^T dU
It stores dU and dS' (before the step), if wanted, for the gradient kernels. The state's gradient is kept transposed in
float32 registers, as the state is in the forward scan.

Legend: N sequences, H heads, C chunk rows (64), K key dim, V value dim.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reverse_scan_kernel(
    w, q, k, P, decay, d_o, d_final, d_states, d_initial, kept_dS, kept_dU, first_chunk, cu, shift, slots,
    so_t, so_h, so_c, H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    FINAL: tl.constexpr, STATES: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    splits: tl.constexpr = V // BV
    pid = tl.program_id(0)
    part = pid % splits
    h = (pid // splits) % H
    n = pid // (splits * H)
    begin = tl.load(cu + n)
    end = tl.load(cu + n + 1)
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
    d_o += h.to(tl.int64) * so_h
    dtype = w.dtype.element_ty

    if FINAL:
        dS = tl.load(d_final + nh * (K * V) + state)
    else:
        dS = tl.zeros([BV, K], tl.float32)
    for step in tl.range(0, count, num_stages=STAGES):
        i = count - 1 - step
        ch = (c0 + i) * H + h
        t = token + i * 64 + rows
        valid = (t >= begin) & (t < end)
        if STATES:
            slot = tl.load(slots + c0 + i)
            if slot >= 0:
                dS += tl.load(d_states + (slot.to(tl.int64) * H + h) * (K * V) + state)
        dO = tl.load(d_o + t[:, None] * so_t + cols[None, :] * so_c, mask=valid[:, None], other=0.0).to(dtype)
        P_tile = tl.load(P + ch * (64 * 64) + square)
        k_tile = tl.load(k + ch * (64 * K) + wide)
        w_tile = tl.load(w + ch * (64 * K) + wide)
        q_tile = tl.load(q + ch * (64 * K) + wide)
        eG = tl.load(decay + ch * K + keys)
        dS_low = dS.to(dtype)
        if KEEP:
            tl.store(kept_dS + ch * (K * V) + cols[:, None] * K + keys[None, :], dS_low)
        dU = tl.dot(tl.trans(dO), P_tile)
        dU = tl.dot(dS_low, tl.trans(k_tile), acc=dU)
        dU_low = dU.to(dtype)
        if KEEP:
            tl.store(kept_dU + ch * (64 * V) + rows[None, :] * V + cols[:, None], dU_low)
        # w is stored negated, so this adds -w^T dU.
        dS = tl.dot(dU_low, w_tile, acc=dS * eG[None, :])
        dS = tl.dot(tl.trans(dO), q_tile, acc=dS)
    tl.store(d_initial + nh * (K * V) + state, dS)
