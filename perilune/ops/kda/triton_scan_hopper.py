"""KDA kernel K2 for Hopper in Gluon: the scan of `triton_scan`, with loads of their own.

One warp does nothing but ask the tensor memory accelerator for the next chunks' tiles; four warps multiply. Tiles
arrive in two groups, what U needs (v, A beta, w, e^(G_C)) before what the rest needs (q~, P, k-), and each group's
memory is asked to be filled again as soon as every warp has read it.

Only K = V = 128, bfloat16. Formulas and letters are those of `triton_scan`.
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

if TYPE_CHECKING:
    from perilune.ops.kda.triton_forward import Prepared

D = gl.constexpr(128)  # K and V
B = gl.constexpr(64)  # value channels of a program
STAGES = gl.constexpr(2)
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LINE = gl.constexpr(gl.NVMMASharedLayout(0, 32, 2))
STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
CHUNK = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, CHUNK, 2))
LEFT_STATE = gl.constexpr(gl.DotOperandLayout(0, STATE, 2))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
KEYS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def next_stage(stage, phase):
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def place(first_chunk, cu, shift, H):
    """A program's slice of values, head and sequence; the sequence's tokens, first chunk, chunks, token of row 0."""
    part = gl.program_id(0) % (D // B)
    h = gl.program_id(0) // (D // B) % H
    n = gl.program_id(0) // (D // B) // H
    begin = gl.load(cu + n).to(gl.int32)
    end = gl.load(cu + n + 1).to(gl.int32)
    c0 = gl.load(first_chunk + n)
    count = gl.load(first_chunk + n + 1) - c0
    token = begin - gl.load(shift + n)
    return part, h, n, begin, end, c0, count, token


@gluon.jit
def make_barriers():
    """For each stage and both groups of tiles: they are there; they have been read."""
    early = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    late = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    early_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    late_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(early.index(s), count=1)
        mbarrier.init(late.index(s), count=1)
        mbarrier.init(early_free.index(s), count=1)
        mbarrier.init(late_free.index(s), count=1)
    return early, late, early_free, late_free


@gluon.jit
def produce(
    w_d, q_d, k_d, A_d, P_d, v_d, decay_d, tiles, barriers, c0, count, token, column, h, H,
    VALUES: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """The loading warp. early, late: tiles are there; ..._free: tiles have been read."""
    w_s, q_s, k_s, A_s, P_s, v_s, decay_s = tiles
    early, late, early_free, late_free = barriers
    stage = 0
    phase = 1
    for i in range(count):
        ch = (c0 + i) * H + h
        mbarrier.wait(early_free.index(stage), phase)
        bar = early.index(stage)
        if VALUES:
            mbarrier.expect(bar, 64 * D * 2 + 64 * B * 2 + 64 * 64 * 2 + D * 4)
            tma.async_copy_global_to_shared(v_d, [token + i * 64, column], bar, v_s.index(stage))
            tma.async_copy_global_to_shared(A_d, [ch * 64, 0], bar, A_s.index(stage))
        else:
            mbarrier.expect(bar, 64 * D * 2 + D * 4)
        tma.async_copy_global_to_shared(w_d, [ch * 64, 0], bar, w_s.index(stage))
        tma.async_copy_global_to_shared(decay_d, [ch, 0], bar, decay_s.index(stage))
        mbarrier.wait(late_free.index(stage), phase)
        bar = late.index(stage)
        if OUTPUT:
            mbarrier.expect(bar, 2 * 64 * D * 2 + 64 * 64 * 2)
            tma.async_copy_global_to_shared(q_d, [ch * 64, 0], bar, q_s.index(stage))
            tma.async_copy_global_to_shared(P_d, [ch * 64, 0], bar, P_s.index(stage))
        else:
            mbarrier.expect(bar, 64 * D * 2)
        tma.async_copy_global_to_shared(k_d, [ch * 64, 0], bar, k_s.index(stage))
        stage, phase = next_stage(stage, phase)


@gluon.jit
def store_output(o, o_s, t, begin, end, H, cols):
    """The rows at tokens t that lie in the sequence; o points at the head."""
    inside = ((t >= begin) & (t < end))[:, None]
    gl.store(o + t.to(gl.int64)[:, None] * (H * D) + cols, o_s.load(ROWS), mask=inside)


@gluon.jit
def consume(
    tiles, results, barriers, o, initial, final, states, kept_S, kept_U, slots,
    begin, end, c0, count, token, part, h, n, H,
    INITIAL: gl.constexpr, VALUES: gl.constexpr, OUTPUT: gl.constexpr, STATES: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """The multiplying warps."""
    w_s, q_s, k_s, A_s, P_s, v_s, decay_s = tiles
    o_s, S_s, U_s = results
    early, late, early_free, late_free = barriers
    keys = gl.arange(0, D, layout=gl.SliceLayout(0, STATE))[None, :]
    vals = part * B + gl.arange(0, B, layout=gl.SliceLayout(1, STATE))[:, None]
    state = vals + keys * D
    nh = n.to(gl.int64) * H + h
    if INITIAL == "given":
        S = gl.load(initial + nh * (D * D) + state)
    elif INITIAL == "identity":
        S = gl.where(vals == keys, 1.0, 0.0)
    else:
        S = gl.full([B, D], 0.0, gl.float32, STATE)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    cols = part * B + gl.arange(0, B, layout=gl.SliceLayout(0, ROWS))[None, :]
    zero = gl.full([B, 64], 0.0, gl.float32, CHUNK)
    if OUTPUT:
        o += h * D
    stage = 0
    phase = 0
    for i in range(count):
        ch = ((c0 + i) * H + h).to(gl.int64)
        first = token + i * 64
        S_low = S.to(gl.bfloat16)
        left = gl.convert_layout(S_low, LEFT)
        mbarrier.wait(early.index(stage), phase)
        U = warpgroup_mma(left, w_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        if VALUES:
            v_tile = v_s.index(stage)
            if (first < begin) | (first + 64 > end):
                # Rows of other sequences came along: select them away.
                inside = ((first + rows >= begin) & (first + rows < end))[:, None]
                x = gl.where(inside, v_tile.load(ROWS), 0.0)
                gl.thread_barrier()
                v_tile.store(x)
                fence_async_shared()
                gl.thread_barrier()
            U = warpgroup_mma(v_tile.permute((1, 0)), A_s.index(stage).permute((1, 0)), U, is_async=True)
        if KEEP:
            S_s.store(S_low)
        decay = decay_s.index(stage).load(STATE)
        mbarrier.wait(late.index(stage), phase)
        if OUTPUT:
            out = warpgroup_mma(left, q_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            # The outputs of the chunk before (none for the first: those rows lie before the sequence).
            store_output(o, o_s, first - 64 + rows, begin, end, H, cols)
            U = warpgroup_mma_wait(1, [U])
        else:
            U = warpgroup_mma_wait(0, [U])
        U_low = U.to(gl.bfloat16)
        S = warpgroup_mma(gl.convert_layout(U_low, LEFT_STATE), k_s.index(stage), S * decay, is_async=True)
        if OUTPUT:
            P_tile = P_s.index(stage).permute((1, 0))
            out = warpgroup_mma(gl.convert_layout(U_low, LEFT), P_tile, out, is_async=True)
        if KEEP:
            U_s.store(gl.permute(U_low, (1, 0)))
        gl.thread_barrier()
        mbarrier.arrive(early_free.index(stage))
        if KEEP:
            kv = part * B + gl.arange(0, B, layout=gl.SliceLayout(1, KEYS))[:, None]
            kk = gl.arange(0, D, layout=gl.SliceLayout(0, KEYS))[None, :]
            gl.store(kept_S + ch * (D * D) + (kv * D + kk), S_s.load(KEYS))
            gl.store(kept_U + ch * (64 * D) + (rows[:, None] * D + cols), U_s.load(ROWS))
        if OUTPUT:
            S, out = warpgroup_mma_wait(0, [S, out])
            o_s.store(gl.permute(out.to(gl.bfloat16), (1, 0)))
        else:
            S = warpgroup_mma_wait(0, [S])
        gl.thread_barrier()
        mbarrier.arrive(late_free.index(stage))
        if STATES:
            slot = gl.load(slots + c0 + i)
            if slot >= 0:
                gl.store(states + (slot.to(gl.int64) * H + h) * (D * D) + state, S)
        stage, phase = next_stage(stage, phase)
    if OUTPUT:
        store_output(o, o_s, token + (count - 1) * 64 + rows, begin, end, H, cols)
    gl.store(final + nh * (D * D) + state, S)


@gluon.jit
def scan_hopper_kernel(
    w_d, q_d, k_d, A_d, P_d, v_d, decay_d, o, initial, final, states, kept_S, kept_U, first_chunk, cu, shift, slots, H,
    INITIAL: gl.constexpr, VALUES: gl.constexpr, OUTPUT: gl.constexpr, STATES: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Arguments as `triton_scan.scan_kernel`; ..._d: tensor descriptors of one chunk's tile in [rows, columns]."""
    part, h, n, begin, end, c0, count, token = place(first_chunk, cu, shift, H)

    w_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, D], TILE)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, D], TILE)
    decay_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, D], LINE)
    # What is not used stands for something that is.
    v_s = w_s
    A_s = w_s
    q_s = k_s
    P_s = k_s
    o_s = k_s
    S_s = k_s
    U_s = k_s
    if VALUES:
        v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, B], TILE)
        A_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], TILE)
    if OUTPUT:
        q_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, D], TILE)
        P_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], TILE)
        o_s = gl.allocate_shared_memory(gl.bfloat16, [64, B], TILE)
    if KEEP:
        S_s = gl.allocate_shared_memory(gl.bfloat16, [B, D], TILE)
        U_s = gl.allocate_shared_memory(gl.bfloat16, [64, B], TILE)
    barriers = make_barriers()
    tiles = (w_s, q_s, k_s, A_s, P_s, v_s, decay_s)
    results = (o_s, S_s, U_s)
    gl.warp_specialize(
        [
            (consume, (tiles, results, barriers, o, initial, final, states, kept_S, kept_U, slots,
                       begin, end, c0, count, token, part, h, n, H, INITIAL, VALUES, OUTPUT, STATES, KEEP)),
            (produce, (w_d, q_d, k_d, A_d, P_d, v_d, decay_d, tiles, barriers, c0, count, token, h * D + part * B, h, H,
                       VALUES, OUTPUT)),
        ],
        [1],
        [24],
    )  # fmt: skip


def descriptors(p: Prepared, v: torch.Tensor) -> list[TensorDescriptor]:
    """Of one chunk's tile each: w, q~, k-, A beta, P, v and e^(G_C), in the kernel's order."""
    X, H, C, K = p.w.shape
    T, _, V = v.shape
    wide = [TensorDescriptor(t, [X * H * C, K], [K, 1], [C, K], TILE.value) for t in (p.w, p.q, p.k)]
    square = [TensorDescriptor(t, [X * H * C, C], [C, 1], [C, C], TILE.value) for t in (p.A, p.P)]
    values = TensorDescriptor(v, [T, H * V], [v.stride(0), 1], [C, B.value], TILE.value)
    decay = TensorDescriptor(p.decay, [X * H, K], [K, 1], [1, K], LINE.value)
    return [*wide, *square, values, decay]


__all__ = ["descriptors", "scan_hopper_kernel"]
