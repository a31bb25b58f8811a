"""Cross-entropy of the next token without ever holding all logits.

Legend: T tokens, D model, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perilune.errors import Error


def cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, mask_T: Tensor | None = None, max_logits: int = 4096 * 2048
) -> tuple[Tensor, Tensor]:
    """Summed loss in nats, and the number of tokens it is summed over.

    x_TD: last hidden state (after the final norm); weight_VD: the output matrix; targets_T: int64, the token that
    follows. mask_T: bool, True where the token counts; None: everywhere (a masked target is never read).
    max_logits: most logits that exist at a time, so C = max_logits // V tokens are done together.

    Returns loss_sum (float64 scalar, differentiable in x and weight) and count (int64 scalar). Logits are made in the
    inputs' dtype; softmax and sums are at least float32, and the weight gradient is added up over the chunks in at
    least float32. Both gradients are made during the forward pass, chunk by chunk, as the logits are only there then.
    Raises Error when shapes do not fit.
    """
    tokens, width = x_TD.shape
    if weight_VD.shape[1] != width:
        raise Error(f"weight_VD is {tuple(weight_VD.shape)}; x_TD has width {width}")
    for name, tensor in (("targets_T", targets_T), ("mask_T", mask_T)):
        if tensor is not None and tensor.shape != (tokens,):
            raise Error(f"{name} is {tuple(tensor.shape)}; must be ({tokens},), one entry a token")
    if mask_T is None:
        mask_T = torch.ones_like(targets_T, dtype=torch.bool)
    chunk = max(1, max_logits // weight_VD.shape[0])
    loss_sum: Tensor = _CrossEntropy.apply(x_TD, weight_VD, targets_T, mask_T, chunk)  # type: ignore[no-untyped-call]
    return loss_sum, mask_T.sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, mask_T: Tensor, chunk: int) -> Tensor:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        need_x, need_weight = ctx.needs_input_grad[:2]
        dx_TD = torch.empty_like(x_TD) if need_x else None
        dweight_VD = torch.zeros_like(weight_VD, dtype=wide) if need_weight else None
        loss_sum = torch.zeros((), dtype=torch.float64, device=x_TD.device)
        for begin in range(0, x_TD.shape[0], chunk):
            rows = slice(begin, begin + chunk)
            x_CD, mask_C1 = x_TD[rows], mask_T[rows, None]
            targets_C1 = torch.where(mask_C1, targets_T[rows, None], 0)
            logp_CV = torch.log_softmax((x_CD @ weight_VD.T).to(wide), dim=-1)
            loss_sum -= torch.where(mask_C1, logp_CV.gather(1, targets_C1), 0).sum(dtype=torch.float64)
            if not (need_x or need_weight):
                continue
            dlogits_CV = logp_CV.exp_()
            dlogits_CV.scatter_add_(1, targets_C1, dlogits_CV.new_full(targets_C1.shape, -1.0))
            dlogits_CV = dlogits_CV.masked_fill_(~mask_C1, 0).to(x_TD.dtype)
            if dx_TD is not None:
                dx_TD[rows] = dlogits_CV @ weight_VD
            if dweight_VD is not None:
                dweight_VD += dlogits_CV.T @ x_CD
        ctx.save_for_backward(dx_TD, dweight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return loss_sum

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dx_TD, dweight_VD = ctx.saved_tensors
        scale = grads[0]
        dx = None if dx_TD is None else dx_TD * scale.to(dx_TD.dtype)
        dweight = None if dweight_VD is None else (dweight_VD * scale.to(dweight_VD.dtype)).to(ctx.weight_dtype)
        return dx, dweight, None, None, None


__all__ = ["cross_entropy"]
