"""KDA in chunks of 64 tokens: the vectorised form that trains on a CPU, with its backward written out.

With G the running sum of g in a chunk, S the state before it, and e^(G_i - G_j) inside the sums over channels c:
    L_ij = beta_i sum_c k_ic k_jc e^(G_ic - G_jc)  (j < i)      P_ij = sum_c q_ic k_jc e^(G_ic - G_jc)  (j <= i)
    [w | u] = (I + L)^-1 [beta k e^G | beta v]                  U = u - w S
    O = (q e^G) S + P U                                         S' = e^(G_C) S + (k e^(G_C - G))^T U
Backward, dS' being the gradient of S' (derived from the above; no gradient of the inverse is needed):
    dU = P^T dO + (k e^(G_C - G)) dS'      dR = (I + L)^-T dU    dS = e^(G_C) dS' + (q e^G)^T dO - w^T dU
    dv = beta dR     dL = -stril(dR U^T)   dP = tril(dO U^T)     dbeta_t = (dR_t . U_t) / beta_t
The diagonal of P does not depend on G: it reaches dq and dk apart and never enters dg, where it would be the
difference of two equal large terms.

The serial loop over chunk steps holds every sequence and head at once; sequences that have no more chunks drop off its
end. Everything else is done for a group of steps at a time (see `table`), forward and backward. Every matrix product
has a fixed shape per chunk and head, so on CPU a token's bits depend on its document's tokens up to it and on nothing
else in the batch. Rows without a
token are zeros and change nothing.

Legend: T tokens, N sequences, H heads, K key dim, V value dim, R = T * H, C rows of a chunk (64), B chunk-heads of a
group, A sequence-heads alive at a step. Source: Kimi Linear (arXiv:2510.26692), section 3 and the
WY form of DeltaNet (arXiv:2406.06484).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from perilune.ops.kda.decay import CHUNK, decays, ones_below, running_sum
from perilune.ops.kda.scores import both, scores, scores_back
from perilune.ops.kda.table import ChunkTable, Group, check_checkpoints, checkpoint_marks, chunk_table
from perilune.ops.sequences import Sequences


def chunk(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    initial_NHKV: torch.Tensor | None,
    sequences: Sequences,
    gate_bound: float | None,
    checkpoints: tuple[tuple[int, ...], ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Chunked KDA on activated inputs (see `prepare`), all in one dtype, fp32 or fp64.

    gate_bound: a number that every g is at or above (nats), or None when there is none.
    checkpoints: per sequence, absolute positions (multiples of 64) whose states are wanted.
    Returns o_THV, final_NHKV and the states [number of checkpoints, H, K, V] in the order given (None without).
    Differentiable once; the gradient of beta is taken as 0 where beta is exactly 0.
    Level: bitwise-batch on CPU; a cut at a multiple of 64 is bitwise the same as no cut.
    """
    if checkpoints is not None:
        check_checkpoints(sequences, checkpoints)
    H, K, V = q_THK.shape[1], q_THK.shape[2], v_THV.shape[2]
    table = chunk_table(sequences.to(q_THK.device), H, max(K, V))
    marks = None if checkpoints is None else checkpoint_marks(sequences, table, checkpoints)
    if initial_NHKV is None:
        initial_NHKV = q_THK.new_zeros(sequences.count, H, K, V)
    o_THV: torch.Tensor
    o_THV, final_NHKV, states = _Chunk.apply(  # type: ignore[no-untyped-call]
        q_THK, k_THK, v_THV, g_THK, beta_TH, initial_NHKV, table, gate_bound, marks or ()
    )
    return o_THV, final_NHKV, None if marks is None else states


class _Rows(NamedTuple):
    """Inputs with tokens and heads merged: q, k, g [R, K], v [R, V], beta [R, 1]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


class _Saved(NamedTuple):
    """What the backward of a group needs beside the inputs: P and L, w, U, and the state before each chunk."""

    PL_2BCC: torch.Tensor
    w_BCK: torch.Tensor
    U_BCV: torch.Tensor
    S_BKV: torch.Tensor


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THK: torch.Tensor,
        k_THK: torch.Tensor,
        v_THV: torch.Tensor,
        g_THK: torch.Tensor,
        beta_TH: torch.Tensor,
        initial_NHKV: torch.Tensor,
        table: ChunkTable,
        gate_bound: float | None,
        marks: tuple[tuple[int, int], ...],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        H, V = q_THK.shape[1], v_THV.shape[2]
        x = _Rows(*(y.flatten(0, 1) for y in (q_THK, k_THK, v_THV, g_THK, beta_TH.unsqueeze(-1))))
        o_RV = q_THK.new_empty(table.rows, V)
        final_AKV = initial_NHKV[table.order_N].flatten(0, 1)
        kept: dict[tuple[int, int], torch.Tensor] = {}
        saved: list[torch.Tensor] = []
        S_AKV = final_AKV
        for group in table.groups:
            parts, after = _forward_group(x, group, S_AKV, gate_bound, o_RV)
            if any(ctx.needs_input_grad):
                saved += parts
            for n, below, S_AKV in zip(group.counts, (*group.counts[1:], 0), after, strict=True):
                final_AKV[below * H : n * H] = S_AKV[below * H :]
            for step, rank in marks:
                if group.first <= step < group.first + len(group.counts):
                    kept[step, rank] = after[step - group.first].unflatten(0, (-1, H))[rank]
        final_NHKV = torch.empty_like(initial_NHKV)
        final_NHKV[table.order_N] = final_AKV.view(initial_NHKV.shape)
        ctx.save_for_backward(*x, *saved)
        ctx.table, ctx.gate_bound, ctx.marks = table, gate_bound, marks
        states = torch.stack([kept[mark] for mark in marks]) if marks else initial_NHKV[:0].clone()
        return table.tokens(o_RV), final_NHKV, states

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        do_THV, dfinal_NHKV, dstates = grads
        table: ChunkTable = ctx.table
        tensors = ctx.saved_tensors
        x, saved = _Rows(*tensors[:5]), tensors[5:]
        do_RV = do_THV.flatten(0, 1)
        out = _Rows(*(do_THV.new_empty(table.rows, n) for n in (y.shape[1] for y in x)))
        dfinal_AKV = dfinal_NHKV[table.order_N].flatten(0, 1)
        dS_AKV = dfinal_AKV[:0]
        for i, group in reversed(list(enumerate(table.groups))):
            pulls: dict[int, list[tuple[int, torch.Tensor]]] = {}
            for (step, rank), dS in zip(ctx.marks, dstates, strict=True):
                pulls.setdefault(step - group.first, []).append((rank, dS))
            parts = _Saved(*saved[i * len(_Saved._fields) : (i + 1) * len(_Saved._fields)])
            dS_AKV = _backward_group(x, group, parts, do_RV, dS_AKV, dfinal_AKV, pulls, ctx.gate_bound, out)
        dinitial_AKV = torch.cat((dS_AKV, dfinal_AKV[len(dS_AKV) :]))
        dinitial_NHKV = torch.empty_like(dfinal_NHKV)
        dinitial_NHKV[table.order_N] = dinitial_AKV.view(dfinal_NHKV.shape)
        dq, dk, dv, dg, dbeta = (table.tokens(y) for y in out)
        return dq, dk, dv, dg, dbeta.squeeze(-1), dinitial_NHKV, None, None, None


def _forward_group(
    x: _Rows, group: Group, S_AKV: torch.Tensor, gate_bound: float | None, o_RV: torch.Tensor
) -> tuple[_Saved, list[torch.Tensor]]:
    """Writes the group's outputs into o_RV; returns what to save and the states after each step."""
    qk_2BCK, beta_BC1 = _load_qk(x, group), group.load(x.beta)
    K, V = x.q.shape[1], x.v.shape[1]
    f = decays(group.load(x.g), gate_bound)
    PL_2BCC = scores(qk_2BCK, f)
    PL_2BCC[1] *= beta_BC1
    qk_start_2BCK = qk_2BCK * f.start_BCK
    right = torch.cat((qk_start_2BCK[1], group.load(x.v)), dim=-1).mul_(beta_BC1)
    wu = torch.linalg.solve_triangular(PL_2BCC[1], right, upper=False, unitriangular=True)
    w_BCK, u_BCV = wu.split((K, V), dim=-1)
    k_rest_BCK = qk_2BCK[1] * f.rest_BCK
    whole_BK1 = f.whole_BK.unsqueeze(-1)

    heads = len(k_rest_BCK) // sum(group.counts)
    before, after, writes, low = [], [], [], 0
    for n in group.counts:
        here = slice(low, low + n * heads)
        low += n * heads
        before.append(S_AKV[: n * heads])
        writes.append(torch.baddbmm(u_BCV[here], w_BCK[here], before[-1], alpha=-1))
        S_AKV = torch.baddbmm(before[-1] * whole_BK1[here], k_rest_BCK[here].mT, writes[-1])
        after.append(S_AKV)
    U_BCV, S_BKV = torch.cat(writes), torch.cat(before)
    torch.baddbmm(torch.bmm(PL_2BCC[0], U_BCV), qk_start_2BCK[0], S_BKV, out=group.view(o_RV))
    return _Saved(PL_2BCC, w_BCK, U_BCV, S_BKV), after


def _backward_group(
    x: _Rows,
    group: Group,
    saved: _Saved,
    do_RV: torch.Tensor,
    dS_AKV: torch.Tensor,
    dfinal_AKV: torch.Tensor,
    pulls: dict[int, list[tuple[int, torch.Tensor]]],
    gate_bound: float | None,
    out: _Rows,
) -> torch.Tensor:
    """Writes the group's input gradients into `out`; takes and returns the gradient of the states around the group.

    pulls: for each step, the gradients of states that were returned after it, by rank.
    """
    (P_BCC, L_BCC), w_BCK, U_BCV, S_BKV = saved
    qk_2BCK, beta_BC1 = _load_qk(x, group), group.load(x.beta)
    q_BCK, k_BCK = qk_2BCK
    f = decays(group.load(x.g), gate_bound)
    k_rest_BCK, whole_BK1 = k_BCK * f.rest_BCK, f.whole_BK.unsqueeze(-1)
    # Row gradients of q (dO) and of k (-beta dR), side by side as q and k are.
    pull_2BCV = x.v.new_empty(2, *U_BCV.shape)
    do_BCV = group.load(do_RV, out=pull_2BCV[0].flatten(0, 1))
    dU_BCV = torch.bmm(P_BCC.mT, do_BCV)
    read_BKV = torch.bmm((q_BCK * f.start_BCK).mT, do_BCV)

    heads = len(U_BCV) // sum(group.counts)
    after, writes, high = [], [], len(U_BCV)
    for step, n in reversed(list(enumerate(group.counts))):
        here = slice(high - n * heads, high)
        high -= n * heads
        # Sequences whose last chunk this is join with the gradient of their final state.
        dS_AKV = torch.cat((dS_AKV, dfinal_AKV[len(dS_AKV) : n * heads])) if len(dS_AKV) < n * heads else dS_AKV
        for rank, dS_HKV in pulls.get(step, []):
            dS_AKV[rank * heads : (rank + 1) * heads] += dS_HKV
        after.append(dS_AKV)
        writes.append(torch.baddbmm(dU_BCV[here], k_rest_BCK[here], dS_AKV))
        dS_AKV = torch.addcmul(read_BKV[here], dS_AKV, whole_BK1[here])
        dS_AKV = torch.baddbmm(dS_AKV, w_BCK[here].mT, writes[-1], alpha=-1)
    dU_BCV, dS_BKV = torch.cat(writes[::-1]), torch.cat(after[::-1])

    dR_BCV = torch.linalg.solve_triangular(L_BCC.mT, dU_BCV, upper=True, unitriangular=True)
    dbeta_BC1 = (dR_BCV * U_BCV).sum(-1, keepdim=True)
    group.view(out.beta).copy_(torch.where(beta_BC1 != 0, dbeta_BC1 / beta_BC1, 0.0))
    dv_BCV = torch.mul(dR_BCV, beta_BC1, out=group.view(out.v))
    torch.neg(dv_BCV, out=pull_2BCV[1])

    dscores_2BCC = both(pull_2BCV, U_BCV.mT)
    rows_2BCK = both(pull_2BCV, S_BKV.mT).mul_(f.start_BCK)
    columns_BCK = torch.zeros_like(k_BCK)
    scores_back(dscores_2BCC, qk_2BCK, f, rows_2BCK, columns_BCK)
    rest_BCK = torch.bmm(U_BCV, dS_BKV.mT).mul_(f.rest_BCK)

    # A gate acts on what rows at or after it read from before it (rows minus columns, summed from below), on what
    # earlier rows leave to the next chunk, and on what the state before the chunk leaves to the next one.
    dq_BCK, dk_BCK = rows_2BCK
    dk_BCK -= columns_BCK
    through_BCK = torch.mul(q_BCK, dq_BCK).addcmul_(k_BCK, dk_BCK)
    dg_BCK = group.view(out.g)
    torch.add(
        running_sum(ones_below(CHUNK, 0, x.g.dtype, x.g.device).mT, through_BCK),
        ((S_BKV * dS_BKV).sum(-1) * f.whole_BK).unsqueeze(1),
        out=dg_BCK,
    )
    dg_BCK += running_sum(ones_below(CHUNK, -1, x.g.dtype, x.g.device), rest_BCK * k_BCK)
    diagonal_BC1 = (do_BCV * U_BCV).sum(-1, keepdim=True)
    torch.addcmul(dq_BCK, diagonal_BC1, k_BCK, out=group.view(out.q))
    dk_BCK.add_(columns_BCK, alpha=2).add_(rest_BCK)
    torch.addcmul(dk_BCK, diagonal_BC1, q_BCK, out=group.view(out.k))
    return dS_AKV


def _load_qk(x: _Rows, group: Group) -> torch.Tensor:
    """q and k of a group as one tensor [2, B, C, K]."""
    rows = len(group.source)
    qk_2RK = x.q.new_empty(2, rows, x.q.shape[1])
    for y, out in zip((x.q, x.k), qk_2RK, strict=True):
        group.load(y, out=out)
    return qk_2RK.view(2, rows // CHUNK, CHUNK, -1)


__all__ = ["chunk"]
