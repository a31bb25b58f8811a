"""Host side of routing on a GPU: the functions of `reference`, launched without a host synchronisation.

Legend: T tokens, E experts, J experts per token, R = T J rows sorted by expert, L latent width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from perilune.errors import Error
from perilune.ops.moe.reference import Routing
from perilune.ops.moe.triton_route import route_backward_kernel, route_kernel
from perilune.ops.moe.triton_rows import (
    combine_backward_kernel,
    combine_kernel,
    count_kernel,
    dispatch_kernel,
    invert_kernel,
    place_kernel,
    sort_kernel,
    start_kernel,
)

# Choices of a block of the counting sort; up to ONE_BLOCK of them one program sorts alone.
BLOCK, ONE_BLOCK = 256, 1024
# Numbers of a row that one program moves.
PIECE = 1024
EXPERTS = 4096


def route(logits_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int, scale: float, renormalize: bool) -> Routing:
    """See `perilune.ops.moe.route`. Raises Error for more than 4096 experts."""
    if logits_TE.shape[-1] > EXPERTS:
        raise Error(f"route: {logits_TE.shape[-1]} experts; at most {EXPERTS} on a GPU")
    out = _Route.apply(logits_TE, bias_E.detach(), top_k, scale, renormalize)  # type: ignore[no-untyped-call]
    return Routing(*out)


def permute(ids_TJ: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `perilune.ops.moe.permute`."""
    flat_R = ids_TJ.reshape(-1).contiguous()  # the first column of several is a view with gaps
    R, BE = flat_R.shape[0], triton.next_power_of_2(experts)
    order_R = flat_R.new_empty(R, dtype=torch.int64)
    offs_E = flat_R.new_empty(experts, dtype=torch.int32)
    if R <= ONE_BLOCK:
        B = max(16, triton.next_power_of_2(R))
        sort_kernel[(1,)](flat_R, order_R, offs_E, R, experts, B=B, BE=BE, num_warps=8)
        return order_R, offs_E
    blocks = triton.cdiv(R, BLOCK)
    counts_PE = offs_E.new_empty(blocks, experts)
    totals_E = torch.empty_like(offs_E)
    count_kernel[(blocks,)](flat_R, counts_PE, R, experts, B=BLOCK, BE=BE, num_warps=4)
    start_kernel[(triton.cdiv(experts, 16),)](counts_PE, totals_E, blocks, experts, BP=128, BE=16, num_warps=4)
    place_kernel[(blocks,)](flat_R, counts_PE, totals_E, order_R, offs_E, R, experts, B=BLOCK, BE=BE, num_warps=8)
    return order_R, offs_E


def row_of_choice(order_R: torch.Tensor) -> torch.Tensor:
    """The inverse permutation, int32: the grouped row of each flattened (token, choice)."""
    order_R = order_R.contiguous()
    row_R = torch.empty_like(order_R, dtype=torch.int32)
    if order_R.shape[0]:
        invert_kernel[(triton.cdiv(order_R.shape[0], 1024),)](order_R, row_R, order_R.shape[0], B=1024)
    return row_R


def spread(x_TL: torch.Tensor, order_R: torch.Tensor, top_k: int) -> torch.Tensor:
    """rows_RL: x of the token of each row."""
    T, L = x_TL.shape
    rows_RL = x_TL.new_empty(order_R.shape[0], L)
    if rows_RL.numel():
        grid, row_R = (T, triton.cdiv(L, PIECE)), row_of_choice(order_R)
        dispatch_kernel[grid](x_TL.contiguous(), row_R, rows_RL, L, J=top_k, BL=PIECE)
    return rows_RL


def gather_sum(rows_RL: torch.Tensor, row_TJ: torch.Tensor, weights_TJ: torch.Tensor | None) -> torch.Tensor:
    """y_TL = sum_j w[:, j] rows[row[:, j]], added in order of j in fp32, cast once."""
    (T, J), L = row_TJ.shape, rows_RL.shape[1]
    y_TL = rows_RL.new_empty(T, L)
    if y_TL.numel():
        weighted = weights_TJ is not None
        weights_TJ = None if weights_TJ is None else weights_TJ.contiguous()
        grid = (T, triton.cdiv(L, PIECE))
        combine_kernel[grid](rows_RL.contiguous(), row_TJ, weights_TJ, y_TL, L, J=J, BL=PIECE, WEIGHTED=weighted)
    return y_TL


def gather_sum_backward(
    d_TL: torch.Tensor, rows_RL: torch.Tensor, order_R: torch.Tensor, weights_TJ: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(d_rows of the R routed rows, d_weights_TJ)."""
    (T, J), L = weights_TJ.shape, rows_RL.shape[1]
    d_RL = rows_RL.new_empty(order_R.shape[0], L)
    d_weights_TJ = torch.empty_like(weights_TJ, memory_format=torch.contiguous_format)
    if d_RL.numel():
        combine_backward_kernel[(T,)](
            d_TL.contiguous(), rows_RL.contiguous(), row_of_choice(order_R), weights_TJ.contiguous(),
            d_RL, d_weights_TJ, L, J=J, BL=triton.next_power_of_2(L), num_warps=8,
        )  # fmt: skip
    return d_RL, d_weights_TJ


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int, scale: float, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        logits_TE = logits_TE.contiguous()
        T, E = logits_TE.shape
        ids_TJ = torch.empty(T, top_k, dtype=torch.int64, device=logits_TE.device)
        weights_TJ = torch.empty(T, top_k, dtype=torch.float32, device=logits_TE.device)
        scores_TE = weights_TJ.new_empty(T, E)
        threshold_T = weights_TJ.new_empty(T) if top_k < E else None
        if T:
            route_kernel[(T,)](
                logits_TE, bias_E.float().contiguous(), ids_TJ, weights_TJ, scores_TE, threshold_T, E, scale,
                J=top_k, BE=triton.next_power_of_2(E), BJ=triton.next_power_of_2(top_k), RENORMALIZE=renormalize,
                THRESHOLD=threshold_T is not None, DEVICE=logits_TE.is_cuda, num_warps=2,
            )  # fmt: skip
        ctx.save_for_backward(ids_TJ, scores_TE)
        ctx.options = (scale, renormalize, logits_TE.dtype)
        ctx.mark_non_differentiable(ids_TJ, *(() if threshold_T is None else (threshold_T,)))
        ctx.set_materialize_grads(False)
        return ids_TJ, weights_TJ, scores_TE, threshold_T

    @staticmethod
    def backward(
        ctx: Any, _: None, d_weights_TJ: torch.Tensor | None, d_scores_TE: torch.Tensor | None, __: None
    ) -> tuple[torch.Tensor | None, ...]:
        ids_TJ, scores_TE = ctx.saved_tensors
        scale, renormalize, dtype = ctx.options
        if d_weights_TJ is None and d_scores_TE is None:
            return None, None, None, None, None
        (T, E), J = scores_TE.shape, ids_TJ.shape[1]
        d_logits_TE = torch.empty_like(scores_TE, dtype=dtype)
        d_weights_TJ = scores_TE.new_zeros(T, J) if d_weights_TJ is None else d_weights_TJ.contiguous()
        d_scores_TE = None if d_scores_TE is None else d_scores_TE.contiguous()
        if T:
            route_backward_kernel[(T,)](
                d_weights_TJ, d_scores_TE, ids_TJ, scores_TE, d_logits_TE, E, scale,
                J=J, BE=triton.next_power_of_2(E), BJ=triton.next_power_of_2(J), RENORMALIZE=renormalize,
                SCORES=d_scores_TE is not None, num_warps=2,
            )  # fmt: skip
        return d_logits_TE, None, None, None, None


__all__ = ["gather_sum", "gather_sum_backward", "permute", "route", "row_of_choice", "spread"]
