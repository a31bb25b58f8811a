"""KDA decode with the arithmetic of prefill: outputs and states equal those of `kda` bit for bit.

The tail keeps the convolved inputs of the tokens since the boundary (k, v, raw gate, beta logit) in place of solved
entries, and a token's output is that of its row when the chunk is computed again from the boundary matrix, by the same
`short_conv`, `kda` and `gated_rms_norm` as prefill. Rows of a chunk do not depend on later rows, not even by rounding,
so rows that are not there yet do no harm. A step costs a prefill of 64 tokens a sequence: for audits, for reproducible
sampling and for training on what was sampled, not for speed. It holds where prefill is bitwise-batch itself: the
serial scan, on a CPU or with one kernel on a GPU.

A raw tail takes 2 (2K + V) + 2 bytes a token and head in bf16 (770 for K = V = 128; fp32 entries: 1536).

No host synchronisation. Not for CUDA graphs: `kda` and `short_conv` keep the index tensors of the last few cuts only.

Legend as in decode_call.py; C rows of one or two chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perilune.ops.conv import short_conv
from perilune.ops.kda import kda
from perilune.ops.kda.decode_call import CAPACITY, GRID, Call, Projected, Weights, check_index
from perilune.ops.norm import gated_rms_norm
from perilune.ops.sequences import Sequences


@dataclass(frozen=True)
class RawTail:
    """What `kda` is given for the tokens since the boundary: k_SRHK, v_SRHV, g_raw_SRHK, beta_logit_SRH.

    One slot more than asked for: the last one takes what padding writes.
    """

    k_SRHK: torch.Tensor
    v_SRHV: torch.Tensor
    g_raw_SRHK: torch.Tensor
    beta_logit_SRH: torch.Tensor

    @classmethod
    def empty(
        cls,
        slots: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> RawTail:
        """Room for 71 tokens in each of `slots` slots, in the dtype of the inputs."""
        shape = (slots + 1, CAPACITY, heads)
        return cls(*(torch.zeros(*shape, *dim, dtype=dtype, device=device) for dim in _dims(key_dim, value_dim)))

    def fill_inplace(
        self,
        k_THK: torch.Tensor,
        v_THV: torch.Tensor,
        g_raw_THK: torch.Tensor,
        beta_logit_TH: torch.Tensor,
        slots_N: torch.Tensor,
        sequences: Sequences,
    ) -> None:
        """Keep a prefill's tokens past the last multiple of 64 of each document; the arguments are those of `kda`.

        A sequence that passes no multiple of 64 keeps the tokens it has. slots_N: no padding here.
        """
        boundary_N = torch.tensor(
            [(a + n) // GRID * GRID for a, n in zip(sequences.starts, sequences.lengths, strict=True)],
            device=k_THK.device,
        )
        entry_T = sequences.positions_T - boundary_N[sequences.ids_T]
        # Tokens before the boundary go to the spare slot.
        slot_T = torch.where(entry_T >= 0, slots_N.long()[sequences.ids_T], len(self.k_SRHK) - 1)
        for ring, new in zip(vars(self).values(), (k_THK, v_THV, g_raw_THK, beta_logit_TH), strict=True):
            ring[slot_T, entry_T.clamp(min=0)] = new.to(ring.dtype)


def exact_step_inplace(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    raw: RawTail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    target_N: torch.Tensor | None = None,
    matrices_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """`tail_step_inplace` with the bits of prefill: appends to the raw tail, moves the window, folds a full tail.

    The fold happens always: target_N defaults to where the matrices lie. Returns o_THV.
    """
    call = Call(inputs, weights, matrix_SHKV, window_S3C, slots_N, counts_N=lengths_N, matrices_N=matrices_N)
    o_THV, final_NHKV, window_N3C = _run(call, raw, fold=True)
    live_N = slots_N >= 0
    _write(window_S3C, slots_N, live_N, window_N3C)
    _write(matrix_SHKV, _targets(call, target_N), live_N & (lengths_N + 1 == GRID), final_NHKV)
    return o_THV


def exact_verify_inplace(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    raw: RawTail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    drafts: int,
    matrices_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """`tail_verify_inplace` with the bits of prefill: `drafts` (1..8) tokens join the raw tail, nothing else moves.

    Accepting a tokens is adding a to lengths_N[n] and one `shift_window_inplace`. Returns o_THV.
    """
    pool = (inputs, weights, matrix_SHKV, window_S3C, slots_N)
    return _run(Call(*pool, drafts, counts_N=lengths_N, matrices_N=matrices_N), raw, fold=False)[0]


def exact_fold_inplace(
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    raw: RawTail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    target_N: torch.Tensor | None = None,
    matrices_N: torch.Tensor | None = None,
) -> None:
    """`fold_inplace` with the bits of prefill: where lengths_N[n] >= 64, 64 tokens go into the matrix."""
    where_N = slots_N if matrices_N is None else matrices_N
    rows = [ring[slots_N.long(), :GRID] for ring in vars(raw).values()]
    full_N = (slots_N >= 0) & (lengths_N >= GRID)
    *_, final_NHKV = _chunk(weights, torch.zeros_like(rows[0]), rows, full_N * GRID, matrix_SHKV, where_N)
    _write(matrix_SHKV, where_N if target_N is None else target_N, full_N, final_NHKV)
    for ring in vars(raw).values():
        rest = ring[slots_N.long(), GRID:]
        ring[slots_N.long(), : CAPACITY - GRID] = torch.where(
            _like(full_N, rest), rest, ring[slots_N.long(), : CAPACITY - GRID]
        )


def _run(call: Call, raw: RawTail, fold: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """o_THV, the states after the chunk (of meaning where `fold` and the tail is full), the windows after the call."""
    call.check()
    x, w, N, d = call.inputs, call.weights, len(call.slots_N), call.tokens
    assert call.counts_N is not None
    check_index("slots_N", call.slots_N, N, x.q_THK.device)
    live_N, slot_N = call.slots_N >= 0, call.slots_N.long()
    window_N3C = torch.where(live_N[:, None, None], call.window_S3C[slot_N.clamp(min=0)], 0.0)
    u_TC = torch.cat([y.flatten(1) for y in (x.q_THK, x.k_THK, x.v_THV)], 1)
    taps_CW = torch.cat([w.conv_q_CW, w.conv_k_CW, w.conv_v_CW])
    cut = Sequences.from_lengths([d] * N, device=u_TC.device)
    y_TC, after_N3C = short_conv(u_TC, taps_CW, cut, window_N3C.to(u_TC.dtype))
    (_, heads, K), V = x.q_THK.shape, x.v_THV.shape[2]
    q_TC, k_TC, v_TC = y_TC.split([heads * K, heads * K, heads * V], 1)
    new = (k_TC.unflatten(1, (heads, K)), v_TC.unflatten(1, (heads, V)), x.g_raw_THK, x.beta_logit_TH)

    entry_Nd = call.counts_N.long()[:, None] + torch.arange(d, device=u_TC.device)
    for ring, tokens in zip(vars(raw).values(), new, strict=True):
        ring[slot_N[:, None], entry_Nd] = tokens.unflatten(0, (N, d)).to(ring.dtype)  # slot -1 is the spare one
    # One chunk holds a single token's tail; drafts may reach into a second one.
    rows_C = torch.arange(GRID if d == 1 else 2 * GRID, device=u_TC.device)
    rows = [ring[slot_N[:, None], rows_C.clamp(max=CAPACITY - 1)] for ring in vars(raw).values()]
    q_NCHK = torch.zeros_like(rows[0])
    q_NCHK.scatter_(1, entry_Nd[:, :, None, None].expand(-1, -1, heads, K), q_TC.reshape(N, d, heads, K))
    count_N = torch.where(live_N, call.counts_N + d, 0)
    where_N = call.slots_N if call.matrices_N is None else call.matrices_N
    o_NCHV, final_NHKV = _chunk(w, q_NCHK, rows, count_N, call.matrix_SHKV, where_N)
    o_THV = o_NCHV.gather(1, entry_Nd[:, :, None, None].expand(-1, -1, heads, V)).flatten(0, 1)
    o_THV = gated_rms_norm(o_THV, w.norm_V, x.out_gate_THV.to(o_THV.dtype), w.eps)
    return torch.where(_like(live_N.repeat_interleave(d), o_THV), o_THV, 0.0), final_NHKV, after_N3C


def _chunk(
    weights: Weights,
    q_NCHK: torch.Tensor,
    rows: list[torch.Tensor],
    count_N: torch.Tensor,
    matrix_SHKV: torch.Tensor,
    where_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o_NCHV and final_NHKV of `kda` over the tails' rows; rows from count_N[n] on are zeros."""
    N, C = q_NCHK.shape[:2]
    real_NC = torch.arange(C, device=q_NCHK.device) < count_N[:, None]
    k, v, g, beta = (torch.where(_like(real_NC, x), x, 0.0).flatten(0, 1) for x in rows)
    initial_NHKV = torch.where(_like(where_N >= 0, matrix_SHKV), matrix_SHKV[where_N.long().clamp(min=0)], 0.0)
    cut = Sequences.from_lengths([C] * N, device=q_NCHK.device)
    gates = (weights.A_log_H, weights.dt_bias_HK.view(q_NCHK.shape[2:]), weights.gate)
    o_THV, final_NHKV = kda(q_NCHK.flatten(0, 1), k, v, g, beta, *gates, initial_NHKV, cut)
    return o_THV.unflatten(0, (N, C)), final_NHKV


def _targets(call: Call, target_N: torch.Tensor | None) -> torch.Tensor:
    if target_N is not None:
        return target_N
    return call.slots_N if call.matrices_N is None else call.matrices_N


def _write(pool_Sn: torch.Tensor, index_N: torch.Tensor, take_N: torch.Tensor, new_Nn: torch.Tensor) -> None:
    """pool[index[n]] = new[n] where take[n], without a host synchronisation and without touching other slots.

    Sequences that do not take part repeat the write of one that does, or put back what slot 0 holds if none does.
    """
    N = len(index_N)
    source_N = torch.where(take_N, torch.arange(N, device=index_N.device), take_N.long().argmax())
    slot_N = torch.where(take_N[source_N], index_N[source_N].long(), 0)
    pool_Sn[slot_N] = torch.where(_like(take_N[source_N], pool_Sn), new_Nn[source_N].to(pool_Sn.dtype), pool_Sn[slot_N])


def _like(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The mask with as many trailing dims of 1 as x has more dims."""
    return mask.view(*mask.shape, *[1] * (x.dim() - mask.dim()))


def _dims(K: int, V: int) -> tuple[tuple[int, ...], ...]:
    return (K,), (V,), (K,), ()


__all__ = ["RawTail", "exact_fold_inplace", "exact_step_inplace", "exact_verify_inplace"]
