"""KDA kernel B2 for Hopper in Gluon: the reverse scan of `triton_backward_scan`, with loads of their own.

One warp asks the tensor memory accelerator for the tiles of the chunks to come, four warps multiply, as in
`triton_scan_hopper`. Tiles arrive in two groups: what the chain needs first (k-, P, e^(G_C)), and the rest (dO, q~, w).

Only K = V = 128, bfloat16. Formulas and letters are those of `triton_backward_scan`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from perilune.ops.kda.triton_scan_hopper import (
    CHUNK,
    KEYS,
    LEFT,
    LEFT_STATE,
    LINE,
    ROWS,
    STAGES,
    STATE,
    TILE,
    B,
    D,
    make_barriers,
    next_stage,
    place,
)

if TYPE_CHECKING:
    from perilune.ops.kda.triton_forward import Prepared


@gluon.jit
def produce(
    w_d, q_d, k_d, P_d, o_d, decay_d, tiles, barriers, c0, count, token, column, h, H,
):  # fmt: skip
    """The loading warp, from the last chunk to the first."""
    w_s, q_s, k_s, P_s, o_s, decay_s = tiles
    early, late, early_free, late_free = barriers
    stage = 0
    phase = 1
    for step in range(count):
        i = count - 1 - step
        ch = (c0 + i) * H + h
        mbarrier.wait(early_free.index(stage), phase)
        bar = early.index(stage)
        mbarrier.expect(bar, 64 * D * 2 + 64 * 64 * 2 + D * 4)
        tma.async_copy_global_to_shared(k_d, [ch * 64, 0], bar, k_s.index(stage))
        tma.async_copy_global_to_shared(P_d, [ch * 64, 0], bar, P_s.index(stage))
        tma.async_copy_global_to_shared(decay_d, [ch, 0], bar, decay_s.index(stage))
        mbarrier.wait(late_free.index(stage), phase)
        bar = late.index(stage)
        mbarrier.expect(bar, 2 * 64 * D * 2 + 64 * B * 2)
        tma.async_copy_global_to_shared(o_d, [token + i * 64, column], bar, o_s.index(stage))
        tma.async_copy_global_to_shared(q_d, [ch * 64, 0], bar, q_s.index(stage))
        tma.async_copy_global_to_shared(w_d, [ch * 64, 0], bar, w_s.index(stage))
        stage, phase = next_stage(stage, phase)


@gluon.jit
def consume(
    tiles, results, barriers, d_final, d_states, d_initial, kept_dS, kept_dU, slots,
    begin, end, c0, count, token, part, h, n, H,
    FINAL: gl.constexpr, STATES: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """The multiplying warps."""
    w_s, q_s, k_s, P_s, o_s, decay_s = tiles
    S_s, U_s = results
    early, late, early_free, late_free = barriers
    keys = gl.arange(0, D, layout=gl.SliceLayout(0, STATE))[None, :]
    vals = part * B + gl.arange(0, B, layout=gl.SliceLayout(1, STATE))[:, None]
    state = vals + keys * D
    nh = n.to(gl.int64) * H + h
    if FINAL:
        dS = gl.load(d_final + nh * (D * D) + state)
    else:
        dS = gl.full([B, D], 0.0, gl.float32, STATE)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    cols = part * B + gl.arange(0, B, layout=gl.SliceLayout(0, ROWS))[None, :]
    kv = part * B + gl.arange(0, B, layout=gl.SliceLayout(1, KEYS))[:, None]
    kk = gl.arange(0, D, layout=gl.SliceLayout(0, KEYS))[None, :]
    zero = gl.full([B, 64], 0.0, gl.float32, CHUNK)
    stage = 0
    phase = 0
    for step in range(count):
        i = count - 1 - step
        ch = ((c0 + i) * H + h).to(gl.int64)
        first = token + i * 64
        if STATES:
            slot = gl.load(slots + c0 + i)
            if slot >= 0:
                dS += gl.load(d_states + (slot.to(gl.int64) * H + h) * (D * D) + state)
        dS_low = dS.to(gl.bfloat16)
        mbarrier.wait(early.index(stage), phase)
        dU = warpgroup_mma(
            gl.convert_layout(dS_low, LEFT), k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        if KEEP:
            S_s.store(dS_low)
        decay = decay_s.index(stage).load(STATE)
        mbarrier.wait(late.index(stage), phase)
        o_tile = o_s.index(stage)
        if (first < begin) | (first + 64 > end):
            # Rows of other sequences came along: select them away.
            inside = ((first + rows >= begin) & (first + rows < end))[:, None]
            x = gl.where(inside, o_tile.load(ROWS), 0.0)
            gl.thread_barrier()
            o_tile.store(x)
            fence_async_shared()
            gl.thread_barrier()
        dU = warpgroup_mma(o_tile.permute((1, 0)), P_s.index(stage), dU, is_async=True)
        dS = warpgroup_mma(o_tile.permute((1, 0)), q_s.index(stage), dS * decay, is_async=True)
        dU = warpgroup_mma_wait(1, [dU])
        dU_low = dU.to(gl.bfloat16)
        # w is stored negated, so this adds -w^T dU.
        dS = warpgroup_mma(gl.convert_layout(dU_low, LEFT_STATE), w_s.index(stage), dS, is_async=True)
        if KEEP:
            U_s.store(gl.permute(dU_low, (1, 0)))
        gl.thread_barrier()
        mbarrier.arrive(early_free.index(stage))
        if KEEP:
            gl.store(kept_dS + ch * (D * D) + (kv * D + kk), S_s.load(KEYS))
            gl.store(kept_dU + ch * (64 * D) + (rows[:, None] * D + cols), U_s.load(ROWS))
        dS = warpgroup_mma_wait(0, [dS])
        gl.thread_barrier()
        mbarrier.arrive(late_free.index(stage))
        stage, phase = next_stage(stage, phase)
    gl.store(d_initial + nh * (D * D) + state, dS)


@gluon.jit
def reverse_scan_hopper_kernel(
    w_d, q_d, k_d, P_d, o_d, decay_d, d_final, d_states, d_initial, kept_dS, kept_dU, first_chunk, cu, shift, slots, H,
    FINAL: gl.constexpr, STATES: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Arguments as `reverse_scan_kernel`; ..._d: tensor descriptors of one chunk's tile in [rows, columns]."""
    part, h, n, begin, end, c0, count, token = place(first_chunk, cu, shift, H)

    w_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, D], TILE)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, D], TILE)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, D], TILE)
    P_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], TILE)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, B], TILE)
    decay_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, D], LINE)
    # What is not used stands for something that is.
    S_s = k_s
    U_s = k_s
    if KEEP:
        S_s = gl.allocate_shared_memory(gl.bfloat16, [B, D], TILE)
        U_s = gl.allocate_shared_memory(gl.bfloat16, [64, B], TILE)
    barriers = make_barriers()
    tiles = (w_s, q_s, k_s, P_s, o_s, decay_s)
    results = (S_s, U_s)
    gl.warp_specialize(
        [
            (consume, (tiles, results, barriers, d_final, d_states, d_initial, kept_dS, kept_dU, slots,
                       begin, end, c0, count, token, part, h, n, H, FINAL, STATES, KEEP)),
            (produce, (w_d, q_d, k_d, P_d, o_d, decay_d, tiles, barriers, c0, count, token, h * D + part * B, h, H)),
        ],
        [1],
        [24],
    )  # fmt: skip


def descriptors(p: Prepared, d_o: torch.Tensor) -> list[TensorDescriptor]:
    """Of one chunk's tile each: w, q~, k-, P, dO and e^(G_C), in the kernel's order."""
    X, H, C, K = p.w.shape
    T, _, V = d_o.shape
    wide = [TensorDescriptor(t, [X * H * C, K], [K, 1], [C, K], TILE.value) for t in (p.w, p.q, p.k)]
    square = TensorDescriptor(p.P, [X * H * C, C], [C, 1], [C, C], TILE.value)
    values = TensorDescriptor(d_o, [T, H * V], [d_o.stride(0), 1], [C, B.value], TILE.value)
    decay = TensorDescriptor(p.decay, [X * H, K], [K, 1], [1, K], LINE.value)
    return [*wide, square, values, decay]


__all__ = ["descriptors", "reverse_scan_hopper_kernel"]
