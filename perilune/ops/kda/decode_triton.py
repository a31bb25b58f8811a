"""Launches the Triton kernels of KDA decode (decode_triton_kernels.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perilune.config import Gate
from perilune.ops.kda.decode_call import Call, Projected, Tail, Weights
from perilune.ops.kda.decode_triton_fold import fold_kernel, shift_kernel
from perilune.ops.kda.decode_triton_kernels import ROWS, step_kernel, tail_kernel


@dataclass(frozen=True)
class Launch:
    """How a kernel is compiled: warps of a program, columns of the matrix in a tile, registers a thread at most,
    whether the next tile is loaded ahead, and (tail) ring entries in a tile."""

    warps: int
    columns: int
    registers: int | None = None
    ahead: bool = False
    ring_rows: int = 8


# The fastest of those measured on one H200 (docs/kda-decode.md). One configuration for every batch size, so that a
# sequence's bits do not depend on its neighbours.
STEP = Launch(4, 64)
TAIL = Launch(2, 32, ring_rows=16)
FOLD_WARPS = 4


def _arguments(inputs: Projected, weights: Weights) -> list[torch.Tensor]:
    return [
        inputs.q_THK,
        inputs.k_THK,
        inputs.v_THV,
        inputs.g_raw_THK,
        inputs.beta_logit_TH,
        inputs.out_gate_THV,
        weights.conv_q_CW,
        weights.conv_k_CW,
        weights.conv_v_CW,
        weights.A_log_H,
        weights.dt_bias_HK,
        weights.norm_V,
    ]


def _strides(inputs: Projected) -> list[int]:
    return [x.stride(0) for x in vars(inputs).values()]


def _scratch(inputs: Projected, K: int, V: int) -> torch.Tensor:
    """fp32 rows for what the phases of a program hand on; stays in the L2 cache."""
    tokens, heads = inputs.q_THK.shape[:2]
    return torch.empty(tokens, heads, ROWS.value, max(K, V), dtype=torch.float32, device=inputs.q_THK.device)


def step(call: Call, launch: Launch = STEP) -> torch.Tensor:
    """The in-place form; see `decode_step_inplace`, `verify`, `replay_inplace`."""
    weights, slots_N, counts_N = call.weights, call.slots_N, call.counts_N
    _, heads, K, V = call.matrix_SHKV.shape
    o_THV = call.output()
    step_kernel[(heads, len(slots_N))](
        *_arguments(call.inputs, weights), call.matrix_SHKV, call.window_S3C, slots_N,
        slots_N if counts_N is None else counts_N, _scratch(call.inputs, K, V), o_THV,
        *_strides(call.inputs), heads, call.tokens, int(call.store), weights.eps, weights.gate.lower_bound or 0.0,
        SAFE=weights.gate.mode == "safe", COUNTED=counts_N is not None, AHEAD=launch.ahead, D=max(K, V), K=K, V=V,
        BV=min(launch.columns, V), num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    return o_THV


def tail_step(call: Call, launch: Launch = TAIL) -> torch.Tensor:
    """The tail form; see `tail_step_inplace`, `tail_verify_inplace`."""
    weights, slots_N, tail, lengths_N = call.weights, call.slots_N, call.tail, call.counts_N
    assert tail is not None
    assert lengths_N is not None
    _, heads, K, V = call.matrix_SHKV.shape
    o_THV = call.output()
    tail_kernel[(heads, len(slots_N))](
        *_arguments(call.inputs, weights), call.matrix_SHKV, call.window_S3C, slots_N,
        slots_N if call.matrices_N is None else call.matrices_N, lengths_N,
        tail.k_SHRK, tail.u_SHRV, tail.g_SHRK, _scratch(call.inputs, K, V), o_THV,
        *_strides(call.inputs), heads, call.tokens, int(call.store), weights.eps, weights.gate.lower_bound or 0.0,
        SAFE=weights.gate.mode == "safe", AHEAD=launch.ahead, D=max(K, V), K=K, V=V,
        BV=min(launch.columns, V), BR=launch.ring_rows, num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    if call.target_N is not None:
        lengths_N = lengths_N + call.tokens
        fold(call.matrix_SHKV, tail, lengths_N, slots_N, call.matrices_N, call.target_N, weights.gate)
    return o_THV


def fold(
    matrix_SHKV: torch.Tensor,
    tail: Tail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    matrices_N: torch.Tensor | None,
    target_N: torch.Tensor,
    gate: Gate,
    warps: int = FOLD_WARPS,
    precision: str = "ieee",
) -> None:
    """See `fold_inplace`."""
    _, heads, K, V = matrix_SHKV.shape
    fold_kernel[(heads, slots_N.shape[0])](
        matrix_SHKV, tail.k_SHRK, tail.u_SHRV, tail.g_SHRK, lengths_N, slots_N,
        slots_N if matrices_N is None else matrices_N, target_N, heads,
        SAFE=gate.mode == "safe", PRECISION=precision, K=K, V=V, num_warps=warps,
    )  # fmt: skip


def shift_window(
    inputs: Projected, window_S3C: torch.Tensor, slots_N: torch.Tensor, accepted_N: torch.Tensor, tokens: int
) -> None:
    """See `shift_window_inplace`."""
    heads, K = inputs.q_THK.shape[1:]
    shift_kernel[(heads, slots_N.shape[0])](
        inputs.q_THK, inputs.k_THK, inputs.v_THV, window_S3C, slots_N, accepted_N, *_strides(inputs)[:3],
        heads, tokens, K=K, V=inputs.v_THV.shape[2], num_warps=1,
    )  # fmt: skip
