"""KDA decode: one token a sequence, or a few draft tokens, against paged state slots.

One call does what a KDA layer does between its input and its output projections: short convolution (width 4) and
SiLU, L2 norm of q and k, gate, the delta-rule recurrence, and the gated RMSNorm. Two forms of the state:

in-place: the matrix is read and written at every token.
tail: the matrix stays as it was at the last multiple of 64 tokens (the boundary). A token reads it and the entries
    of the tokens since, and appends one entry; `fold_inplace` makes the next matrix at every 64th token. Forgetting
    the last tokens is forgetting entries.

A tail entry of token j, in block b = j // 16 of the tail, with G_j the sum of log decays from the start of its block
to j inclusive:

bounded gate: k_j exp(-G_j - 40), u_j, G_j. Sixteen bounded gates (>= -5 nats) keep G_j in [-80, 0], so the key's
    exponent stays within +-40 nats whichever end of the block it is taken to.
softplus gate: k_j, u_j, G_j; decays are then taken pair by pair, as nothing bounds G.

Every function here runs on any device. CUDA float32 and bfloat16 tensors go to decode.cu on Hopper with K = V = 128
(decode_cuda.py), to decode_triton.py otherwise; `kernel_for` names the choice. CUDA-graph safe after a first call:
no host synchronisation, slot numbers and counts are read on the device.

Legend: T tokens (N * drafts), N sequences, S slots, H heads, K key dim, V value dim, R tail entries, C convolution
channels H * (K + K + V) in the order q, k, v, W convolution width 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from perilune.config import Gate
from perilune.errors import Error

GRID = 64  # tokens between two matrices
BLOCK = 16  # tokens whose keys share one decay origin
MAX_DRAFTS = 8
CAPACITY = GRID - 1 + MAX_DRAFTS
CENTRE = 40.0  # nats; the middle of a block's decay range
L2_EPS = 1e-6
WIDTH = 4


@dataclass(frozen=True)
class Projected:
    """What the input projections give, token by token.

    q_THK, k_THK, v_THV: before the convolution. g_raw_THK: the gate before its activation. beta_logit_TH.
    out_gate_THV: the output gate before its sigmoid. Each may have any stride over T and must be dense within a
    token. With `drafts` tokens a sequence, token i of sequence n is row n * drafts + i.
    """

    q_THK: torch.Tensor
    k_THK: torch.Tensor
    v_THV: torch.Tensor
    g_raw_THK: torch.Tensor
    beta_logit_TH: torch.Tensor
    out_gate_THV: torch.Tensor


@dataclass(frozen=True)
class Weights:
    """A layer's parameters: convolutions [H * K, 4] (column 3 meets the current token), A_log_H, dt_bias_HK (or flat),
    the output norm norm_V with its epsilon, and the gate."""

    conv_q_CW: torch.Tensor
    conv_k_CW: torch.Tensor
    conv_v_CW: torch.Tensor
    A_log_H: torch.Tensor
    dt_bias_HK: torch.Tensor
    norm_V: torch.Tensor
    eps: float
    gate: Gate


@dataclass(frozen=True)
class Tail:
    """The entries of the tokens since the boundary: k_SHRK, u_SHRV in the ring's dtype, g_SHRK in fp32 (or fp64)."""

    k_SHRK: torch.Tensor
    u_SHRV: torch.Tensor
    g_SHRK: torch.Tensor

    @classmethod
    def empty(
        cls,
        slots: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tail:
        """Room for 71 tokens in each of `slots` slots. What a slot holds beyond its count is never read."""
        wide = torch.promote_types(dtype, torch.float32)
        return cls(
            torch.zeros(slots, heads, CAPACITY, key_dim, dtype=dtype, device=device),
            torch.zeros(slots, heads, CAPACITY, value_dim, dtype=dtype, device=device),
            torch.zeros(slots, heads, CAPACITY, key_dim, dtype=wide, device=device),
        )


def decode_step_inplace(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    slots_N: torch.Tensor,
) -> torch.Tensor:
    """One token of each sequence; advances the matrix and the convolution window of its slot.

    matrix_SHKV: fp32 [slots, H, K, V]. window_S3C: [slots, 3, H * (2K + V)], the last three pre-convolution inputs,
        oldest first. slots_N: int32 [N], all different; -1 is padding: no slot is read or written, its output is 0.
    Returns o_THV in the dtype of v. Inside, everything is fp32 (fp64 for fp64 inputs on the reference path).
    Raises Error for shapes, dtypes and devices that do not fit.
    """
    return _in_place(inputs, weights, matrix_SHKV, window_S3C, slots_N, 1, None, store=True)


def verify(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    slots_N: torch.Tensor,
    drafts: int,
) -> torch.Tensor:
    """Outputs of `drafts` (1..8) tokens a sequence in the in-place form; writes no state. o_THV.

    Bit for bit the outputs of `drafts` decode steps.
    """
    return _in_place(inputs, weights, matrix_SHKV, window_S3C, slots_N, drafts, None, store=False)


def replay_inplace(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    slots_N: torch.Tensor,
    accepted_N: torch.Tensor,
    drafts: int,
) -> torch.Tensor:
    """Advance each slot by the first accepted_N[n] (int32, 0..drafts) of the inputs given to `verify`.

    Bit for bit the state of accepted_N[n] decode steps. Returns o_THV; rows of tokens not accepted are 0.
    """
    return _in_place(inputs, weights, matrix_SHKV, window_S3C, slots_N, drafts, accepted_N, store=True)


def tail_step_inplace(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    tail: Tail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    target_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of each sequence in the tail form: reads the matrix, appends entry lengths_N[n], shifts the window.

    lengths_N: int32 [N], entries in each tail before this token, 0..63; the caller adds 1 to it.
    target_N: int32 [N]; when given, a tail that this token fills (64 entries) is folded into the matrix of slot
        target_N[n] in the same call, as by `fold_inplace`, and the caller sets that length to 0. When None, the caller
        calls `fold_inplace`.
    Returns o_THV as `decode_step_inplace` does.
    """
    return _tail(inputs, weights, matrix_SHKV, window_S3C, tail, lengths_N, slots_N, 1, shift=True, target_N=target_N)


def tail_verify_inplace(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    tail: Tail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    drafts: int,
) -> torch.Tensor:
    """`drafts` (1..8) tokens a sequence as tail entries lengths_N[n] .. + drafts - 1; matrix and window stay.

    Accepting a tokens is adding a to lengths_N[n] and one `shift_window_inplace`; entries beyond are dead. Outputs and
    entries equal those of `drafts` calls of `tail_step_inplace` bit for bit. Returns o_THV.
    """
    return _tail(inputs, weights, matrix_SHKV, window_S3C, tail, lengths_N, slots_N, drafts, shift=False)


def shift_window_inplace(
    inputs: Projected, window_S3C: torch.Tensor, slots_N: torch.Tensor, accepted_N: torch.Tensor, drafts: int
) -> None:
    """Move each slot's convolution window past the first accepted_N[n] tokens of `inputs`."""
    _check_slots(slots_N, inputs.q_THK.shape[0], drafts)
    if _on_gpu(inputs):
        from perilune.ops.kda import decode_triton

        decode_triton.shift_window(inputs, window_S3C, slots_N, accepted_N, drafts)
        return
    for n, slot in enumerate(slots_N.tolist()):
        if slot >= 0:
            rows = slice(n * drafts, n * drafts + int(accepted_N[n]))
            window_S3C[slot] = _channels(inputs, rows, window_S3C[slot])[-(WIDTH - 1) :]


def fold_inplace(
    matrix_SHKV: torch.Tensor,
    tail: Tail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    gate: Gate,
    target_N: torch.Tensor | None = None,
) -> None:
    """Where lengths_N[n] >= 64: the first 64 entries go into the matrix, the others move to the start of the tail.

    The caller subtracts 64 from those lengths. target_N: int32 [N], slots that get the new matrices (default: the
    same slots), so that a shared matrix is never changed; the tail always stays in slots_N[n].
    """
    target_N = slots_N if target_N is None else target_N
    if matrix_SHKV.is_cuda and matrix_SHKV.dtype == torch.float32:
        from perilune.ops.kda import decode_triton

        decode_triton.fold(matrix_SHKV, tail, lengths_N, slots_N, target_N, gate)
        return
    for slot, target, length in zip(slots_N.tolist(), target_N.tolist(), lengths_N.tolist(), strict=True):
        if slot < 0 or length < GRID:
            continue
        wide = matrix_SHKV.dtype
        key_HRK, decay_HK = _keys_at_end(tail, slot, GRID, gate, wide)
        written_HKV = key_HRK.transpose(1, 2) @ tail.u_SHRV[slot, :, :GRID].to(wide)
        matrix_SHKV[target] = decay_HK.exp()[:, :, None] * matrix_SHKV[slot] + written_HKV
        for ring in (tail.k_SHRK, tail.u_SHRV, tail.g_SHRK):
            ring[slot, :, : length - GRID] = ring[slot, :, GRID:length].clone()


# -- checks and dispatch ----------------------------------------------------------------------------------------------


def kernel_for(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    tail: Tail | None = None,
) -> str:
    """What runs a step on these tensors: "cuda (decode.cu)", "triton (why not decode.cu)" or "torch (reference)"."""
    if not _on_gpu(inputs):
        return "torch (reference)"
    from perilune.ops.kda import decode_cuda

    reason = decode_cuda.why_not(inputs, weights, matrix_SHKV, window_S3C, tail)
    return "cuda (decode.cu)" if reason is None else f"triton ({reason})"


def _on_gpu(inputs: Projected) -> bool:
    return inputs.q_THK.is_cuda and inputs.q_THK.dtype != torch.float64


def _check_slots(slots_N: torch.Tensor, tokens: int, drafts: int) -> None:
    if not 1 <= drafts <= MAX_DRAFTS:
        raise Error(f"drafts is {drafts}; allowed: 1..{MAX_DRAFTS}")
    if slots_N.dtype != torch.int32 or slots_N.dim() != 1:
        raise Error(f"slots_N is {slots_N.dtype} of {slots_N.dim()} dims; must be int32 [N]")
    if tokens != slots_N.shape[0] * drafts:
        raise Error(f"inputs have {tokens} tokens; {len(slots_N)} sequences of {drafts} need {len(slots_N) * drafts}")


def _check(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    slots_N: torch.Tensor,
    drafts: int,
    counts_N: torch.Tensor | None,
) -> None:
    """Raise Error unless every shape, dtype, device and inner stride fits."""
    tokens = inputs.q_THK.shape[0]
    _check_slots(slots_N, tokens, drafts)
    slots, heads, K, V = matrix_SHKV.shape
    shapes = {
        "inputs.q_THK": (inputs.q_THK, (tokens, heads, K)),
        "inputs.k_THK": (inputs.k_THK, (tokens, heads, K)),
        "inputs.v_THV": (inputs.v_THV, (tokens, heads, V)),
        "inputs.g_raw_THK": (inputs.g_raw_THK, (tokens, heads, K)),
        "inputs.beta_logit_TH": (inputs.beta_logit_TH, (tokens, heads)),
        "inputs.out_gate_THV": (inputs.out_gate_THV, (tokens, heads, V)),
        "weights.conv_q_CW": (weights.conv_q_CW, (heads * K, WIDTH)),
        "weights.conv_k_CW": (weights.conv_k_CW, (heads * K, WIDTH)),
        "weights.conv_v_CW": (weights.conv_v_CW, (heads * V, WIDTH)),
        "weights.norm_V": (weights.norm_V, (V,)),
        "window_S3C": (window_S3C, (slots, WIDTH - 1, heads * (2 * K + V))),
    }
    for name, (tensor, shape) in shapes.items():
        if tuple(tensor.shape) != shape:
            raise Error(f"{name} is {tuple(tensor.shape)}; must be {shape}")
        if tensor.device != inputs.q_THK.device:
            raise Error(f"{name} is on {tensor.device}; inputs.q_THK is on {inputs.q_THK.device}")
        if not (tensor[0] if tensor.dim() > 1 and tensor.shape[0] else tensor).is_contiguous():
            raise Error(f"{name} has strides {tensor.stride()}; must be dense within its first dimension")
    if weights.A_log_H.numel() != heads or weights.dt_bias_HK.numel() != heads * K:
        raise Error(
            f"weights.A_log_H has {weights.A_log_H.numel()} and dt_bias_HK {weights.dt_bias_HK.numel()} elements; "
            f"must be {heads} and {heads * K}"
        )
    if not matrix_SHKV.is_contiguous() or not window_S3C.is_contiguous():
        raise Error("matrix_SHKV and window_S3C must be contiguous: they are slot pools")
    for name, index_N in (("slots_N", slots_N), ("counts_N", counts_N)):
        if index_N is not None and (index_N.device != inputs.q_THK.device or index_N.dtype != torch.int32):
            raise Error(f"{name} is {index_N.dtype} on {index_N.device}; must be int32 on {inputs.q_THK.device}")
    if _on_gpu(inputs):
        if matrix_SHKV.dtype != torch.float32:
            raise Error(f"matrix_SHKV is {matrix_SHKV.dtype}; the kernel keeps float32")
        if K not in (16, 32, 64, 128) or V not in (16, 32, 64, 128):
            raise Error(f"key and value dims are {K} and {V}; the kernel does 16, 32, 64, 128")


def _in_place(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    slots_N: torch.Tensor,
    drafts: int,
    counts_N: torch.Tensor | None,
    store: bool,
) -> torch.Tensor:
    _check(inputs, weights, matrix_SHKV, window_S3C, slots_N, drafts, counts_N)
    if _on_gpu(inputs):
        from perilune.ops.kda import decode_cuda, decode_triton

        hopper = decode_cuda.why_not(inputs, weights, matrix_SHKV, window_S3C) is None
        kernel = decode_cuda.step if hopper else decode_triton.step
        return kernel(inputs, weights, matrix_SHKV, window_S3C, slots_N, drafts, counts_N, store)
    o_THV = torch.zeros_like(inputs.v_THV, memory_format=torch.contiguous_format)
    for n, slot in enumerate(slots_N.tolist()):
        if slot < 0:
            continue
        count = drafts if counts_N is None else int(counts_N[n])
        S_HKV = matrix_SHKV[slot]
        for i in range(count):
            t = n * drafts + i
            q_HK, k_HK, v_HV, g_HK, beta_H1 = _activate(inputs, weights, window_S3C[slot], n * drafts, t, S_HKV.dtype)
            S_HKV = g_HK.exp()[:, :, None] * S_HKV
            u_HV = beta_H1 * (v_HV - torch.einsum("hkv,hk->hv", S_HKV, k_HK))
            S_HKV = S_HKV + k_HK[:, :, None] * u_HV[:, None, :]
            o_HV = torch.einsum("hkv,hk->hv", S_HKV, q_HK)
            o_THV[t] = _gated_norm(o_HV, inputs.out_gate_THV[t], weights).to(o_THV.dtype)
        if store:
            matrix_SHKV[slot] = S_HKV
            window_S3C[slot] = _channels(inputs, slice(n * drafts, n * drafts + count), window_S3C[slot])[-3:]
    return o_THV


def _tail(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    tail: Tail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    drafts: int,
    shift: bool,
    target_N: torch.Tensor | None = None,
) -> torch.Tensor:
    _check(inputs, weights, matrix_SHKV, window_S3C, slots_N, drafts, lengths_N)
    slots, heads, K, V = matrix_SHKV.shape
    for name, ring, dim in (("k_SHRK", tail.k_SHRK, K), ("u_SHRV", tail.u_SHRV, V), ("g_SHRK", tail.g_SHRK, K)):
        if tuple(ring.shape) != (slots, heads, CAPACITY, dim) or not ring.is_contiguous():
            raise Error(f"tail.{name} is {tuple(ring.shape)}; must be contiguous {(slots, heads, CAPACITY, dim)}")
    if _on_gpu(inputs):
        from perilune.ops.kda import decode_cuda, decode_triton

        hopper = decode_cuda.why_not(inputs, weights, matrix_SHKV, window_S3C, tail) is None
        kernel = decode_cuda.tail_step if hopper else decode_triton.tail_step
        return kernel(inputs, weights, matrix_SHKV, window_S3C, tail, lengths_N, slots_N, drafts, shift, target_N)
    o_THV = torch.zeros_like(inputs.v_THV, memory_format=torch.contiguous_format)
    wide = matrix_SHKV.dtype
    for n, slot in enumerate(slots_N.tolist()):
        if slot < 0:
            continue
        for i in range(drafts):
            t, entry = n * drafts + i, int(lengths_N[n]) + i
            q_HK, k_HK, v_HV, g_HK, beta_H1 = _activate(inputs, weights, window_S3C[slot], n * drafts, t, wide)
            local_HK = g_HK if entry % BLOCK == 0 else tail.g_SHRK[slot, :, entry - 1] + g_HK
            key_HRK, decay_HK = _keys_at(tail, slot, entry, local_HK, weights.gate)
            written_HRV = tail.u_SHRV[slot, :, :entry].to(wide)

            def read(x_HK: torch.Tensor) -> torch.Tensor:
                """S^T x, from the boundary matrix and the entries."""
                old_HV = torch.einsum("hkv,hk->hv", matrix_SHKV[slot], decay_HK.exp() * x_HK)  # noqa: B023
                return old_HV + torch.einsum("hrk,hk,hrv->hv", key_HRK, x_HK, written_HRV)  # noqa: B023

            u_HV = beta_H1 * (v_HV - read(k_HK))
            o_HV = read(q_HK) + (q_HK * k_HK).sum(-1, keepdim=True) * u_HV
            o_THV[t] = _gated_norm(o_HV, inputs.out_gate_THV[t], weights).to(o_THV.dtype)
            stored_HK = k_HK * (-CENTRE - local_HK).exp() if weights.gate.mode == "safe" else k_HK
            tail.k_SHRK[slot, :, entry] = stored_HK.to(tail.k_SHRK.dtype)
            tail.u_SHRV[slot, :, entry] = u_HV.to(tail.u_SHRV.dtype)
            tail.g_SHRK[slot, :, entry] = local_HK
        if shift:
            window_S3C[slot] = _channels(inputs, slice(n * drafts, (n + 1) * drafts), window_S3C[slot])[-3:]
    if target_N is not None:
        fold_inplace(matrix_SHKV, tail, lengths_N + drafts, slots_N, weights.gate, target_N)
    return o_THV


# -- the reference's parts --------------------------------------------------------------------------------------------


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


def _keys_at_end(
    tail: Tail, slot: int, entries: int, gate: Gate, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_keys_at` for the end of the last of `entries` (a multiple of 16) entries."""
    return _keys_at(tail, slot, entries, torch.zeros_like(tail.g_SHRK[slot, :, 0], dtype=wide), gate)


__all__ = [
    "CAPACITY",
    "GRID",
    "MAX_DRAFTS",
    "Projected",
    "Tail",
    "Weights",
    "decode_step_inplace",
    "fold_inplace",
    "kernel_for",
    "replay_inplace",
    "shift_window_inplace",
    "tail_step_inplace",
    "tail_verify_inplace",
    "verify",
]
