"""KDA on the GPU in Triton: chunked prefill and training (forward and backward).

Legend: T tokens, N sequences, H heads, K key dim, V value dim, C chunk (64), X chunks of all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perilune.config import Gate
from perilune.errors import Error
from perilune.ops.kda.triton_layout import Layout, checkpoint_slots, layout
from perilune.ops.kda.triton_prepare import prepare_kernel
from perilune.ops.kda.triton_scan import scan_kernel
from perilune.ops.sequences import Sequences

EPS = 1e-6


@dataclass(frozen=True)
class Inputs:
    """The raw tensors of one call and how to read them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    gate: Gate
    layout: Layout

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def keys(self) -> int:
        return self.q.shape[2]

    @property
    def values(self) -> int:
        return self.v.shape[2]

    @property
    def lower_bound(self) -> float:
        return 0.0 if self.gate.lower_bound is None else self.gate.lower_bound


@dataclass(frozen=True)
class Prepared:
    """What K1 hands to the scan: -w, q~, k- [X, H, C, K]; A beta, P [X, H, C, C]; e^(G_C) float32 [X, H, K]."""

    w: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    A: torch.Tensor
    P: torch.Tensor
    decay: torch.Tensor


def prepare(x: Inputs) -> Prepared:
    X, H, K = x.layout.chunks, x.heads, x.keys
    wide = x.q.new_empty(3, X, H, 64, K)
    square = x.q.new_empty(2, X, H, 64, 64)
    out = Prepared(wide[0], wide[1], wide[2], square[0], square[1], x.q.new_empty(X, H, K, dtype=torch.float32))
    if X:
        prepare_kernel[(X * H,)](
            x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, x.layout.table,
            out.w, out.q, out.k, out.A, out.P, out.decay,
            *x.q.stride(), *x.k.stride(), *x.g.stride(), *x.beta.stride(),
            K**-0.5, x.lower_bound, EPS, H, K=K, SAFE=x.gate.mode == "safe", num_warps=4,
        )  # fmt: skip
    return out


def scan(
    x: Inputs,
    p: Prepared,
    initial: torch.Tensor | None,
    slots: torch.Tensor | None = None,
    slot_count: int = 0,
    output: bool = True,
    keep: bool = False,
    BV: int = 64,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    T, H, K, V = x.q.shape[0], x.heads, x.keys, x.values
    N, X = len(x.layout.shift), x.layout.chunks
    BV = min(BV, V)
    o = x.v.new_empty(T, H, V) if output else None
    final = x.q.new_empty(N, H, K, V, dtype=torch.float32)
    states = None if slots is None else final.new_empty(slot_count, H, K, V)
    kept_S = x.q.new_empty(X, H, V, K) if keep else None
    kept_U = x.q.new_empty(X, H, 64, V) if keep else None
    if N:
        scan_kernel[(V // BV * H * N,)](
            p.w, p.q, p.k, p.A, p.P, p.decay, x.v, o, initial, final, states, kept_S, kept_U,
            x.layout.first_chunk, x.layout.cu, x.layout.shift, slots, *x.v.stride(), H,
            K=K, V=V, BV=BV, INITIAL=initial is not None, OUTPUT=output, STATES=slots is not None, KEEP=keep,
            STAGES=2, num_warps=4,
        )  # fmt: skip
    return o, final, states, kept_S, kept_U


def kda(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_raw_THK: torch.Tensor,
    beta_logit_TH: torch.Tensor,
    A_log_H: torch.Tensor,
    dt_bias_HK: torch.Tensor,
    gate: Gate,
    initial_state_NHKV: torch.Tensor | None,
    sequences: Sequences,
    checkpoints: tuple[tuple[int, ...], ...] | None = None,
) -> tuple[torch.Tensor, ...]:
    lay = layout(sequences, q_THK.device)
    x = Inputs(q_THK, k_THK, v_THV, g_raw_THK, beta_logit_TH, A_log_H, dt_bias_HK, gate, lay)
    slots, count = None, 0
    if checkpoints is not None:
        slots, count = checkpoint_slots(sequences.lengths, sequences.starts, checkpoints, q_THK.device)
    p = prepare(x)
    o, final, states, _, _ = scan(x, p, initial_state_NHKV, slots, count)
    return (o, final) if states is None else (o, final, states)
