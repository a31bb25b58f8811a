"""The KDA layer: projections, short convolutions, delta-rule attention, gated norm (architecture of Kimi Linear, K3).

Legend: T tokens, N sequences, H heads, K key and value dim (equal), C = 3 * H * K convolution channels, R tail
tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from perilune.config import ModelConfig
from perilune.model.parts import Parts
from perilune.model.state import ROLLBACK, KdaState, boundary_after
from perilune.ops import kda as kda_ops
from perilune.ops.conv import short_conv
from perilune.ops.norm import gated_rms_norm
from perilune.ops.sequences import Sequences


class KdaLayer(nn.Module):
    """Kimi Delta Attention over packed sequences."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kda, d = config.kda, config.hidden_size
        self.heads, self.dim, self.gate, self.eps = kda.num_heads, kda.head_dim, kda.gate, config.rms_norm_eps
        width = kda.num_heads * kda.head_dim
        self.q_proj = nn.Linear(d, width, bias=False)
        self.k_proj = nn.Linear(d, width, bias=False)
        self.v_proj = nn.Linear(d, width, bias=False)
        self.conv_CW = nn.Parameter(torch.empty(3 * width, kda.conv_size))
        self.f_a_proj = nn.Linear(d, kda.head_dim, bias=False)
        self.f_b_proj = nn.Linear(kda.head_dim, width, bias=False)
        self.b_proj = nn.Linear(d, kda.num_heads, bias=False)
        self.A_log_H = nn.Parameter(torch.empty(kda.num_heads))
        self.dt_bias_HK = nn.Parameter(torch.empty(kda.num_heads, kda.head_dim))
        if kda.full_rank_gate:
            self.g_proj = nn.Linear(d, width, bias=False)
        else:
            self.g_a_proj = nn.Linear(d, kda.head_dim, bias=False)
            self.g_b_proj = nn.Linear(kda.head_dim, width, bias=False)
        self.o_norm_K = nn.Parameter(torch.empty(kda.head_dim))
        self.o_proj = nn.Linear(width, d, bias=False)

    def forward(
        self, x_TD: torch.Tensor, sequences: Sequences, parts: Parts, states: Sequence[KdaState] | None = None
    ) -> tuple[torch.Tensor, list[KdaState] | None]:
        """x_TD -> (y_TD, successors of `states`); states None computes whole documents and returns None."""
        linear = parts.linear
        u_TC = torch.cat([linear(x_TD, p.weight) for p in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        window = None if states is None else _windows(states)
        conv_TC, _ = short_conv(u_TC, self.conv_CW, sequences, window)
        q_THK, k_THK, v_THK = (s.unflatten(-1, (self.heads, self.dim)) for s in conv_TC.chunk(3, dim=-1))
        g_raw_THK = linear(linear(x_TD, self.f_a_proj.weight), self.f_b_proj.weight).unflatten(-1, (-1, self.dim))
        beta_TH = linear(x_TD, self.b_proj.weight)
        if states is None:
            o_THK = parts.kda(
                q_THK, k_THK, v_THK, g_raw_THK, beta_TH, self.A_log_H, self.dt_bias_HK, self.gate, None, sequences
            )[0]
            after = None
        else:
            q_THK, k_THK, g_THK, beta_TH = kda_ops.prepare(
                q_THK, k_THK, g_raw_THK, beta_TH, self.A_log_H, self.dt_bias_HK, self.gate
            )
            new = _Tokens(q_THK, k_THK, v_THK.to(k_THK.dtype), g_THK, beta_TH)
            o_THK, after = _advance(new, u_TC, sequences, states, self.gate.lower_bound)
            o_THK = o_THK.to(x_TD.dtype)
        gate_THK = self._output_gate(x_TD, parts).unflatten(-1, (self.heads, self.dim))
        o_THK = gated_rms_norm(o_THK, self.o_norm_K, gate_THK, self.eps)
        return linear(o_THK.flatten(-2), self.o_proj.weight), after

    def _output_gate(self, x_TD: torch.Tensor, parts: Parts) -> torch.Tensor:
        if hasattr(self, "g_proj"):
            return parts.linear(x_TD, self.g_proj.weight)
        return parts.linear(parts.linear(x_TD, self.g_a_proj.weight), self.g_b_proj.weight)


@dataclass(frozen=True)
class _Tokens:
    """Activated inputs of some tokens, or the ones that a tail keeps."""

    q_THK: torch.Tensor
    k_THK: torch.Tensor
    v_THV: torch.Tensor
    g_THK: torch.Tensor
    beta_TH: torch.Tensor

    def rows(self, begin: int, end: int) -> _Tokens:
        return _Tokens(*(t[begin:end] for t in (self.q_THK, self.k_THK, self.v_THV, self.g_THK, self.beta_TH)))


def _windows(states: Sequence[KdaState]) -> torch.Tensor:
    """[N, 3, C]: the last three pre-convolution inputs of each sequence, zeros before its start."""
    rows = [torch.nn.functional.pad(s.conv_WC, (0, 0, 3, 0))[-3:] for s in states]
    return torch.stack(rows)


def _advance(
    new: _Tokens, u_TC: torch.Tensor, sequences: Sequences, states: Sequence[KdaState], bound: float | None
) -> tuple[torch.Tensor, list[KdaState]]:
    """Outputs of the new tokens and each sequence's next state.

    Few tokens on a non-exact state are decoded against the matrix and the tail; everything else replays the tail in
    front of the new tokens through the chunk form, from the matrix on.
    """
    outputs: list[torch.Tensor] = []
    after: list[KdaState] = []
    for i, state in enumerate(states):
        begin, end = sequences.offsets[i], sequences.offsets[i + 1]
        tokens = new.rows(begin, end)
        decode = state.u_RHV is not None and end - begin <= ROLLBACK and state.length > 0
        o_nHV, grown = _decode(tokens, state) if decode else _replay(tokens, state, bound)
        conv_WC = torch.cat([state.conv_WC, u_TC[begin:end]])[-(3 + ROLLBACK) :]
        outputs.append(o_nHV)
        after.append(KdaState(**(grown | {"conv_WC": conv_WC})))
    return torch.cat(outputs), after


def _matrix(state: KdaState) -> torch.Tensor:
    if state.matrix_HKV is not None:
        return state.matrix_HKV
    _, heads, dim = state.k_RHK.shape
    return state.k_RHK.new_zeros(heads, dim, state.v_RHV.shape[-1])


def _decode(new: _Tokens, state: KdaState) -> tuple[torch.Tensor, dict[str, object]]:
    matrix_HKV = _matrix(state)
    assert state.u_RHV is not None
    o_nHV, u_nHV = kda_ops.tail_step(
        matrix_HKV, state.k_RHK, state.u_RHV, state.g_RHK, new.q_THK, new.k_THK, new.v_THV, new.g_THK, new.beta_TH
    )
    k_RHK, v_RHV = torch.cat([state.k_RHK, new.k_THK]), torch.cat([state.v_RHV, new.v_THV])
    u_RHV, g_RHK = torch.cat([state.u_RHV, u_nHV]), torch.cat([state.g_RHK, new.g_THK])
    beta_RH = torch.cat([state.beta_RH, new.beta_TH])
    boundary, origin = state.boundary, state.origin
    fold = boundary_after(boundary + k_RHK.shape[0]) - boundary
    if fold > 0:
        matrix_HKV = kda_ops.fold_tail(matrix_HKV, k_RHK[:fold], u_RHV[:fold], g_RHK[:fold])
        origin = "decode"
    return o_nHV, {
        "boundary": boundary + max(fold, 0),
        "matrix_HKV": matrix_HKV,
        "k_RHK": k_RHK[max(fold, 0) :],
        "v_RHV": v_RHV[max(fold, 0) :],
        "u_RHV": u_RHV[max(fold, 0) :],
        "g_RHK": g_RHK[max(fold, 0) :],
        "beta_RH": beta_RH[max(fold, 0) :],
        "origin": origin,
    }


def _replay(new: _Tokens, state: KdaState, bound: float | None) -> tuple[torch.Tensor, dict[str, object]]:
    tail = state.k_RHK.shape[0]
    q_THK = torch.cat([torch.zeros_like(state.k_RHK), new.q_THK])
    k_THK, v_THV = torch.cat([state.k_RHK, new.k_THK]), torch.cat([state.v_RHV, new.v_THV])
    g_THK, beta_TH = torch.cat([state.g_RHK, new.g_THK]), torch.cat([state.beta_RH, new.beta_TH])
    length = state.boundary + k_THK.shape[0]
    boundary = max(boundary_after(length), state.boundary)
    moved = boundary > state.boundary
    sequences = Sequences.from_lengths([k_THK.shape[0]], [state.boundary], device=k_THK.device)
    o_THV, _, *states = kda_ops.chunk(
        q_THK,
        k_THK,
        v_THV,
        g_THK,
        beta_TH,
        None if state.matrix_HKV is None else state.matrix_HKV[None],
        sequences,
        bound,
        checkpoints=((boundary,),) if moved else None,
    )
    matrix_HKV = states[0][0] if moved else state.matrix_HKV
    drop = boundary - state.boundary
    kept = _Tokens(q_THK, k_THK, v_THV, g_THK, beta_TH).rows(drop, k_THK.shape[0])
    grown: dict[str, object] = {
        "boundary": boundary,
        "matrix_HKV": matrix_HKV,
        "k_RHK": kept.k_THK,
        "v_RHV": kept.v_THV,
        "u_RHV": None,
        "g_RHK": kept.g_THK,
        "beta_RH": kept.beta_TH,
        "origin": state.origin,
    }
    if state.u_RHV is not None:
        start_HKV = torch.zeros_like(_matrix(state)) if matrix_HKV is None else matrix_HKV
        nothing = kept.k_THK[:0]
        _, grown["u_RHV"] = kda_ops.tail_step(
            start_HKV, nothing, kept.v_THV[:0], nothing, kept.q_THK, kept.k_THK, kept.v_THV, kept.g_THK, kept.beta_TH
        )
    return o_THV[tail:], grown
