"""Between prefill and the tail form: a tail from what a prefill was given, and a state from a tail.

`tail_fill_inplace` solves the chunk's triangular system for all sequences at once, as the chunk form does; the
entries agree with those of decode steps to rounding (fp32), not to the bit.

Legend as in decode_call.py; B chunk-heads (N * H), c rows of a chunk (64).
"""

from __future__ import annotations

import torch

from perilune.config import Gate
from perilune.ops.kda.decay import decays
from perilune.ops.kda.decode_call import BLOCK, CAPACITY, CENTRE, GRID, Tail, check_index, check_tail
from perilune.ops.kda.prepare import prepare
from perilune.ops.kda.scores import scores
from perilune.ops.kda.table import chunk_table
from perilune.ops.sequences import Sequences


def tail_state(
    matrix_SHKV: torch.Tensor,
    tail: Tail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    gate: Gate,
    matrices_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """[N, H, K, V] in the matrix's dtype: each sequence's state after its lengths_N[n] (0..71) entries.

    What a prefill that goes on from a tail takes as its initial state. With no entries, the matrix itself. Padding
    (slot -1) gives zeros. Nothing is written; no host synchronisation.
    """
    wide = matrix_SHKV.dtype
    slot_N = slots_N.clamp(min=0).long()
    length_N1 = lengths_N.long()[:, None]
    # Log decay over each 16-entry block, up to the last entry, and over the blocks after it.
    starts_B = torch.arange(0, CAPACITY, BLOCK, device=slots_N.device)
    ends_NB = torch.minimum(starts_B + BLOCK, length_N1) - 1
    g_NHBK = tail.g_SHRK[slot_N[:, None], :, ends_NB.clamp(min=0)].transpose(1, 2).to(wide)
    total_NHBK = torch.where((starts_B < length_N1)[:, None, :, None], g_NHBK, 0.0)
    after_NHBK = total_NHBK.flip(2).cumsum(2).flip(2)
    rows_R = torch.arange(CAPACITY, device=slots_N.device)
    alive_NHR1 = (rows_R < length_N1)[:, None, :, None]
    shift_NHRK = after_NHBK[:, :, rows_R // BLOCK]
    shift_NHRK = shift_NHRK + CENTRE if gate.mode == "safe" else shift_NHRK - tail.g_SHRK[slot_N].to(wide)
    # Selected, not multiplied by a mask: dead entries may hold anything.
    keys_NHRK = torch.where(alive_NHR1, tail.k_SHRK[slot_N].to(wide) * shift_NHRK.exp(), 0.0)
    u_NHRV = torch.where(alive_NHR1, tail.u_SHRV[slot_N].to(wide), 0.0)
    matrix_N = slot_N if matrices_N is None else matrices_N.clamp(min=0).long()
    S_NHKV = matrix_SHKV[matrix_N] * after_NHBK[:, :, 0, :, None].exp() + keys_NHRK.transpose(2, 3) @ u_NHRV
    return torch.where((slots_N >= 0)[:, None, None, None], S_NHKV, 0.0)


def tail_fill_inplace(
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_raw_THK: torch.Tensor,
    beta_logit_TH: torch.Tensor,
    A_log_H: torch.Tensor,
    dt_bias_HK: torch.Tensor,
    gate: Gate,
    matrix_SHKV: torch.Tensor,
    tail: Tail,
    slots_N: torch.Tensor,
    sequences: Sequences,
    matrices_N: torch.Tensor | None = None,
) -> None:
    """Write the entries of a prefill's tokens past the last multiple of 64 of each document.

    k, v, g_raw, beta_logit, A_log, dt_bias, sequences: as given to `kda`. The matrix of a sequence that passed a
    multiple of 64 is its state there (a checkpoint of that `kda` call); one that did not keeps its matrix and the
    start % 64 entries of its tail, and the new ones follow them. Afterwards a tail has (start + length) % 64 entries.
    slots_N: int32 [N], every one a slot: no padding here. No host synchronisation.
    """
    N, (_, H, K), V = sequences.count, k_THK.shape, v_THV.shape[2]
    check_tail(tail, tail.k_SHRK.shape[0], H, K, V)
    check_index("slots_N", slots_N, N, k_THK.device)
    rows: list[int] = []
    lengths: list[int] = []
    starts: list[int] = []
    for offset, start, length in zip(sequences.offsets, sequences.starts, sequences.lengths, strict=False):
        begin = max((start + length) // GRID * GRID, start)
        rows += range(offset + begin - start, offset + length)
        lengths.append(start + length - begin)
        starts.append(begin % GRID)
    rest = Sequences(tuple(lengths), tuple(starts), k_THK.device)
    if not rest.total:
        return
    row_T = torch.tensor(rows, device=k_THK.device)
    raw = (k_THK[row_T], k_THK[row_T], g_raw_THK[row_T], beta_logit_TH[row_T])
    _, k_THK, g_THK, beta_TH = prepare(*raw, A_log_H, dt_bias_HK, gate)
    held_N = torch.tensor(starts, dtype=torch.int32, device=k_THK.device)
    S_NHKV = tail_state(matrix_SHKV, tail, held_N, slots_N, gate, matrices_N).to(k_THK.dtype)
    u_THV = _writes(k_THK, v_THV[row_T].to(k_THK.dtype), g_THK, beta_TH, S_NHKV, rest, gate.lower_bound)

    slot_T, entry_T = slots_N.long()[rest.ids_T], rest.positions_T
    # Log decay from the start of each token's block: the entries already there come first.
    local_THK = _running(g_THK, rest, slot_T, entry_T, tail)
    stored_THK = k_THK * (-CENTRE - local_THK).exp() if gate.mode == "safe" else k_THK
    for ring, new in ((tail.k_SHRK, stored_THK), (tail.u_SHRV, u_THV), (tail.g_SHRK, local_THK)):
        ring[slot_T, :, entry_T] = new.to(ring.dtype)


def _writes(
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    S_NHKV: torch.Tensor,
    rest: Sequences,
    bound: float | None,
) -> torch.Tensor:
    """u_THV of sequences that lie within one chunk each: (I + L) u = beta (v - k^ S), as in chunk.py."""
    H, K = k_THK.shape[1:]
    table = chunk_table(rest, H, max(K, v_THV.shape[2]))
    S_BKV = S_NHKV[table.order_N].flatten(0, 1)
    u_RV = v_THV.new_empty(table.rows, v_THV.shape[2])
    low = 0
    for group in table.groups:
        high = low + sum(group.counts) * H
        k_BcK, beta_Bc1 = group.load(k_THK.flatten(0, 1)), group.load(beta_TH.reshape(-1, 1))
        f = decays(group.load(g_THK.flatten(0, 1)), bound)
        L_Bcc = scores(torch.stack((k_BcK, k_BcK)), f)[1] * beta_Bc1
        read_BcV = (k_BcK * f.start_BCK) @ S_BKV[low:high]
        right_BcV = (group.load(v_THV.flatten(0, 1)) - read_BcV) * beta_Bc1
        group.view(u_RV).copy_(torch.linalg.solve_triangular(L_Bcc, right_BcV, upper=False, unitriangular=True))
        low = high
    return table.tokens(u_RV)


def _running(
    g_THK: torch.Tensor, rest: Sequences, slot_T: torch.Tensor, entry_T: torch.Tensor, tail: Tail
) -> torch.Tensor:
    """Sum of g from the start of each token's 16-entry block to the token."""
    H, K = g_THK.shape[1:]
    start_T = torch.tensor(rest.starts, device=g_THK.device)[rest.ids_T]
    held_THK = tail.g_SHRK[slot_T, :, (start_T - 1).clamp(min=0)].to(g_THK.dtype)
    joins_T = (entry_T == start_T) & (start_T % BLOCK != 0)
    local_NcHK = g_THK.new_zeros(rest.count, GRID, H, K)
    local_NcHK[rest.ids_T, entry_T] = g_THK + torch.where(joins_T[:, None, None], held_THK, 0.0)
    local_NcHK = local_NcHK.view(rest.count, -1, BLOCK, H, K).cumsum(2).view(local_NcHK.shape)
    return local_NcHK[rest.ids_T, entry_T]


__all__ = ["tail_fill_inplace", "tail_state"]
