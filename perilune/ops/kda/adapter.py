"""`chunk_kda` with the call signature of flash-linear-attention 0.6.0, so that a code base switches by one import.

With all three activations inside (L2 norm, gate, sigmoid of beta) the call is `perilune.ops.kda.kda`, the GPU kernels
included. Any other choice runs `chunk` on activated inputs, which is plain torch on every device.

Legend: B batch, T tokens, N sequences, H heads of q and k, Hv heads of v (a multiple of H), K key dim, V value dim.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from perilune.config import Gate
from perilune.errors import Error
from perilune.ops.kda import Save, chunk, kda, prepare
from perilune.ops.kda.prepare import compute_dtype
from perilune.ops.sequences import Sequences

CHUNK = 64
# What a caller who says safe_gate=True promises of gates that were activated outside.
SAFE_BOUND = -5.0
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = CHUNK,
    transpose_state_layout: bool = False,
    **unknown: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """KDA on [B, T, H, K] tensors; returns o [B, T, Hv, V] in q's dtype and the final state fp32 [N, Hv, K, V] or None.

    q, k: [B, T, H, K]. v: [B, T, Hv, V]. g: [B, T, Hv, K]. beta: [B, T, Hv]. q, k and v have one dtype.
    scale: multiplies q; None is K^-0.5, with or without the L2 norm.
    initial_state: fp32 [N, Hv, K, V], None is zeros; with state_v_first (older name transpose_state_layout) it and the
        final state are [N, Hv, V, K]. fp64 where the inputs are fp64.
    use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum x^2 + 1e-6) here; otherwise they are used as they are.
    use_gate_in_kernel: g is raw and becomes lower_bound * sigmoid(e^A_log (g + dt_bias)) with a lower_bound in [-5, 0),
        -e^A_log * softplus(g + dt_bias) without; A_log has Hv elements (may be None with a lower_bound: all zero),
        dt_bias Hv * K (may be None). Otherwise g is the log decay in nats, <= 0, and A_log, dt_bias and lower_bound
        are not read; safe_gate then promises g >= -5 and runs faster; where that is not so, results may be NaN.
    use_beta_sigmoid_in_kernel: beta is a logit, and allow_neg_eigval doubles its sigmoid; otherwise used as it is.
    cu_seqlens: integers [N + 1] from 0 to T, with B = 1: the documents packed on T. None: N = B sequences of T tokens.
        cu_seqlens_cpu, the same numbers on the host, spares reading them from the device.
    disable_recompute: on the GPU kernels keeps for the backward what it would compute again; results are the same.

    Not supported, each an Error: return_intermediate_states, cp_context, use_graph, max_num_seqs, a chunk_size other
    than 64, and options that are not of this list. Level on CPU: bitwise-batch. Source: Kimi Linear (arXiv:2510.26692).
    """
    refused = {
        "return_intermediate_states": (return_intermediate_states, "see checkpoints of perilune.ops.kda.kda"),
        "cp_context": (cp_context, "see perilune.ops.kda.segment_maps and fold"),
        "use_graph": (use_graph, "must be False"),
        "max_num_seqs": (max_num_seqs, "must be None"),
    }
    for name, (value, instead) in refused.items():
        if value:
            raise Error(f"chunk_kda: {name} is not supported; {instead}")
    if unknown:
        raise Error(f"chunk_kda: {', '.join(sorted(unknown))} not supported; see the docstring for the options")
    if chunk_size != CHUNK:
        raise Error(f"chunk_kda: chunk_size is {chunk_size}; must be {CHUNK}")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise Error("chunk_kda: allow_neg_eigval is True; needs use_beta_sigmoid_in_kernel=True")
    gate = _gate(use_gate_in_kernel, safe_gate, lower_bound, A_log)
    v_first = state_v_first or transpose_state_layout
    _check(q, k, v, g, beta)
    sequences = _sequences(q, cu_seqlens, cu_seqlens_cpu)
    (B, T, H, K), (heads, V) = q.shape, v.shape[2:]
    A_log = g.new_zeros(heads, dtype=torch.float32) if A_log is None or not use_gate_in_kernel else A_log
    dt_bias = g.new_zeros(heads * K, dtype=torch.float32) if dt_bias is None or not use_gate_in_kernel else dt_bias
    _check_small(q, sequences.count, heads, V, A_log, dt_bias, initial_state, v_first)
    A_log, dt_bias = A_log.reshape(heads), dt_bias.reshape(heads, K)
    state = initial_state.transpose(-1, -2).contiguous() if initial_state is not None and v_first else initial_state

    if heads != H:
        q, k = (x.repeat_interleave(heads // H, dim=2) for x in (q, k))
    q_THK, k_THK, v_THV, g_THK, beta_TH = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    ratio = 1.0 if scale is None or scale == K**-0.5 else scale * K**0.5
    if use_qk_l2norm_in_kernel and use_gate_in_kernel and use_beta_sigmoid_in_kernel and not allow_neg_eigval:
        save: Save = "all" if disable_recompute else "inputs"
        raw = (q_THK, k_THK, v_THV, g_THK, beta_TH, A_log, dt_bias, gate, state, sequences)
        o_THV, final_NHKV = kda(*raw, save=save)
        # o is linear in q.
        o_THV = o_THV if ratio == 1.0 else o_THV * ratio
    else:
        dtype = compute_dtype(q_THK, k_THK, v_THV, g_THK)
        # What was activated outside is taken as given; the unused results of `prepare` are dropped.
        x = prepare(q_THK, k_THK, g_THK, beta_TH, A_log, dt_bias, gate)
        q_THK = x.q_THK.to(dtype) * ratio if use_qk_l2norm_in_kernel else q_THK.to(dtype) * (ratio * K**-0.5)
        k_THK = (x.k_THK if use_qk_l2norm_in_kernel else k_THK).to(dtype)
        g_THK = (x.g_THK if use_gate_in_kernel else g_THK).to(dtype)
        beta_TH = (x.beta_TH if use_beta_sigmoid_in_kernel else beta_TH).to(dtype) * (2.0 if allow_neg_eigval else 1.0)
        bound = gate.lower_bound if use_gate_in_kernel else SAFE_BOUND if safe_gate else None
        state = None if state is None else state.to(dtype)
        o_THV, final_NHKV, _ = chunk(q_THK, k_THK, v_THV.to(dtype), g_THK, beta_TH, state, sequences, bound)
    o = o_THV.to(q.dtype).view(B, T, heads, V)
    if not output_final_state:
        return o, None
    return o, final_NHKV.transpose(-1, -2).contiguous() if v_first else final_NHKV


def _gate(inside: bool, safe_gate: bool, lower_bound: float | None, A_log: torch.Tensor | None) -> Gate:
    """The gate of the call; one that stays unused where the gate was activated outside."""
    if not inside:
        return Gate("softplus")
    if lower_bound is None:
        if safe_gate:
            raise Error("chunk_kda: safe_gate is True and lower_bound is None; must be a number in [-5, 0)")
        if A_log is None:
            raise Error("chunk_kda: A_log is None; use_gate_in_kernel=True needs A_log or a lower_bound")
        return Gate("softplus")
    if not -5.0 <= lower_bound < 0.0:
        raise Error(f"chunk_kda: lower_bound is {lower_bound}; must be in [-5, 0)")
    return Gate("safe", lower_bound)


def _sequences(q: torch.Tensor, cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None) -> Sequences:
    """The cut of the flattened [B * T] tokens."""
    B, T = q.shape[:2]
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise Error("chunk_kda: cu_seqlens_cpu is given without cu_seqlens")
        return Sequences.from_lengths([T] * B, device=q.device)
    if B != 1:
        raise Error(f"chunk_kda: q has batch {B}; must be 1 with cu_seqlens")
    for name, cu in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if cu is not None and (cu.ndim != 1 or cu.dtype not in (torch.int32, torch.int64)):
            raise Error(f"chunk_kda: {name} is {cu.dtype} of shape {tuple(cu.shape)}; must be int32 or int64 [N + 1]")
    if cu_seqlens_cpu is not None and cu_seqlens_cpu.shape != cu_seqlens.shape:
        raise Error(f"chunk_kda: cu_seqlens_cpu has {len(cu_seqlens_cpu)} entries and cu_seqlens {len(cu_seqlens)}")
    ends: list[int] = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    lengths = [b - a for a, b in pairwise(ends)]
    if not ends or ends[0] != 0 or ends[-1] != T or min(lengths, default=0) < 0:
        raise Error(f"chunk_kda: cu_seqlens is {ends}; must rise from 0 to the {T} tokens of q")
    return Sequences.from_lengths(lengths, device=q.device)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> None:
    """Raise Error unless the five inputs fit together."""
    if q.ndim != 4 or v.ndim != 4:
        raise Error(f"chunk_kda: q has shape {tuple(q.shape)}, v {tuple(v.shape)}; must be [B, T, H, K], [B, T, Hv, V]")
    (B, T, H, K), (heads, V) = q.shape, v.shape[2:]
    if min(H, K, V, heads) < 1 or max(K, V) > 256:
        raise Error(f"chunk_kda: H = {H}, Hv = {heads}, K = {K}, V = {V}; heads at least 1, K and V from 1 to 256")
    if heads % H:
        raise Error(f"chunk_kda: v has {heads} heads; must be a multiple of the {H} of q")
    shapes: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {
        "k": (k, (B, T, H, K)),
        "v": (v, (B, T, heads, V)),
        "g": (g, (B, T, heads, K)),
        "beta": (beta, (B, T, heads)),
    }
    for name, (x, shape) in shapes.items():
        if tuple(x.shape) != shape:
            raise Error(f"chunk_kda: {name} has shape {tuple(x.shape)}; must be {shape}")
        _check_place(name, x, q)
    if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        raise Error(
            f"chunk_kda: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; must be one of bf16, fp16, fp32, fp64, the same"
        )


def _check_small(
    q: torch.Tensor,
    count: int,
    heads: int,
    V: int,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor | None,
    v_first: bool,
) -> None:
    """Raise Error unless the gate's parameters and the initial state fit."""
    K = q.shape[3]
    for name, x, elements in (("A_log", A_log, heads), ("dt_bias", dt_bias, heads * K)):
        if x.numel() != elements:
            raise Error(f"chunk_kda: {name} has {x.numel()} elements; must be {elements}")
        _check_place(name, x, q)
    if state is None:
        return
    dims: tuple[int, int] = (V, K) if v_first else (K, V)
    if tuple(state.shape) != (count, heads, *dims):
        raise Error(f"chunk_kda: initial_state has shape {tuple(state.shape)}; must be {(count, heads, *dims)}")
    _check_place("initial_state", state, q)
    if state.dtype not in (torch.float32, torch.float64):
        raise Error(f"chunk_kda: initial_state is {state.dtype}; must be float32 (float64 with float64 inputs)")


def _check_place(name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    """Raise Error unless x is where q is and a float."""
    if x.device != q.device:
        raise Error(f"chunk_kda: {name} is on {x.device}; must be on {q.device} as q is")
    if x.dtype not in _DTYPES:
        raise Error(f"chunk_kda: {name} is {x.dtype}; allowed: bfloat16, float16, float32, float64")


__all__ = ["chunk_kda"]
