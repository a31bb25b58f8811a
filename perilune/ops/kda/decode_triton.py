"""Launches the Triton kernels of KDA decode (decode_triton_kernels.py)."""

from __future__ import annotations

import torch

from perilune.config import Gate
from perilune.ops.kda.decode_call import Call, Projected, Tail
from perilune.ops.kda.decode_triton_fold import fold_kernel, shift_kernel
from perilune.ops.kda.decode_triton_kernels import ROWS, step_kernel, tail_kernel

# How kernels are compiled: warps of a program, columns of a matrix and ring entries in a tile. The fastest of those
# measured on one H200 (docs/kda-decode.md), the same for every batch size, so that a sequence's bits do not depend on
# its neighbours.
STEP_WARPS, STEP_COLUMNS = 4, 64
TAIL_WARPS, TAIL_COLUMNS, TAIL_ENTRIES = 2, 32, 16
FOLD_WARPS = 4


def _scratch(inputs: Projected, K: int, V: int) -> torch.Tensor:
    """fp32 rows for what the phases of a program hand on; stays in the L2 cache."""
    tokens, heads = inputs.q_THK.shape[:2]
    return torch.empty(tokens, heads, ROWS.value, max(K, V), dtype=torch.float32, device=inputs.q_THK.device)


def step(call: Call) -> torch.Tensor:
    """The in-place form; see `decode_step_inplace`, `verify`, `replay_inplace`."""
    weights, slots_N, counts_N = call.weights, call.slots_N, call.counts_N
    _, heads, K, V = call.matrix_SHKV.shape
    o_THV = call.output()
    step_kernel[(heads, len(slots_N))](
        *call.given, call.matrix_SHKV, call.window_S3C, slots_N,
        slots_N if counts_N is None else counts_N, _scratch(call.inputs, K, V), o_THV,
        *call.strides, heads, call.tokens, int(call.store), weights.eps, weights.gate.lower_bound or 0.0,
        SAFE=weights.gate.mode == "safe", COUNTED=counts_N is not None, D=max(K, V), K=K, V=V,
        BV=min(STEP_COLUMNS, V), num_warps=STEP_WARPS,
    )  # fmt: skip
    return o_THV


def tail_step(call: Call) -> torch.Tensor:
    """The tail form; see `tail_step_inplace`, `tail_verify_inplace`."""
    weights, slots_N, tail, lengths_N = call.weights, call.slots_N, call.tail, call.counts_N
    assert tail is not None
    assert lengths_N is not None
    _, heads, K, V = call.matrix_SHKV.shape
    o_THV = call.output()
    tail_kernel[(heads, len(slots_N))](
        *call.given, call.matrix_SHKV, call.window_S3C, slots_N, call.homes_N, lengths_N,
        tail.k_SHRK, tail.u_SHRV, tail.g_SHRK, _scratch(call.inputs, K, V), o_THV,
        *call.strides, heads, call.tokens, int(call.store), weights.eps, weights.gate.lower_bound or 0.0,
        SAFE=weights.gate.mode == "safe", D=max(K, V), K=K, V=V,
        BV=min(TAIL_COLUMNS, V), BR=TAIL_ENTRIES, num_warps=TAIL_WARPS,
    )  # fmt: skip
    if call.target_N is not None:
        lengths_N = lengths_N + call.tokens
        fold(call.matrix_SHKV, tail, lengths_N, slots_N, call.homes_N, call.target_N, weights.gate)
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
    _, heads, K, V = matrix_SHKV.shape
    fold_kernel[(heads, slots_N.shape[0])](
        matrix_SHKV, tail.k_SHRK, tail.u_SHRV, tail.g_SHRK, lengths_N, slots_N,
        slots_N if matrices_N is None else matrices_N, target_N, heads,
        SAFE=gate.mode == "safe", K=K, V=V, num_warps=FOLD_WARPS,
    )  # fmt: skip


def shift_window(
    inputs: Projected, window_S3C: torch.Tensor, slots_N: torch.Tensor, accepted_N: torch.Tensor, tokens: int
) -> None:
    """See `shift_window_inplace`."""
    heads, K = inputs.q_THK.shape[1:]
    shift_kernel[(heads, slots_N.shape[0])](
        inputs.q_THK, inputs.k_THK, inputs.v_THV, window_S3C, slots_N, accepted_N,
        inputs.q_THK.stride(0), inputs.k_THK.stride(0), inputs.v_THV.stride(0),
        heads, tokens, K=K, V=inputs.v_THV.shape[2], num_warps=1,
    )  # fmt: skip
