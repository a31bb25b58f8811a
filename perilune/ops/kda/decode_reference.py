"""KDA decode in plain torch, slot by slot and token by token: the specification of the CUDA and Triton kernels.

Legend as in decode_call.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from perilune.config import Gate
from perilune.ops.kda.decode_call import BLOCK, CENTRE, GRID, L2_EPS, WIDTH, Call, Projected, Tail, Weights


def step(call: Call) -> torch.Tensor:
    """The in-place form; see `decode_step_inplace`, `verify`, `replay_inplace`."""
    inputs, weights, matrix_SHKV, window_S3C = call.inputs, call.weights, call.matrix_SHKV, call.window_S3C
    o_THV = call.output().zero_()
    for n, slot in enumerate(call.slots_N.tolist()):
        if slot < 0:
            continue
        first = n * call.tokens
        count = call.tokens if call.counts_N is None else int(call.counts_N[n])
        S_HKV = matrix_SHKV[slot]
        for t in range(first, first + count):
            q_HK, k_HK, v_HV, g_HK, beta_H1 = _activate(inputs, weights, window_S3C[slot], first, t, S_HKV.dtype)
            S_HKV = g_HK.exp()[:, :, None] * S_HKV
            u_HV = beta_H1 * (v_HV - torch.einsum("hkv,hk->hv", S_HKV, k_HK))
            S_HKV = S_HKV + k_HK[:, :, None] * u_HV[:, None, :]
            o_HV = torch.einsum("hkv,hk->hv", S_HKV, q_HK)
            o_THV[t] = _gated_norm(o_HV, inputs.out_gate_THV[t], weights).to(o_THV.dtype)
        if call.store:
            matrix_SHKV[slot] = S_HKV
            window_S3C[slot] = _channels(inputs, slice(first, first + count), window_S3C[slot])[-3:]
    return o_THV


def tail_step(call: Call) -> torch.Tensor:
    """The tail form; see `tail_step_inplace`, `tail_verify_inplace`."""
    inputs, weights, window_S3C, tail, lengths_N = call.inputs, call.weights, call.window_S3C, call.tail, call.counts_N
    assert tail is not None
    assert lengths_N is not None
    o_THV = call.output().zero_()
    wide = call.matrix_SHKV.dtype
    matrices = (call.slots_N if call.matrices_N is None else call.matrices_N).tolist()
    for n, slot in enumerate(call.slots_N.tolist()):
        if slot < 0:
            continue
        S_HKV, first = call.matrix_SHKV[matrices[n]], n * call.tokens
        for i in range(call.tokens):
            t, entry = first + i, int(lengths_N[n]) + i
            q_HK, k_HK, v_HV, g_HK, beta_H1 = _activate(inputs, weights, window_S3C[slot], first, t, wide)
            local_HK = g_HK if entry % BLOCK == 0 else tail.g_SHRK[slot, :, entry - 1] + g_HK
            key_HRK, decay_HK = _keys_at(tail, slot, entry, local_HK, weights.gate)
            # Reads with k and with q at once, from the boundary matrix and from the entries.
            qk_2HK = torch.stack((q_HK, k_HK))
            read_2HV = torch.einsum("hkv,xhk->xhv", S_HKV, decay_HK.exp() * qk_2HK)
            read_2HV += torch.einsum("hrk,xhk,hrv->xhv", key_HRK, qk_2HK, tail.u_SHRV[slot, :, :entry].to(wide))
            u_HV = beta_H1 * (v_HV - read_2HV[1])
            o_HV = read_2HV[0] + (q_HK * k_HK).sum(-1, keepdim=True) * u_HV
            o_THV[t] = _gated_norm(o_HV, inputs.out_gate_THV[t], weights).to(o_THV.dtype)
            stored_HK = k_HK * (-CENTRE - local_HK).exp() if weights.gate.mode == "safe" else k_HK
            tail.k_SHRK[slot, :, entry] = stored_HK.to(tail.k_SHRK.dtype)
            tail.u_SHRV[slot, :, entry] = u_HV.to(tail.u_SHRV.dtype)
            tail.g_SHRK[slot, :, entry] = local_HK
        if call.store:
            window_S3C[slot] = _channels(inputs, slice(first, first + call.tokens), window_S3C[slot])[-3:]
    if call.target_N is not None:
        lengths_N = lengths_N + call.tokens
        fold(call.matrix_SHKV, tail, lengths_N, call.slots_N, call.matrices_N, call.target_N, weights.gate)
    return o_THV


def fold(
    matrix_SHKV: torch.Tensor,
    tail: Tail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    matrices_N: torch.Tensor | None,
    target_N: torch.Tensor,
    gate: Gate,
) -> None:
    """See `fold_inplace`."""
    matrices = (slots_N if matrices_N is None else matrices_N).tolist()
    lists = slots_N.tolist(), matrices, target_N.tolist(), lengths_N.tolist()
    for slot, matrix, target, length in zip(*lists, strict=True):
        if slot < 0 or length < GRID:
            continue
        none_HK = torch.zeros_like(tail.g_SHRK[slot, :, 0], dtype=matrix_SHKV.dtype)
        key_HRK, decay_HK = _keys_at(tail, slot, GRID, none_HK, gate)
        written_HKV = key_HRK.transpose(1, 2) @ tail.u_SHRV[slot, :, :GRID].to(matrix_SHKV.dtype)
        matrix_SHKV[target] = decay_HK.exp()[:, :, None] * matrix_SHKV[matrix] + written_HKV
        for ring in (tail.k_SHRK, tail.u_SHRV, tail.g_SHRK):
            ring[slot, :, : length - GRID] = ring[slot, :, GRID:length].clone()


def shift_window(
    inputs: Projected, window_S3C: torch.Tensor, slots_N: torch.Tensor, accepted_N: torch.Tensor, drafts: int
) -> None:
    """See `shift_window_inplace`."""
    for n, slot in enumerate(slots_N.tolist()):
        if slot >= 0:
            rows = slice(n * drafts, n * drafts + int(accepted_N[n]))
            window_S3C[slot] = _channels(inputs, rows, window_S3C[slot])[-(WIDTH - 1) :]


def _channels(inputs: Projected, rows: slice, window_3C: torch.Tensor) -> torch.Tensor:
    """The window followed by the tokens `rows`, [3 + tokens, C], in the window's dtype."""
    new = [x[rows].flatten(1) for x in (inputs.q_THK, inputs.k_THK, inputs.v_THV)]
    return torch.cat([window_3C, torch.cat(new, 1).to(window_3C.dtype)])


def _activate(
    inputs: Projected, weights: Weights, window_3C: torch.Tensor, first: int, t: int, wide: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Token t of a sequence whose first new token is `first`: q (scaled), k, v, g (nats), beta, in dtype `wide`."""
    heads, K = inputs.q_THK.shape[1:]
    history_RC = _channels(inputs, slice(first, t), window_3C)[-3:].to(wide)
    now_C = torch.cat([x[t].flatten() for x in (inputs.q_THK, inputs.k_THK, inputs.v_THV)]).to(wide)
    taps_CW = torch.cat([weights.conv_q_CW, weights.conv_k_CW, weights.conv_v_CW]).to(wide)
    mixed_C = F.silu((torch.cat([history_RC, now_C[None]]) * taps_CW.T).sum(0))
    q_HK, k_HK = mixed_C[: 2 * heads * K].view(2, heads, K)
    v_HV = mixed_C[2 * heads * K :].view(heads, -1)
    q_HK = q_HK * torch.rsqrt((q_HK * q_HK).sum(-1, keepdim=True) + L2_EPS) * K**-0.5
    k_HK = k_HK * torch.rsqrt((k_HK * k_HK).sum(-1, keepdim=True) + L2_EPS)
    x_HK = inputs.g_raw_THK[t].to(wide) + weights.dt_bias_HK.to(wide).view(heads, K)
    rate_H1 = weights.A_log_H.to(wide).view(heads, 1).exp()
    if weights.gate.lower_bound is not None:
        g_HK = weights.gate.lower_bound * torch.sigmoid(rate_H1 * x_HK)
    else:
        g_HK = -rate_H1 * F.softplus(x_HK)
    return q_HK, k_HK, v_HV, g_HK, torch.sigmoid(inputs.beta_logit_TH[t].to(wide)).view(heads, 1)


def _gated_norm(o_HV: torch.Tensor, gate_HV: torch.Tensor, weights: Weights) -> torch.Tensor:
    scale_H1 = torch.rsqrt((o_HV * o_HV).mean(-1, keepdim=True) + weights.eps)
    return o_HV * scale_H1 * weights.norm_V.to(o_HV.dtype) * torch.sigmoid(gate_HV.to(o_HV.dtype))


def _keys_at(
    tail: Tail, slot: int, entry: int, local_HK: torch.Tensor, gate: Gate
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of the entries before `entry`, decayed to that token, and the log decay from the boundary to it.

    local_HK: log decay from the start of the token's block to the token.
    """
    wide = local_HK.dtype
    keys, run_HK = [], local_HK
    for block in range(entry // BLOCK, -1, -1):
        own = block == entry // BLOCK
        rows = slice(block * BLOCK, min((block + 1) * BLOCK, entry))
        total_HK = local_HK if own else tail.g_SHRK[slot, :, rows.stop - 1]
        after_HK = torch.zeros_like(run_HK) if own else run_HK
        k_HRK = tail.k_SHRK[slot, :, rows].to(wide)
        origin_HRK = -CENTRE if gate.mode == "safe" else tail.g_SHRK[slot, :, rows]
        shift_HRK = total_HK[:, None] - origin_HRK
        keys.append(k_HRK * shift_HRK.exp() * after_HK.exp()[:, None])
        run_HK = run_HK if own else run_HK + total_HK
    return torch.cat(keys[::-1], 1), run_HK


__all__ = ["fold", "shift_window", "step", "tail_step"]
