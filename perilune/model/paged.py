"""The model over slot pools and paged rows: prefill pieces, decoding tokens and drafts of many sequences in one call.

Projections, experts and norms run over all tokens at once; token mixing runs group by group. A KDA slot holds a matrix
that is never older than 64 tokens, and a tail of the tokens since (`ops.kda.decode`). A prefill piece leaves the matrix
after its last token, wherever that lies, and an empty tail. MLA decodes in the absorbed form (`ops.mla.paged`).

Legend: T tokens, N sequences of a group, S slots, H heads, K key and value dim, C = 3 H K convolution channels,
M MLA layers, P pages, B rows of a page, W table width, L latent row width, R = rank, Q query width, V value dim,
D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from perilune.model.fused import project
from perilune.model.kda import KdaLayer
from perilune.model.mla import MlaLayer
from perilune.model.paged_static import Static, static_kda
from perilune.model.transformer import Hidden, Stats, Transformer
from perilune.ops.activation import sigmoid
from perilune.ops.conv import short_conv
from perilune.ops.kda import decode
from perilune.ops.mla import append_rows_inplace, choose_split, paged_attention, prefix_attention
from perilune.ops.norm import gated_rms_norm, rms_norm
from perilune.ops.sequences import Sequences

PREFIX_STEP, PREFIX_BYTES = 8192, 1 << 31


@dataclass(frozen=True)
class KdaSlots:
    """One KDA layer's pools: matrix_SHKV fp32 (fp64), window_S3C in the model's dtype, tail."""

    matrix_SHKV: torch.Tensor
    window_S3C: torch.Tensor
    tail: decode.Tail


@dataclass(frozen=True)
class Decoding:
    """Sequences that decode `width` tokens each, rows first .. first + N * width of the batch.

    slots_N: KDA slots, -1 is padding. tail_N: entries in each tail before the step, 0..63. cached_N: rows of each
    sequence, these tokens' included. table_MNW: int32 page ids of each MLA layer. All int32, on the device.
    """

    first: int
    width: int
    slots_N: torch.Tensor
    tail_N: torch.Tensor
    cached_N: torch.Tensor
    table_MNW: torch.Tensor

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.slots_N.shape[0] * self.width)


@dataclass(frozen=True)
class Prefilling:
    """Pieces of prompts, the rows from `first` on. sequences: their lengths and starts. slots_N: int64, no padding.

    exports: of each sequence the positions inside it, on the 64-grid, whose states are wanted.
    static: instead, one piece in a bucket of fixed shapes (`paged_static`); sequences are the bucket's rows then, and
    `PagedBatch.absorbed` attends for it.
    """

    first: int
    sequences: Sequences
    slots_N: torch.Tensor
    table_MNW: torch.Tensor
    exports: tuple[tuple[int, ...], ...] = ()
    static: Static | None = None

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.sequences.total)


@dataclass
class PagedBatch:
    """One step. tokens_T: int64. append_MT: where each layer's row of each token goes, page * B + place; -1 nowhere.

    drafted: filled for each KDA layer and each group wider than 1 with what `accept_inplace` needs.
    exported: filled for each KDA layer with the matrices [E, H, K, V] and windows [E, 3, C] of the exports, in order.
    absorbed: the rows of a static prefill piece as MLA layers see them.
    """

    tokens_T: torch.Tensor
    append_MT: torch.Tensor
    decoding: Sequence[Decoding]
    prefilling: Prefilling | None
    drafted: list[list[decode.Projected]] = field(default_factory=list)
    exported: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    absorbed: Sequence[Decoding] = ()


def paged_hidden(
    model: Transformer,
    batch: PagedBatch,
    slots: Sequence[KdaSlots],
    pages_PBL: torch.Tensor,
    row_scale: float = 1.0,
    stats: Stats | None = None,
) -> Hidden:
    """The normed hidden states of the batch's tokens; pools and pages advance by them.

    slots: pools of the KDA layers in order. Groups of width 1 are committed at once; of wider ones the tails hold all
    tokens, to be settled by `accept_inplace`. Level: tolerance against `Transformer.hidden` (another order of sums).
    """
    batch.drafted.clear()
    batch.exported.clear()
    ranks = {layer: i for kind in (model.config.kda.layers, model.config.mla.layers) for i, layer in enumerate(kind)}

    def attend(index: int, attn: nn.Module, x_TD: torch.Tensor) -> torch.Tensor:
        if isinstance(attn, MlaLayer):
            return _mla(model, attn, x_TD, batch, ranks[index], pages_PBL, row_scale)
        assert isinstance(attn, KdaLayer)
        return _kda(model, attn, x_TD, batch, slots[ranks[index]])

    return model.run(batch.tokens_T, attend, stats=stats)


def accept_inplace(
    batch: PagedBatch, slots: Sequence[KdaSlots], model: Transformer, accepted: Sequence[torch.Tensor]
) -> None:
    """Settle the groups wider than 1: of sequence n of group i the first accepted[i][n] (int32) tokens stay."""
    wide = [group for group in batch.decoding if group.width > 1]
    gate = model.config.kda.gate
    for pool, drafted in zip(slots, batch.drafted, strict=True):
        for group, inputs, accepted_N in zip(wide, drafted, accepted, strict=True):
            decode.shift_window_inplace(inputs, pool.window_S3C, group.slots_N, accepted_N, group.width)
            decode.fold_inplace(pool.matrix_SHKV, pool.tail, group.tail_N + accepted_N, group.slots_N, gate)


def _kda(model: Transformer, attn: KdaLayer, x_TD: torch.Tensor, batch: PagedBatch, pool: KdaSlots) -> torch.Tensor:
    linear, heads, dim = model.parts.linear, attn.heads, attn.dim
    u_TC, f_TK, beta_TH, gate_TX = project(attn, x_TD, linear)
    g_raw_THK = linear(f_TK, attn.f_b_proj.weight).unflatten(-1, (heads, dim))
    if not hasattr(attn, "g_proj"):
        gate_TX = linear(gate_TX, attn.g_b_proj.weight)
    gate_THK = gate_TX.unflatten(-1, (heads, dim))
    weights = _weights(attn)
    outputs, drafted = [], []
    for group in batch.decoding:
        rows = group.rows
        q_THK, k_THK, v_THK = (x.unflatten(-1, (heads, dim)) for x in u_TC[rows].chunk(3, dim=-1))
        inputs = decode.Projected(q_THK, k_THK, v_THK, g_raw_THK[rows], beta_TH[rows], gate_THK[rows])
        state = (pool.matrix_SHKV, pool.window_S3C, pool.tail, group.tail_N, group.slots_N)
        if group.width == 1:
            outputs.append(decode.tail_step_inplace(inputs, weights, *state, target_N=group.slots_N))
        else:
            outputs.append(decode.tail_verify_inplace(inputs, weights, *state, group.width))
            drafted.append(inputs)
    batch.drafted.append(drafted)
    if batch.prefilling is not None and batch.prefilling.static is not None:
        rows, slot = batch.prefilling.rows, batch.prefilling.slots_N
        before = (pool.matrix_SHKV.index_select(0, slot)[0], pool.window_S3C.index_select(0, slot)[0])
        o_THK, matrix_HKV, window_3C, exported = static_kda(
            attn, u_TC[rows], g_raw_THK[rows], beta_TH[rows], *before, batch.prefilling.static
        )
        batch.exported.append((exported[0][None], exported[1][None]))
        pool.matrix_SHKV.index_copy_(0, slot, matrix_HKV[None])
        pool.window_S3C.index_copy_(0, slot, window_3C[None])
        outputs.append(gated_rms_norm(o_THK.to(x_TD.dtype), attn.o_norm_K, gate_THK[rows], attn.eps))
    elif batch.prefilling is not None:
        filling, rows = batch.prefilling, batch.prefilling.rows
        sequences, slots_N, before_N3C = filling.sequences, filling.slots_N, pool.window_S3C[filling.slots_N]
        conv_TC, window_N3C = short_conv(u_TC[rows], attn.conv_CW, sequences, before_N3C)
        q_THK, k_THK, v_THK = (x.unflatten(-1, (heads, dim)) for x in conv_TC.chunk(3, dim=-1))
        o_THK, matrix_NHKV, *states = model.parts.kda(
            q_THK,
            k_THK,
            v_THK,
            g_raw_THK[rows],
            beta_TH[rows].contiguous(),
            attn.A_log_H,
            attn.dt_bias_HK,
            attn.gate,
            pool.matrix_SHKV[slots_N],
            sequences,
            filling.exports if any(filling.exports) else None,
        )
        if states:
            batch.exported.append((states[0], _windows(u_TC[rows], before_N3C, filling)))
        pool.matrix_SHKV[slots_N], pool.window_S3C[slots_N] = matrix_NHKV, window_N3C
        outputs.append(gated_rms_norm(o_THK.to(x_TD.dtype), attn.o_norm_K, gate_THK[rows], attn.eps))
    o_THK = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return linear(o_THK.flatten(-2), attn.o_proj.weight)


def _windows(u_TC: torch.Tensor, before_N3C: torch.Tensor, filling: Prefilling) -> torch.Tensor:
    """[E, 3, C]: the last three convolution inputs before each export, perhaps from before the piece."""
    windows, sequences = [], filling.sequences
    for n, positions in enumerate(filling.exports):
        begin = sequences.offsets[n]
        for position in positions:
            past = position - sequences.starts[n]
            new_TC = u_TC[begin + max(past - 3, 0) : begin + past]
            windows.append(torch.cat([before_N3C[n, new_TC.shape[0] :], new_TC]))
    return torch.stack(windows)


def _weights(attn: KdaLayer) -> decode.Weights:
    q_CW, k_CW, v_CW = attn.conv_CW.chunk(3)
    return decode.Weights(q_CW, k_CW, v_CW, attn.A_log_H, attn.dt_bias_HK, attn.o_norm_K, attn.eps, attn.gate)


def _mla(
    model: Transformer,
    attn: MlaLayer,
    x_TD: torch.Tensor,
    batch: PagedBatch,
    rank: int,
    pages_PBL: torch.Tensor,
    row_scale: float,
) -> torch.Tensor:
    parts, linear = model.parts, model.parts.linear
    q_TX, latent_TL, *gate_TX = project(attn, x_TD, linear)
    if not hasattr(attn, "q_proj"):
        q_TX = linear(rms_norm(q_TX, attn.q_a_norm, attn.eps), attn.q_b_proj.weight)
    q_THQ = q_TX.unflatten(-1, (attn.heads, attn.nope + attn.rope))
    c_TR, k_rope_TO = latent_TL.split([attn.rank, attn.rope], dim=-1)
    rows_TL = torch.cat([rms_norm(c_TR, attn.kv_a_norm, attn.eps), k_rope_TO], dim=-1)
    append_rows_inplace(pages_PBL, rows_TL, batch.append_MT[rank], row_scale=row_scale)
    outputs, groups = [], [*batch.decoding, *batch.absorbed]
    if groups:
        kv_b_HXR = attn.kv_b_proj.weight.unflatten(0, (attn.heads, attn.nope + attn.v_dim))
        to_key_HPR, to_value_HVR = kv_b_HXR.split([attn.nope, attn.v_dim], dim=1)
    for group in groups:
        q_nope_THP, q_rope_THO = q_THQ[group.rows].split([attn.nope, attn.rope], dim=-1)
        q_latent_THR = torch.einsum("thp,hpr->thr", q_nope_THP, to_key_HPR)
        table_NW = group.table_MNW[rank]
        # A CUDA graph is captured for one count and table width, so its split is one of its constants.
        split = choose_split(table_NW.shape[0], table_NW.shape[1] * pages_PBL.shape[1], group.width * attn.heads)
        o_THR, _ = paged_attention(
            torch.cat([q_latent_THR, q_rope_THO], dim=-1),
            pages_PBL,
            table_NW,
            group.cached_N,
            attn.scale,
            group.width,
            rank=attn.rank,
            row_scale=row_scale,
            split=split,
        )
        outputs.append(torch.einsum("thr,hvr->thv", o_THR, to_value_HVR))
    if batch.prefilling is not None and batch.prefilling.static is None:
        rows = batch.prefilling.rows
        expand = partial(attn.keys_values, parts=parts)
        k_THQ, v_THV = expand(rows_TL[rows])
        o_THV, _ = prefix_attention(
            q_THQ[rows],
            k_THQ,
            v_THV,
            batch.prefilling.sequences,
            pages_PBL,
            batch.prefilling.table_MNW[rank],
            expand,
            attn.scale,
            piece=prefix_piece(batch.prefilling.sequences.count, attn),
            row_scale=row_scale,
        )
        outputs.append(o_THV)
    o_TX = (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(-2)
    if gate_TX:
        o_TX = o_TX * sigmoid(gate_TX[0])
    return linear(o_TX, attn.o_proj.weight)


def prefix_piece(sequences: int, attn: MlaLayer) -> int:
    """Cached rows of each sequence that are expanded at a time: many, since what attention to each piece gives has to
    be merged, but `PREFIX_BYTES` of keys and values together."""
    row_bytes = attn.heads * (attn.nope + attn.rope + attn.v_dim) * 2
    return max(PREFIX_STEP, PREFIX_BYTES // (sequences * row_bytes) // PREFIX_STEP * PREFIX_STEP)


__all__ = ["Decoding", "KdaSlots", "PagedBatch", "Prefilling", "accept_inplace", "paged_hidden", "prefix_piece"]
