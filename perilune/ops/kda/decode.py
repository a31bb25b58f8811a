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

Every function here runs on any device. CUDA float32 and bfloat16 tensors go to the CUDA C++ kernels on Hopper with
K = V = 128 (decode_cuda.py), to decode_triton.py otherwise; `kernel_for` names the choice. CUDA-graph safe after a
first call: no host synchronisation, slot numbers and counts are read on the device.

A sequence's window and tail lie in slot slots_N[n]; so does its matrix, unless matrices_N names another slot (of a
pool that may have another size): then several sequences may share one boundary matrix.

Legend as in decode_call.py.
"""

from __future__ import annotations

from types import ModuleType

import torch

from perilune.config import Gate
from perilune.ops.kda import decode_reference
from perilune.ops.kda.decode_call import (
    CAPACITY,
    GRID,
    MAX_DRAFTS,
    Call,
    Projected,
    Tail,
    Weights,
    check_fold,
    check_shift,
)
from perilune.ops.kda.decode_fill import tail_fill_inplace, tail_state


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
    return run(Call(inputs, weights, matrix_SHKV, window_S3C, slots_N))


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
    return run(Call(inputs, weights, matrix_SHKV, window_S3C, slots_N, drafts, store=False))


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
    return run(Call(inputs, weights, matrix_SHKV, window_S3C, slots_N, drafts, counts_N=accepted_N))


def tail_step_inplace(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    tail: Tail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    target_N: torch.Tensor | None = None,
    matrices_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of each sequence in the tail form: reads the matrix, appends entry lengths_N[n], shifts the window.

    lengths_N: int32 [N], entries in each tail before this token, 0..63; the caller adds 1 to it.
    target_N: int32 [N]; when given, a tail that this token fills (64 entries) is folded into the matrix of slot
        target_N[n] in the same call, as by `fold_inplace`, and the caller sets that length to 0. When None, the caller
        calls `fold_inplace`.
    Returns o_THV as `decode_step_inplace` does.
    """
    pool = (inputs, weights, matrix_SHKV, window_S3C, slots_N)
    return run(Call(*pool, counts_N=lengths_N, tail=tail, matrices_N=matrices_N, target_N=target_N))


def tail_verify_inplace(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    tail: Tail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    drafts: int,
    matrices_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """`drafts` (1..8) tokens a sequence as tail entries lengths_N[n] .. + drafts - 1; matrix and window stay.

    Accepting a tokens is adding a to lengths_N[n] and one `shift_window_inplace`; entries beyond are dead. Outputs and
    entries equal those of `drafts` calls of `tail_step_inplace` bit for bit. Returns o_THV.
    """
    pool = (inputs, weights, matrix_SHKV, window_S3C, slots_N)
    return run(Call(*pool, drafts, store=False, counts_N=lengths_N, tail=tail, matrices_N=matrices_N))


def shift_window_inplace(
    inputs: Projected, window_S3C: torch.Tensor, slots_N: torch.Tensor, accepted_N: torch.Tensor, drafts: int
) -> None:
    """Move each slot's convolution window past the first accepted_N[n] (int32, 0..drafts) tokens of `inputs`.

    Raises Error for shapes, dtypes and devices that do not fit.
    """
    check_shift(inputs, window_S3C, slots_N, accepted_N, drafts)
    on_gpu = inputs.q_THK.is_cuda and inputs.q_THK.dtype != torch.float64
    (_triton() if on_gpu else decode_reference).shift_window(inputs, window_S3C, slots_N, accepted_N, drafts)


def fold_inplace(
    matrix_SHKV: torch.Tensor,
    tail: Tail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    gate: Gate,
    target_N: torch.Tensor | None = None,
    matrices_N: torch.Tensor | None = None,
) -> None:
    """Where lengths_N[n] >= 64: the first 64 entries go into the matrix, the others move to the start of the tail.

    The caller subtracts 64 from those lengths. target_N: int32 [N], slots that get the new matrices (default: where
    the old ones lie), so that a shared matrix is never changed: the caller then makes target_N[n] the matrix of n. A
    target must not be another sequence's matrix in the same call. The tail always stays in slots_N[n].
    Raises Error for shapes, dtypes and devices that do not fit.
    """
    if target_N is None:
        target_N = slots_N if matrices_N is None else matrices_N
    check_fold(matrix_SHKV, tail, {"lengths_N": lengths_N, "matrices_N": matrices_N, "target_N": target_N}, slots_N)
    on_gpu = matrix_SHKV.is_cuda and matrix_SHKV.dtype == torch.float32
    (_triton() if on_gpu else decode_reference).fold(matrix_SHKV, tail, lengths_N, slots_N, matrices_N, target_N, gate)


def kernel_for(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    tail: Tail | None = None,
) -> str:
    """What runs a step on these tensors: "cuda", "triton (why not cuda)" or "torch (reference)"."""
    call = Call(inputs, weights, matrix_SHKV, window_S3C, torch.empty(0, dtype=torch.int32), tail=tail)
    if not call.on_gpu:
        return "torch (reference)"
    from perilune.ops.kda import decode_cuda

    reason = decode_cuda.why_not(call)
    return "cuda" if reason is None else f"triton ({reason})"


def kernel_here(device: torch.device | str, dtype: torch.dtype) -> str:
    """`kernel_for` a layer with heads of 128 on a device, bounded gate: what an installation runs."""
    x, heads = torch.zeros(1, 1, 128, dtype=dtype, device=device), torch.zeros(1, device=device)
    taps, row = heads.expand(128, 4).contiguous(), heads.expand(128).contiguous()
    inputs = Projected(x, x, x, x, x[..., 0], x)
    weights = Weights(taps, taps, taps, heads, row, row, 1e-5, Gate("safe", -5.0))
    pools = (x.new_zeros(1, 1, 128, 128, dtype=torch.float32), x.new_zeros(1, 3, 3 * 128))
    return kernel_for(inputs, weights, *pools, Tail.empty(1, 1, 128, 128, device=device))


def run(call: Call) -> torch.Tensor:
    """Check, then the kernel for these tensors."""
    call.check()
    room: ModuleType = decode_reference
    if call.on_gpu:
        from perilune.ops.kda import decode_cuda

        room = _triton() if decode_cuda.why_not(call) else decode_cuda
    o_THV: torch.Tensor = room.step(call) if call.tail is None else room.tail_step(call)
    return o_THV


def _triton() -> ModuleType:
    """Imported late: Triton is an optional dependency."""
    from perilune.ops.kda import decode_triton

    return decode_triton


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
    "kernel_here",
    "replay_inplace",
    "shift_window_inplace",
    "tail_fill_inplace",
    "tail_state",
    "tail_step_inplace",
    "tail_verify_inplace",
    "verify",
]
