"""The pieces of the experts in plain torch, on any device: grouped products, the activation, the weights' gradient.

`triton_experts` has functions of the same names and arguments for a GPU. Products accumulate in max(fp32, dtype).

Legend: R rows sorted by expert, E experts, L latent (input and output) width, F expert width, G weight rows,
K weight columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as nnf

from perilune.config import Activation
from perilune.ops import activation as elementwise
from perilune.ops.linear import linear_exact
from perilune.ops.mx import decode_mxfp4
from perilune.ops.precision import widen


@dataclass(frozen=True)
class Weight:
    """[E, G, K], dense (scales is None) or MXFP4; `turned` means that its transpose multiplies."""

    stored: torch.Tensor
    scales: torch.Tensor | None
    turned: bool = False

    def transposed(self) -> Weight:
        return Weight(self.stored, self.scales, not self.turned)

    def expert(self, e: int, dtype: torch.dtype) -> torch.Tensor:
        w_GK = self.stored[e] if self.scales is None else decode_mxfp4(self.stored[e], self.scales[e], dtype)
        return w_GK.t() if self.turned else w_GK


def product(
    x_RK: torch.Tensor, weight: Weight, offs_E: torch.Tensor, exact: bool = False, out_RG: torch.Tensor | None = None
) -> torch.Tensor:
    """y_RG with y = x W_e^T for the rows of expert e. What stands past offs_E[-1] is undefined; untouched in out_RG."""
    if out_RG is not None:
        y_RG = product(x_RK, weight, offs_E, exact)
        routed_R = torch.arange(y_RG.shape[0], device=y_RG.device) < offs_E[-1]
        return out_RG.copy_(torch.where(routed_R.unsqueeze(-1), y_RG, out_RG))
    if weight.scales is None and not exact and fits_grouped_mm(x_RK, *weight.stored.shape[1:]):
        w_EKG = weight.stored if weight.turned else weight.stored.transpose(1, 2)
        return nnf.grouped_mm(x_RK, w_EKG, offs=offs_E)
    # One product per expert: the bits of grouped_mm depend on the other rows, and it cannot decode.
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = linear_exact if exact else nnf.linear
    ends = [0, *offs_E.tolist()]
    parts = [
        multiply(x_RK[start:end], weight.expert(e, x_RK.dtype))
        for e, (start, end) in enumerate(pairwise(ends))
        if end > start
    ]
    parts.append(x_RK.new_zeros(x_RK.shape[0] - ends[-1], _columns(weight)))
    return torch.cat(parts)


def glu_product(
    x_RL: torch.Tensor,
    gate_up: Weight,
    offs_E: torch.Tensor,
    activation: Activation,
    row_weights_R: torch.Tensor | None,
    keep: bool,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(a_RF, h_R2F or None without keep): h = gate_up x and a = w glu(h). Undefined past offs_E[-1]."""
    h_R2F = product(x_RL, gate_up, offs_E, exact)
    gate_RF, up_RF = h_R2F.chunk(2, -1)
    a_RF = _times(elementwise.glu_forward(gate_RF, up_RF, activation), row_weights_R)
    return a_RF, h_R2F if keep else None


def glu_backward(
    u_RF: torch.Tensor,
    h_R2F: torch.Tensor,
    offs_E: torch.Tensor,
    activation: Activation,
    row_weights_R: torch.Tensor | None,
    need_a: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(d_h_R2F, a_RF = w glu(h) if needed, d_w_R if there are weights), u_RF being d_y W_down, not yet weighted.

    Undefined past offs_E[-1], except d_w_R, which is zero there.
    """
    gate_RF, up_RF = h_R2F.chunk(2, -1)
    a_RF = d_w_R = None
    if need_a or row_weights_R is not None:
        a_RF = elementwise.glu_forward(gate_RF, up_RF, activation)
        if row_weights_R is not None:
            d_w_R = zero_tail((widen(u_RF) * a_RF).sum(-1), offs_E)
            a_RF = _times(a_RF, row_weights_R)
    return elementwise.glu_backward(_times(u_RF, row_weights_R), gate_RF, up_RF, activation), a_RF, d_w_R


def weight_gradient(
    d_RG: torch.Tensor,
    x_RK: torch.Tensor,
    offs_E: torch.Tensor,
    skip_empty: bool = False,
    out_EGK: torch.Tensor | None = None,
) -> torch.Tensor:
    """[E, G, K]: sum over the rows of each expert of d x^T; zero for an expert without rows (may be undefined with
    skip_empty). Written to out_EGK if given."""
    if out_EGK is not None:
        return out_EGK.copy_(weight_gradient(d_RG, x_RK, offs_E, skip_empty))
    if not x_RK.shape[0]:
        return x_RK.new_zeros(offs_E.shape[0], d_RG.shape[1], x_RK.shape[1])
    if fits_grouped_mm(x_RK, d_RG.shape[1], x_RK.shape[1]):
        return nnf.grouped_mm(d_RG.t(), x_RK, offs=offs_E)
    ends = [0, *offs_E.tolist()]
    return torch.stack([d_RG[a:b].t() @ x_RK[a:b] for a, b in pairwise(ends)])


def zero_tail(x_RL: torch.Tensor, offs_E: torch.Tensor) -> torch.Tensor:
    """Zero rows past offs_E[-1] of [R, ...] in place (grouped_mm leaves them uninitialised)."""
    if x_RL.device.type == "cpu":
        x_RL[int(offs_E[-1]) :].zero_()
        return x_RL
    # On a device, without reading offs_E back.
    past_R = torch.arange(x_RL.shape[0], device=x_RL.device) >= offs_E[-1]
    return x_RL.masked_fill_(past_R.view(-1, *(1,) * (x_RL.dim() - 1)), 0)


def fits_grouped_mm(x_RK: torch.Tensor, *widths: int) -> bool:
    """Whether grouped_mm takes these operands: no fp64, only bf16 on a GPU, rows of whole 16 bytes, some rows."""
    known = x_RK.dtype == torch.bfloat16 or (x_RK.device.type == "cpu" and x_RK.dtype != torch.float64)
    return known and x_RK.shape[0] > 0 and all(width * x_RK.element_size() % 16 == 0 for width in widths)


def _times(x_RF: torch.Tensor, row_weights_R: torch.Tensor | None) -> torch.Tensor:
    """Each row times its weight, in the weights' precision, cast once."""
    return x_RF if row_weights_R is None else (x_RF * row_weights_R.unsqueeze(-1)).to(x_RF.dtype)


def _columns(weight: Weight) -> int:
    rows, columns = weight.stored.shape[1:]
    if weight.scales is not None:
        columns *= 2
    return columns if weight.turned else rows


__all__ = ["Weight", "fits_grouped_mm", "glu_backward", "glu_product", "product", "weight_gradient", "zero_tail"]
