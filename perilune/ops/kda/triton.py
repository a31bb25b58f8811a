"""KDA on the GPU in Triton: chunked prefill and training (forward and backward).

Forward: K1 `prepare` (chunks in parallel) and K2 `scan` (serial over chunks, outputs included). Backward: K1 and K2
again without outputs, keeping each chunk's entry state and U (or those kept by the forward), B2 the reverse scan, B3
the gradients (chunks in parallel). Every sum runs in a fixed order: same inputs, same bits.

Legend: T tokens, N sequences, H heads, K key dim, V value dim, C rows of a chunk (64), X chunks of all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from perilune.config import Gate
from perilune.errors import Error
from perilune.ops.kda import reference
from perilune.ops.kda.triton_backward_scan import reverse_scan_kernel
from perilune.ops.kda.triton_gradients import key_gradient_kernel, norm_gradient_kernel, state_gradient_kernel
from perilune.ops.kda.triton_layout import Layout, Tiles, checkpoint_slots, layout, tiles
from perilune.ops.kda.triton_prepare import prepare_kernel
from perilune.ops.kda.triton_scan import scan_kernel
from perilune.ops.sequences import Sequences

EPS = 1e-6
SIZES = (64, 128)
INTERPRETED_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Inputs:
    """The raw tensors of one call and where its chunks lie."""

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
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """N, X, T, H, K, V."""
        T, H, K = self.q.shape
        return len(self.layout.shift), self.layout.chunks, T, H, K, self.v.shape[2]

    @property
    def lower_bound(self) -> float:
        return 0.0 if self.gate.lower_bound is None else self.gate.lower_bound


@dataclass(frozen=True)
class Prepared:
    """What K1 hands to the scans: -w, q~, k- [X, H, C, K]; A beta, P [X, H, C, C].

    In float32: e^(G_C) [X, H, K]; 1 / |k| and K^-0.5 / |q| of each row [X, H, 2, C].
    """

    w: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    A: torch.Tensor
    P: torch.Tensor
    decay: torch.Tensor
    norms: torch.Tensor


@dataclass(frozen=True)
class Scanned:
    """What K2 returns: outputs, final and requested states, and, if kept, each chunk's entry state S^T and U."""

    o: torch.Tensor | None
    final: torch.Tensor
    states: torch.Tensor | None
    S: torch.Tensor | None
    U: torch.Tensor | None


def prepare_name(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, gate: Gate) -> Literal["hopper", "triton"]:
    """Which K1 runs: the Gluon kernel where its fixed layout fits, the plain Triton kernel elsewhere."""
    if not (
        q.is_cuda and q.shape[2] == 128 and gate.mode == "safe" and torch.cuda.get_device_capability(q.device)[0] == 9
    ):
        return "triton"
    vectors = all(x.stride(2) == 1 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 for x in (q, k, g))
    same = all(x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0 for x in (q, k, g))
    return "hopper" if vectors and same else "triton"


def prepare(x: Inputs) -> Prepared:
    """K1 over all chunks and heads."""
    _, X, _, H, K, _ = x.sizes
    wide = x.q.new_empty(3, X, H, 64, K)
    square = x.q.new_empty(2, X, H, 64, 64)
    decay = x.q.new_empty(X, H, K, dtype=torch.float32)
    norms = decay.new_empty(X, H, 2, 64)
    out = Prepared(wide[0], wide[1], wide[2], square[0], square[1], decay, norms)
    inputs = (x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, x.layout.table)
    tensors = (*inputs, out.w, out.q, out.k, out.A, out.P, out.decay, out.norms)
    strides = (*x.q.stride(), *x.k.stride(), *x.g.stride(), *x.beta.stride())
    scalars = (K**-0.5, x.lower_bound, EPS, H)
    if X and prepare_name(x.q, x.k, x.g, x.gate) == "hopper":
        from perilune.ops.kda.triton_prepare_hopper import prepare_hopper_kernel

        same = x.q.stride() == x.k.stride() == x.g.stride()
        prepare_hopper_kernel[(X * H,)](*tensors, *strides, *scalars, SAME=same, num_warps=4)
    elif X:
        safe = x.gate.mode == "safe"
        prepare_kernel[(X * H,)](*tensors, *strides, *scalars, K=K, B=min(K, 32), SAFE=safe, num_warps=4)
    return out


def scan(
    x: Inputs,
    p: Prepared,
    initial: torch.Tensor | None,
    slots: torch.Tensor | None = None,
    slot_count: int = 0,
    output: bool = True,
    keep: bool = False,
    lay: Layout | None = None,
) -> Scanned:
    """K2 over all sequences (of `lay`, if given).

    BV = 64 with three stages is the fastest shape on an H200 for 32 and for 96 heads.
    """
    _, X, T, H, K, V = x.sizes
    lay = x.layout if lay is None else lay
    N = len(lay.shift)
    BV = min(64, V)
    final = x.q.new_empty(N, H, K, V, dtype=torch.float32)
    out = Scanned(
        o=x.v.new_empty(T, H, V) if output else None,
        final=final,
        states=None if slots is None else final.new_empty(slot_count, H, K, V),
        S=x.q.new_empty(X, H, V, K) if keep else None,
        U=x.q.new_empty(X, H, 64, V) if keep else None,
    )
    if N:
        scan_kernel[(V // BV * H * N,)](
            p.w, p.q, p.k, p.A, p.P, p.decay, x.v, out.o, initial, final, out.states, out.S, out.U,
            lay.first_chunk, lay.cu, lay.shift, slots, *x.v.stride(), H,
            K=K, V=V, BV=BV, INITIAL=initial is not None, OUTPUT=output, STATES=slots is not None, KEEP=keep,
            STAGES=3, num_warps=4,
        )  # fmt: skip
    return out


def entry_states(x: Inputs, p: Prepared, initial: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """K2 again, without outputs: each chunk's entry state S^T [X, H, V, K] and U [X, H, C, V]."""
    out = scan(x, p, initial, output=False, keep=True)
    assert out.S is not None
    assert out.U is not None
    return out.S, out.U


def scan_segmented(
    x: Inputs, p: Prepared, initial: torch.Tensor | None, tiles: Tiles, slots: torch.Tensor | None, slot_count: int
) -> Scanned:
    """K2 over 1024-token tiles at once: each tile as a map S -> M S + B, the maps folded in order, then the outputs.

    M is what a tile leaves of the identity when v is zero, B what it leaves from zero with its own v.
    """
    N, _, T, H, K, V = x.sizes
    count = len(tiles.before)
    identity = torch.eye(K, device=x.q.device).expand(count, H, K, K).contiguous()
    silent = replace(x, v=x.v.new_zeros(1, 1, K).expand(T, H, K))
    M = scan(silent, p, identity, output=False, lay=tiles.layout).final
    B = scan(x, p, None, output=False, lay=tiles.layout).final
    zero = B.new_zeros(H, K, V)
    entry = torch.empty_like(B)
    for tile, (before, n) in enumerate(zip(tiles.before, tiles.sequence, strict=True)):
        if before >= 0:
            torch.baddbmm(B[before], M[before], entry[before], out=entry[tile])
        else:
            entry[tile] = zero if initial is None else initial[n]
    out = scan(x, p, entry, slots, slot_count, lay=tiles.layout)
    final = B.new_empty(N, H, K, V)
    for n, tile in enumerate(tiles.last):
        final[n] = out.final[tile] if tile >= 0 else zero if initial is None else initial[n]
    return replace(out, final=final)


def reverse_scan(
    x: Inputs,
    p: Prepared,
    d_o: torch.Tensor,
    d_final: torch.Tensor | None,
    d_states: torch.Tensor | None,
    slots: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """B2: (d_initial float32 [N, H, K, V], dS' transposed [X, H, V, K], dU [X, H, C, V])."""
    N, X, _, H, K, V = x.sizes
    # With many heads one program for all of V reads the operands once and is faster; few heads need the parallelism.
    BV = V if H * N >= 72 else min(64, V)
    d_initial = x.q.new_empty(N, H, K, V, dtype=torch.float32)
    dS = x.q.new_empty(X, H, V, K)
    dU = x.q.new_empty(X, H, 64, V)
    if N:
        reverse_scan_kernel[(V // BV * H * N,)](
            p.w, p.q, p.k, p.P, p.decay, d_o, d_final, d_states, d_initial, dS, dU,
            x.layout.first_chunk, x.layout.cu, x.layout.shift, slots, *d_o.stride(), H,
            K=K, V=V, BV=BV, FINAL=d_final is not None, STATES=d_states is not None,
            STAGES=2 if BV == 128 else 3, num_warps=8 if BV == 128 else 4,
        )  # fmt: skip
    return d_initial, dS, dU


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
        if prepare_name(x.q, x.k, x.g, x.gate) == "hopper":
            from perilune.ops.kda.triton_gradients_hopper import key_gradient_hopper_kernel

            key_gradient_hopper_kernel[grid](*raw, *tensors, K**-0.5, x.lower_bound, EPS, H, num_warps=4)
        else:
            safe = x.gate.mode == "safe"
            key_gradient_kernel[grid](*raw, p.norms, *tensors, x.lower_bound, H, K=K, B=B, SAFE=safe, num_warps=8)
        norm_gradient_kernel[(X * H,)](
            x.q, x.k, dq, dk, p.norms, radial, table, *x.q.stride(), *x.k.stride(), K**-0.5, H,
            K=K, B=B, num_warps=4,
        )  # fmt: skip
    return dq, dk, dg, d_A.sum((0, 2)), d_bias.sum(0)


class _Kda(torch.autograd.Function):
    """Forward keeps the raw inputs (`save="inputs"`), or also everything that the backward would compute again."""

    @staticmethod
    def forward(
        ctx: Any, x: Inputs, segments: Tiles | None, slots: Any, slot_count: int, save: str, *tensors: Any
    ) -> Any:
        *_, initial = tensors
        p = prepare(x)
        if segments is None:
            out = scan(x, p, initial, slots, slot_count, keep=save == "all")
        else:
            out = scan_segmented(x, p, initial, segments, slots, slot_count)
        ctx.save_for_backward(*tensors)
        ctx.x, ctx.slots = (x.gate, x.layout), slots
        ctx.kept = (p, out.S, out.U) if out.S is not None else None
        return (out.o, out.final) if out.states is None else (out.o, out.final, out.states)

    @staticmethod
    def backward(ctx: Any, d_o: Any, d_final: Any, d_states: Any = None) -> Any:
        *tensors, initial = ctx.saved_tensors
        x = Inputs(*tensors, *ctx.x)
        if ctx.kept is None:
            p = prepare(x)
            S, U = entry_states(x, p, initial)
        else:
            p, S, U = ctx.kept
            ctx.kept = None
        d_final = None if d_final is None else d_final.contiguous()
        d_states = None if d_states is None else d_states.contiguous()
        d_initial, dS, dU = reverse_scan(x, p, d_o, d_final, d_states, ctx.slots)
        s = state_gradients(x, p, S, U, dS, dU, d_o)
        del S, U, dS, dU  # their memory is what dq, dk and dg take next
        dq, dk, dg, d_A, d_bias = key_gradients(x, p, s)
        grads = (dq, dk, s.dv, dg, s.d_beta, d_A, d_bias, None if initial is None else d_initial)
        return None, None, None, None, None, *grads


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
    scan: Literal["serial", "segmented"] = "serial",
    save: Literal["inputs", "all"] = "inputs",
) -> tuple[torch.Tensor, ...]:
    """As `perilune.ops.kda.kda`, on a CUDA device.

    scan: "segmented" runs a document's 1024-token tiles at once (worth it for few heads); its backward is serial.
    save: what a serial forward keeps for the backward. "inputs" computes the rest again, "all" trades memory for time.
    K and V other than 64 and 128, and dtypes other than bfloat16, run the PyTorch reference.
    """
    if save not in ("inputs", "all"):
        raise Error(f"kda: save is {save!r}; allowed: 'inputs', 'all'")
    if not supports(q_THK, v_THV):
        return reference.kda(
            q_THK, k_THK, v_THV, g_raw_THK, beta_logit_TH, A_log_H, dt_bias_HK, gate, initial_state_NHKV, sequences,
            checkpoints, scan,
        )  # fmt: skip
    initial = None if initial_state_NHKV is None else initial_state_NHKV.float().contiguous()
    small = (A_log_H.float().contiguous(), dt_bias_HK.float().contiguous())
    tensors = (q_THK, k_THK, v_THV, g_raw_THK, beta_logit_TH, *small)
    slots, count = None, 0
    if checkpoints is not None:
        slots, count = checkpoint_slots(sequences.lengths, sequences.starts, checkpoints, q_THK.device)
    x = Inputs(*tensors, gate, layout(sequences, q_THK.device))
    segments = tiles(sequences, q_THK.device) if scan == "segmented" else None
    result: tuple[torch.Tensor, ...] = _Kda.apply(x, segments, slots, count, save, *tensors, initial)
    return result


def supports(q_THK: torch.Tensor, v_THV: torch.Tensor) -> bool:
    """Whether the kernels do these sizes and this dtype; on the CPU (Triton's interpreter) float32 only.

    On the GPU K and V below 64 are left out: for 32-wide tiles Triton 3.6 emits wgmma reads past shared memory.
    """
    sizes = SIZES if q_THK.is_cuda else INTERPRETED_SIZES
    dtype = torch.bfloat16 if q_THK.is_cuda else torch.float32
    return q_THK.shape[2] in sizes and v_THV.shape[2] in sizes and q_THK.dtype == dtype


__all__ = ["kda", "prepare_name", "supports"]
