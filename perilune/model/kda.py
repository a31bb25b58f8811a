"""The KDA layer: projections, short convolutions, delta-rule attention, gated norm (architecture of Kimi Linear, K3).

Legend: T tokens, N sequences, H heads, K key and value dim (equal), C = 3 * H * K convolution channels, R tail
tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from perilune.config import ModelConfig
from perilune.model.parts import Parts
from perilune.model.state import ROLLBACK, KdaState, boundary_after
from perilune.ops import kda as kda_ops
from perilune.ops.names import keep, region
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
        keep("kda.u", u_TC)
        window = None if states is None else _windows(states)
        conv_TC, _ = parts.conv(u_TC, self.conv_CW, sequences, window)
        keep("kda.qkv", conv_TC, lambda u_TC: parts.conv(u_TC, self.conv_CW, sequences, window)[0], u_TC)
        q_THK, k_THK, v_THK = (s.unflatten(-1, (self.heads, self.dim)) for s in conv_TC.chunk(3, dim=-1))
        of_g = (linear(x_TD, self.f_a_proj.weight), self.f_b_proj.weight)
        g_raw_THK = keep("kda.g", linear(*of_g), linear, *of_g).unflatten(-1, (-1, self.dim))
        beta_TH = linear(x_TD, self.b_proj.weight)
        gate = parts.beside(lambda: self.output_gate(x_TD, parts), x_TD.device)
        if states is None:
            tensors = (q_THK, k_THK, v_THK, g_raw_THK, beta_TH, self.A_log_H, self.dt_bias_HK)
            o_THK = region("kda.core", lambda *x: parts.kda(*x, self.gate, None, sequences)[0], *tensors)
            after = None
        else:
            q_THK, k_THK, g_THK, beta_TH = kda_ops.prepare(
                q_THK, k_THK, g_raw_THK, beta_TH, self.A_log_H, self.dt_bias_HK, self.gate
            )
            new = _Tokens(q_THK, k_THK, v_THK.to(k_THK.dtype), g_THK, beta_TH)
            o_THK, after = _advance(new, u_TC, sequences, states, self.gate.lower_bound)
            o_THK = o_THK.to(x_TD.dtype)
        gate_THK = gate().unflatten(-1, (self.heads, self.dim))
        parts_of_o = (keep("kda.o", o_THK), self.o_norm_K, keep("kda.gate", gate_THK), self.eps)
        o_THK = keep("kda.normed", gated_rms_norm(*parts_of_o), gated_rms_norm, *parts_of_o)
        return linear(o_THK.flatten(-2), self.o_proj.weight), after

    def output_gate(self, x_TD: torch.Tensor, parts: Parts) -> torch.Tensor:
        """The output gate before its sigmoid, [T, H * K]."""
        if hasattr(self, "g_proj"):
            return parts.linear(x_TD, self.g_proj.weight)
        return parts.linear(parts.linear(x_TD, self.g_a_proj.weight), self.g_b_proj.weight)


@dataclass(frozen=True)
class _Tokens:
    """Activated inputs of some tokens."""

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
        grown = replace(
            state,
            k_RHK=torch.cat([state.k_RHK, tokens.k_THK]),
            v_RHV=torch.cat([state.v_RHV, tokens.v_THV]),
            g_RHK=torch.cat([state.g_RHK, tokens.g_THK]),
            beta_RH=torch.cat([state.beta_RH, tokens.beta_TH]),
            conv_WC=torch.cat([state.conv_WC, u_TC[begin:end]])[-(3 + ROLLBACK) :],
        )
        if state.u_RHV is not None and end - begin <= ROLLBACK and state.length > 0:
            o_nHV, grown = _decode(tokens, state, grown)
        else:
            o_nHV, grown = _replay(tokens, state, grown, bound)
        outputs.append(o_nHV)
        after.append(grown)
    return torch.cat(outputs), after


def _matrix(state: KdaState) -> torch.Tensor:
    if state.matrix_HKV is not None:
        return state.matrix_HKV
    _, heads, dim = state.k_RHK.shape
    return state.k_RHK.new_zeros(heads, dim, state.v_RHV.shape[-1])


def _decode(new: _Tokens, state: KdaState, grown: KdaState) -> tuple[torch.Tensor, KdaState]:
    assert state.u_RHV is not None
    o_nHV, u_nHV = kda_ops.tail_step(
        _matrix(state), state.k_RHK, state.u_RHV, state.g_RHK, new.q_THK, new.k_THK, new.v_THV, new.g_THK, new.beta_TH
    )
    u_RHV = torch.cat([state.u_RHV, u_nHV])
    grown = replace(grown, u_RHV=u_RHV)
    count = boundary_after(grown.length) - state.boundary
    if count <= 0:
        return o_nHV, grown
    matrix_HKV = kda_ops.fold_tail(_matrix(state), grown.k_RHK[:count], u_RHV[:count], grown.g_RHK[:count])
    return o_nHV, replace(grown.folded(matrix_HKV, count), origin="decode")


def _replay(new: _Tokens, state: KdaState, grown: KdaState, bound: float | None) -> tuple[torch.Tensor, KdaState]:
    count = max(boundary_after(grown.length) - state.boundary, 0)
    o_THV, _, states = kda_ops.chunk(
        torch.cat([torch.zeros_like(state.k_RHK), new.q_THK]),
        grown.k_RHK,
        grown.v_RHV,
        grown.g_RHK,
        grown.beta_RH,
        None if state.matrix_HKV is None else state.matrix_HKV[None],
        Sequences.from_lengths([grown.k_RHK.shape[0]], [state.boundary], device=new.k_THK.device),
        bound,
        checkpoints=((state.boundary + count,),) if count else None,
    )
    if count:
        assert states is not None
        grown = replace(grown, u_RHV=None).folded(states[0], count)
    if state.u_RHV is not None:
        # The tail's corrections, for decoding from here; its outputs are known already.
        none_RHK, none_RHV = grown.k_RHK[:0], grown.v_RHV[:0]
        _, u_RHV = kda_ops.tail_step(
            _matrix(grown),
            none_RHK,
            none_RHV,
            none_RHK,
            torch.zeros_like(grown.k_RHK),
            grown.k_RHK,
            grown.v_RHV,
            grown.g_RHK,
            grown.beta_RH,
        )
        grown = replace(grown, u_RHV=u_RHV)
    return o_THV[state.k_RHK.shape[0] :], grown
