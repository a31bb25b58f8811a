"""KDA in plain torch: the specification that the kernels are tested against, and the CPU path.

Legend: T tokens, N sequences, H heads, K key dim, V value dim, S state. Source: Kimi Linear (arXiv:2510.26692).
"""

from __future__ import annotations

import torch

from perilune.config import Gate
from perilune.ops.kda.chunk import chunk
from perilune.ops.kda.prepare import Activated, Raw, compute_dtype, prepare
from perilune.ops.kda.segments import chunk_segmented, segment_maps
from perilune.ops.sequences import Sequences


def kda(
    raw: Raw,
    gate: Gate,
    initial_NHKV: torch.Tensor | None,
    sequences: Sequences,
    checkpoints: tuple[tuple[int, ...], ...] | None = None,
    scan: str = "serial",
) -> tuple[torch.Tensor, ...]:
    """`perilune.ops.kda.kda` in plain torch, computed in fp32 (fp64 for fp64 inputs)."""
    q, k, g, beta = _activated(raw, gate)
    v = raw.v_THV.to(q.dtype)
    initial = None if initial_NHKV is None else initial_NHKV.to(q.dtype)
    run = chunk_segmented if scan == "segmented" else chunk
    o_THV, final_NHKV, states = run(q, k, v, g, beta, initial, sequences, gate.lower_bound, checkpoints)
    o_THV = o_THV.to(raw.v_THV.dtype)
    return (o_THV, final_NHKV) if states is None else (o_THV, final_NHKV, states)


def kda_maps(raw: Raw, gate: Gate, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    """`perilune.ops.kda.kda_maps` in plain torch."""
    _, k, g, beta = _activated(raw, gate)
    return segment_maps(k, raw.v_THV.to(k.dtype), g, beta, sequences, gate.lower_bound)


def _activated(raw: Raw, gate: Gate) -> Activated:
    q, k, _, g_raw, beta_logit, A_log, dt_bias = raw
    return prepare(q, k, g_raw, beta_logit, A_log, dt_bias, gate)


def recurrence(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    initial_NHKV: torch.Tensor | None,
    sequences: Sequences,
) -> tuple[torch.Tensor, torch.Tensor]:
    """KDA one token at a time, in float64, on activated inputs (see `prepare`): the oracle.

    S <- diag(e^g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q. The decay comes before the read and the
    write; o reads the state after the write. Returns o_THV and final_NHKV in float64; differentiable by autograd.
    """
    q_THK, k_THK, v_THV, g_THK, beta_TH = (x.double() for x in (q_THK, k_THK, v_THV, g_THK, beta_TH))
    H, K, V = q_THK.shape[1], q_THK.shape[2], v_THV.shape[2]
    outputs: list[torch.Tensor] = []
    finals: list[torch.Tensor] = []
    for n in range(sequences.count):
        S_HKV = q_THK.new_zeros(H, K, V) if initial_NHKV is None else initial_NHKV[n].double()
        for t in range(sequences.offsets[n], sequences.offsets[n + 1]):
            S_HKV = S_HKV * g_THK[t].exp().unsqueeze(-1)
            u_HV = beta_TH[t].unsqueeze(-1) * (v_THV[t] - torch.einsum("hkv,hk->hv", S_HKV, k_THK[t]))
            S_HKV = S_HKV + k_THK[t].unsqueeze(-1) * u_HV.unsqueeze(-2)
            outputs.append(torch.einsum("hkv,hk->hv", S_HKV, q_THK[t]))
        finals.append(S_HKV)
    o_THV = torch.stack(outputs) if outputs else v_THV.new_zeros(0, H, V)
    return o_THV, torch.stack(finals) if finals else q_THK.new_zeros(0, H, K, V)


__all__ = ["Activated", "chunk", "chunk_segmented", "compute_dtype", "kda", "kda_maps", "prepare", "recurrence"]
