"""What a mixture reads its input for: the router's logits and the latent vector.

The router is to be exact in float32. A product of two bfloat16 numbers is exact in float32, so for bfloat16 tensors
matrix units that add in float32 and return float32 give the logits of the float32 product, up to the order of
additions, at a fraction of its time. They add less exactly than float32 does over a long sum, so the inner dimension
is cut into pieces whose sums are added in float32. In the backward pass the float32 gradient of the logits goes
through the matrix units as the sum of two bfloat16 numbers (16 bits), for the input and for the router's weight alike.

Legend: T tokens, D model width, E experts, L latent width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from perilune.errors import Error
from perilune.ops import few
from perilune.ops.linear import linear
from perilune.ops.precision import widen


def project(
    x_TD: torch.Tensor,
    router_ED: torch.Tensor,
    latent_LD: torch.Tensor | None,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = linear,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits_TE in max(fp32, dtype), z_TL in x's dtype); without latent_LD z is x.

    Logits: relative error of float32 products, also for bfloat16 tensors. multiply: y = x w^T for both; any other than
    `linear` (say `linear_exact`) gets the router's operands in max(fp32, dtype). Raises Error when the widths differ.
    """
    for name, weight in (("router_ED", router_ED), ("latent_LD", latent_LD)):
        if weight is not None and weight.shape[-1] != x_TD.shape[-1]:
            raise Error(f"project: {name} has width {weight.shape[-1]}; x has {x_TD.shape[-1]}")
    logits_TE: torch.Tensor
    if multiply is linear and few.fits(x_TD, router_ED):
        logits_TE = few.multiply(x_TD, router_ED, torch.float32)
    elif multiply is linear and x_TD.is_cuda and x_TD.dtype == router_ED.dtype == torch.bfloat16:
        logits_TE = _Logits.apply(x_TD, router_ED)  # type: ignore[no-untyped-call]
    else:
        logits_TE = multiply(widen(x_TD), router_ED.to(widen(x_TD).dtype))
    return logits_TE, x_TD if latent_LD is None else multiply(x_TD, latent_LD)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, router_ED: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_TD, router_ED)
        pieces = _pieces(x_TD.shape[1])
        x_PTd = x_TD.unflatten(1, (pieces, -1)).transpose(0, 1)
        router_PdE = router_ED.unflatten(1, (pieces, -1)).permute(1, 2, 0)
        return torch.bmm(x_PTd, router_PdE, out_dtype=torch.float32).sum(0)

    @staticmethod
    def backward(ctx: Any, d_TE: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x_TD, router_ED = ctx.saved_tensors
        high_TE = d_TE.to(x_TD.dtype)
        low_TE = (d_TE - high_TE).to(x_TD.dtype)
        d_x_TD = d_router_ED = None
        if ctx.needs_input_grad[0]:
            # One product over 2E columns: [high | low] times the weight twice.
            d_x_TD = torch.cat([high_TE, low_TE], 1) @ torch.cat([router_ED, router_ED])
        if ctx.needs_input_grad[1]:
            d_router_ED = torch.cat([high_TE, low_TE]).t() @ torch.cat([x_TD, x_TD])
        return d_x_TD, d_router_ED


def _pieces(width: int) -> int:
    """How many equal pieces of at least 512 numbers, whole multiples of 8, the inner dim is cut into."""
    return next(p for p in range(max(1, width // 512), 0, -1) if p == 1 or width % (8 * p) == 0)


__all__ = ["project"]
