"""KDA on the GPU in Triton: chunked prefill and training (forward and backward).

Forward: K1 `prepare` (chunks in parallel) and K2 `scan` (serial over chunks, outputs included). Backward: K1 and K2
again without outputs, keeping each chunk's entry state and U (or those kept by the forward), B2 the reverse scan, B3
the gradients (chunks in parallel). Every sum runs in a fixed order: same inputs, same bits.

Legend: T tokens, N sequences, H heads, K key dim, V value dim, C rows of a chunk (64), X chunks of all sequences.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from perilune.config import Gate
from perilune.ops.kda import gradients_cuda
from perilune.ops.kda.prepare import Raw
from perilune.ops.kda.triton_backward import entry_states, gradients, gradients_name, reverse_scan
from perilune.ops.kda.triton_forward import (
    Inputs,
    forward,
    maps,
    prepare,
    prepare_name,
    scan_name,
    scan_segmented,
)
from perilune.ops.kda.triton_layout import Tiles, checkpoint_slots, layout, tile_slots, tiles
from perilune.ops.sequences import Sequences

SIZES = (64, 128)
INTERPRETED_SIZES = (16, 32, 64, 128)


class _Kda(torch.autograd.Function):
    """Forward keeps the raw inputs (`save="inputs"`), or also everything that the backward would compute again."""

    @staticmethod
    def forward(
        ctx: Any, x: Inputs, segments: Tiles | None, marks: Any, slots: Any, slot_count: int, save: str, *tensors: Any
    ) -> Any:
        *_, initial = tensors
        keep = save == "all" and any(ctx.needs_input_grad)
        if segments is None:
            p, out = forward(x, initial, slots, slot_count, keep=keep, hold=keep)
        else:
            p = prepare(x)
            out = scan_segmented(x, p, initial, segments, marks, slots, slot_count, keep)
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
        d_o = within_reach(d_o)
        d_final = None if d_final is None else d_final.contiguous()
        d_states = None if d_states is None else d_states.contiguous()
        d_initial, dS, dU = reverse_scan(x, p, d_o, d_final, d_states, ctx.slots)
        if gradients_name(x) == "cuda":
            A, norms = p.A, p.norms
            del p  # its memory is what the gradients take next
            grads = gradients_cuda.gradients(x, A, norms, S, U, dS, dU, d_o)
        else:
            grads = gradients(x, p, S, U, dS, dU, d_o)
        return None, None, None, None, None, None, *grads, None if initial is None else d_initial


def kda(
    raw: Raw,
    gate: Gate,
    initial_NHKV: torch.Tensor | None,
    sequences: Sequences,
    checkpoints: tuple[tuple[int, ...], ...] | None = None,
    scan: Literal["serial", "segmented"] = "serial",
    save: Literal["inputs", "all"] = "inputs",
) -> tuple[torch.Tensor, ...]:
    """`perilune.ops.kda.kda` for inputs that `supports` accepts. The backward of the segmented scan is serial."""
    device, cut = raw.q_THK.device, (sequences.lengths, sequences.starts)
    slots, count, marks = None, 0, None
    if checkpoints is not None:
        slots, count = checkpoint_slots(*cut, checkpoints, device)
    segments = tiles(sequences, device) if scan == "segmented" else None
    if segments is not None and checkpoints is not None:
        marks = tile_slots(*cut, checkpoints, device)
    initial = None if initial_NHKV is None else initial_NHKV.float().contiguous()
    x = inputs(raw, gate, sequences)
    tensors = (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, initial)
    result: tuple[torch.Tensor, ...] = _Kda.apply(x, segments, marks, slots, count, save, *tensors)
    return result


def kda_maps(raw: Raw, gate: Gate, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    """`perilune.ops.kda.kda_maps` for inputs that `supports` accepts."""
    x = inputs(raw, gate, sequences)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in raw)):
        return maps(x, prepare(x), x.layout)
    # M is the state that an identity leaves without values.
    T, H, K = raw.q_THK.shape
    identity = torch.eye(K, device=raw.q_THK.device).expand(sequences.count, H, K, K)
    silent = raw._replace(v_THV=raw.v_THV.new_zeros(T, H, K))
    return kda(silent, gate, identity, sequences)[1], kda(raw, gate, None, sequences)[1]


def inputs(raw: Raw, gate: Gate, sequences: Sequences) -> Inputs:
    small = (raw.A_log_H.float().contiguous(), raw.dt_bias_HK.float().contiguous())
    q, k, v, g, beta = (within_reach(x) for x in raw[:5])
    return Inputs(q, k, v, g, beta, *small, gate, layout(sequences, raw.q_THK.device))


def within_reach(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, ...], or a copy: the kernels take 32-bit offsets from a chunk's first token to all of its numbers."""
    token, _, *inner = x.stride()
    reach = 64 * token + sum(n * stride for n, stride in zip(x.shape[2:], inner, strict=True))
    return x if reach < 2**31 else x.contiguous()


def supports(q_THK: torch.Tensor, v_THV: torch.Tensor) -> bool:
    """Whether the kernels do these sizes and this dtype; on the CPU (Triton's interpreter) float32 only.

    On the GPU K and V below 64 are left out: for 32-wide tiles Triton 3.6 emits wgmma reads past shared memory.
    """
    sizes = SIZES if q_THK.is_cuda else INTERPRETED_SIZES
    dtype = torch.bfloat16 if q_THK.is_cuda else torch.float32
    return q_THK.shape[2] in sizes and v_THV.shape[2] in sizes and q_THK.dtype == dtype


__all__ = ["gradients_name", "kda", "kda_maps", "prepare_name", "scan_name", "supports"]
