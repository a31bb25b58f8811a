"""The MLA layer: latent keys and values, no rotary embedding, optional output gate (Kimi Linear, Kimi K3).

Legend: T new tokens, S cached and new tokens, H heads, Q query width, P nope width, O rope width, V value dim,
L latent row = kv_lora_rank + O, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from perilune.config import ModelConfig
from perilune.model.paged_rows import PagedRows
from perilune.model.parts import Parts
from perilune.model.state import MlaState
from perilune.ops.activation import sigmoid
from perilune.ops.names import keep
from perilune.ops.norm import rms_norm
from perilune.ops.sequences import Sequences


class MlaLayer(nn.Module):
    """Multi-head latent attention over packed sequences."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        mla, d = config.mla, config.hidden_size
        self.heads, self.rank, self.eps = mla.num_heads, mla.kv_lora_rank, mla.norm_eps
        self.nope, self.rope, self.v_dim = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
        self.scale = mla.qk_head_dim**-0.5
        if mla.q_lora_rank is None:
            self.q_proj = nn.Linear(d, mla.num_heads * mla.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(d, mla.q_lora_rank, bias=False)
            self.q_a_norm = nn.Parameter(torch.empty(mla.q_lora_rank))
            self.q_b_proj = nn.Linear(mla.q_lora_rank, mla.num_heads * mla.qk_head_dim, bias=False)
        self.kv_a_proj = nn.Linear(d, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=False)
        self.kv_a_norm = nn.Parameter(torch.empty(mla.kv_lora_rank))
        self.kv_b_proj = nn.Linear(
            mla.kv_lora_rank, mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False
        )
        if mla.output_gate:
            self.g_proj = nn.Linear(d, mla.num_heads * mla.v_head_dim, bias=False)
        self.o_proj = nn.Linear(mla.num_heads * mla.v_head_dim, d, bias=False)

    def forward(
        self,
        x_TD: torch.Tensor,
        sequences: Sequences,
        parts: Parts,
        states: Sequence[MlaState | PagedRows] | None = None,
    ) -> tuple[torch.Tensor, list[MlaState | PagedRows] | None, torch.Tensor]:
        """x_TD -> (y_TD, successors of `states` or None, exact largest logit of each head, float32 or wider [H])."""
        q_THQ = self.queries(x_TD, parts).unflatten(-1, (self.heads, self.nope + self.rope))
        c_TR, k_rope_TO = parts.linear(x_TD, self.kv_a_proj.weight).split([self.rank, self.rope], dim=-1)
        rows_TL = torch.cat([rms_norm(c_TR, self.kv_a_norm, self.eps), k_rope_TO], dim=-1)
        after = None
        if states is None:
            rows_SL, keys = parts.latents(rows_TL, sequences)
        else:
            cut = sequences.offsets
            after = [s.append(rows_TL[cut[i] : cut[i + 1]]) for i, s in enumerate(states)]
            rows_SL = torch.cat([s.rows_SL for s in after])
            keys = Sequences.from_lengths([s.length for s in after], device=x_TD.device)
        k_SHQ, v_SHV = self.keys_values(keep("mla.latent", rows_SL), parts)
        o_THV, _, max_logit_H = parts.mla(q_THQ, k_SHQ, v_SHV, sequences, keys, self.scale)
        o_TX = keep("mla.o", o_THV).flatten(-2)
        if hasattr(self, "g_proj"):
            # The gate's sigmoid and product are taken in the model's dtype, as the released code does.
            gate_TX = keep("mla.gate", parts.linear(x_TD, self.g_proj.weight))
            open_TX = keep("mla.open", sigmoid(gate_TX), sigmoid, gate_TX)
            o_TX = keep("mla.gated", o_TX * open_TX, torch.mul, o_TX, open_TX)
        return parts.linear(o_TX, self.o_proj.weight), after, max_logit_H

    def queries(self, x_TD: torch.Tensor, parts: Parts) -> torch.Tensor:
        """[T, H * Q], each head's nope part before its rope part."""
        if hasattr(self, "q_proj"):
            return keep("mla.q", parts.linear(x_TD, self.q_proj.weight))
        q_TR = rms_norm(parts.linear(x_TD, self.q_a_proj.weight), self.q_a_norm, self.eps)
        return keep("mla.q", parts.linear(q_TR, self.q_b_proj.weight), parts.linear, q_TR, self.q_b_proj.weight)

    def keys_values(self, rows_SL: torch.Tensor, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache rows -> k_SHQ and v_SHV."""
        c_SR, k_rope_SO = rows_SL.split([self.rank, self.rope], dim=-1)
        of_kv = (c_SR, self.kv_b_proj.weight)
        kv_SHX = keep("mla.kv", parts.linear(*of_kv), parts.linear, *of_kv).unflatten(-1, (self.heads, -1))
        of_k = (kv_SHX[..., : self.nope], k_rope_SO)
        return keep("mla.k", _keys(*of_k), _keys, *of_k), kv_SHX[..., self.nope :]


def _keys(k_nope_SHP: torch.Tensor, k_rope_SO: torch.Tensor) -> torch.Tensor:
    """k_SHQ: each head's own part, and the one that all heads share."""
    return torch.cat([k_nope_SHP, k_rope_SO[:, None].expand(-1, k_nope_SHP.shape[1], -1)], dim=-1)
