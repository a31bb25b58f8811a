"""KDA's backward on the GPU: what the forward left out computed again, the reverse scan B2, the gradients B3.

B3 is one CUDA C++ kernel where it fits (`gradients_cuda`), whatever the gate, and three Triton kernels elsewhere.

Legend: T tokens, N sequences, H heads, K key dim, V value dim, C rows of a chunk (64), X chunks of all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from perilune.ops.kda import gradients_cuda
from perilune.ops.kda.triton_backward_scan import reverse_scan_kernel
from perilune.ops.kda.triton_forward import Inputs, Prepared, scan, scan_name
from perilune.ops.kda.triton_gradients import key_gradient_kernel, norm_gradient_kernel, state_gradient_kernel
from perilune.ops.kda.triton_layout import Layout


def entry_states(x: Inputs, p: Prepared, initial: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """K2 again, without outputs: each chunk's entry state S^T [X, H, V, K] and U [X, H, C, V]."""
    out = scan(x, p, initial, output=False, keep=True)
    assert out.S is not None
    assert out.U is not None
    return out.S, out.U


def reverse_scan_name(d_o: torch.Tensor, K: int) -> Literal["hopper", "triton"]:
    """Which B2 runs: the rule of K2, with d_o in the place of v."""
    return scan_name(d_o, K)


def reverse_scan(
    x: Inputs,
    p: Prepared,
    d_o: torch.Tensor,
    d_final: torch.Tensor | None,
    d_states: torch.Tensor | None,
    slots: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """B2: (d_initial float32 [N, H, K, V], dS' transposed [X, H, V, K], dU [X, H, C, V])."""
    _, X, _, H, K, V = x.sizes
    dS, dU = x.q.new_empty(X, H, V, K), x.q.new_empty(X, H, 64, V)
    return _walk_back(x, p, d_o, d_final, d_states, slots, x.layout, (dS, dU)), dS, dU


def initial_gradient(
    x: Inputs, p: Prepared, d_o: torch.Tensor, d_final: torch.Tensor | None, lay: Layout
) -> torch.Tensor:
    """B2 for the gradient of the initial states alone, of the sequences of `lay`: float32 [N, H, K, V]."""
    return _walk_back(x, p, d_o, d_final, None, None, lay, None)


def _walk_back(
    x: Inputs,
    p: Prepared,
    d_o: torch.Tensor,
    d_final: torch.Tensor | None,
    d_states: torch.Tensor | None,
    slots: torch.Tensor | None,
    lay: Layout,
    kept: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """d_initial; dS and dU of all chunks go into `kept`, if given."""
    _, X, _, H, K, V = x.sizes
    N = len(lay.shift)
    d_initial = x.q.new_empty(N, H, K, V, dtype=torch.float32)
    tensors = (d_final, d_states, d_initial, *(kept or (None, None)), lay.first_chunk, lay.cu, lay.shift, slots)
    options = {"FINAL": d_final is not None, "STATES": d_states is not None, "KEEP": kept is not None}
    if X and N and reverse_scan_name(d_o, K) == "hopper":
        from perilune.ops.kda.triton_backward_scan_hopper import descriptors, reverse_scan_hopper_kernel

        reverse_scan_hopper_kernel[(2 * H * N,)](*descriptors(p, d_o), *tensors, H, **options, num_warps=4, maxnreg=168)
    elif N:
        # With many heads one program for all of V reads the operands once and is faster; few need the parallelism.
        BV = V if H * N >= 72 else min(64, V)
        shape = {"STAGES": 2, "num_warps": 8} if BV == 128 else {"STAGES": 3, "num_warps": 4}
        operands = (p.w, p.q, p.k, p.P, p.decay, d_o)
        reverse_scan_kernel[(V // BV * H * N,)](
            *operands, *tensors, *d_o.stride(), H, K=K, V=V, BV=BV, **options, **shape
        )
    return d_initial


@dataclass(frozen=True)
class StateGradients:
    """What the first gradient kernel leaves for the second, besides the products that it put into `Prepared`."""

    dv: torch.Tensor
    d_beta: torch.Tensor
    diagonal: torch.Tensor
    last: torch.Tensor


def state_gradients(
    x: Inputs, p: Prepared, S: torch.Tensor, U: torch.Tensor, dS: torch.Tensor, dU: torch.Tensor, d_o: torch.Tensor
) -> StateGradients:
    """B3, first half: what needs the states. Afterwards `p` holds gradients (see `state_gradient_kernel`)."""
    _, X, T, H, K, V = x.sizes
    diagonal, last = p.decay.new_empty(X, H, 64), p.decay.new_empty(X, H, K)
    out = StateGradients(x.v.new_empty(T, H, V), x.beta.new_empty(T, H), diagonal, last)
    if X:
        state_gradient_kernel[(X * H,)](
            p.A, p.P, S, dS, U, dU, p.decay, d_o, x.beta, out.dv, out.d_beta, diagonal, p.q, p.w, p.k, last,
            x.layout.table, *d_o.stride(), *x.beta.stride(), H, 1, K=K, V=V, B=K, num_warps=4,
        )  # fmt: skip
    return out


def key_gradients(x: Inputs, p: Prepared, s: StateGradients) -> tuple[torch.Tensor, ...]:
    """B3, second half: dq, dk, dg_raw, d A_log, d dt_bias."""
    _, X, T, H, K, _ = x.sizes
    B = min(K, 64)
    dq, dk, dg = x.q.new_empty(T, H, K), x.k.new_empty(T, H, K), x.g.new_empty(T, H, K)
    d_bias, d_A = p.decay.new_empty(X, H, K), p.decay.new_empty(X, H, K // B)
    radial = p.decay.new_empty(X, H, K // B, 2, 64)
    if X:
        table, strides = x.layout.table, (*x.q.stride(), *x.k.stride(), *x.g.stride())
        raw = (x.q, x.k, x.g, x.A_log, x.dt_bias, table)
        tensors = (p.A, p.P, s.diagonal, p.q, p.w, p.k, s.last, dq, dk, dg, d_bias, d_A, radial, *strides)
        grid = (X * H * (K // B),)
        safe = x.gate.mode == "safe"
        key_gradient_kernel[grid](*raw, p.norms, *tensors, x.lower_bound, H, K=K, B=B, SAFE=safe, num_warps=8)
        norm_gradient_kernel[(X * H,)](
            x.q, x.k, dq, dk, p.norms, radial, table, *x.q.stride(), *x.k.stride(), K**-0.5, H,
            K=K, B=B, num_warps=4,
        )  # fmt: skip
    return dq, dk, dg, d_A.sum((0, 2)), d_bias.sum(0)


def gradients_name(x: Inputs) -> Literal["cuda", "triton"]:
    """Which B3 runs."""
    return "triton" if gradients_cuda.why_not(x) else "cuda"


def gradients(
    x: Inputs, p: Prepared, S: torch.Tensor, U: torch.Tensor, dS: torch.Tensor, dU: torch.Tensor, d_o: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """B3 in Triton: dq, dk, dv, dg_raw, d beta_logit, d A_log, d dt_bias. `p` is used up."""
    s = state_gradients(x, p, S, U, dS, dU, d_o)
    dq, dk, dg, d_A, d_bias = key_gradients(x, p, s)
    return dq, dk, s.dv, dg, s.d_beta, d_A, d_bias


__all__ = ["entry_states", "gradients", "gradients_name", "initial_gradient", "reverse_scan"]
