"""The callables a model is put together from: the seam for parallel, memory and exact versions of an operation.

Legend: T tokens, L width of the experts, R = T * (experts a token) rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from perilune.config import Activation
from perilune.ops import kda as kda_ops
from perilune.ops import mla as mla_ops
from perilune.ops import moe as moe_ops
from perilune.ops.conv import short_conv
from perilune.ops.linear import linear, linear_exact
from perilune.ops.names import remade
from perilune.ops.sequences import Sequences


def mixture(
    z_TL: torch.Tensor,
    routing: moe_ops.Routing,
    weights: moe_ops.Dense | moe_ops.Packed,
    activation: Activation,
    experts: Callable[..., torch.Tensor] = moe_ops.experts,
) -> torch.Tensor:
    """y_TL: each token through its experts, all of them here, added in choice order.

    A routing weight multiplies its expert's activation, and the experts spread z themselves: kept for the backward
    pass are z and the order, neither rows nor outputs; and where a memory plan keeps `moe.h`, the gate and up products.
    """
    top_k = routing.ids_TJ.shape[1]
    order_R, offs_E = moe_ops.permute(routing.ids_TJ, routing.scores_TE.shape[1])
    row_weights_R = routing.weights_TJ.reshape(-1).index_select(0, order_R)
    gate_up = weights.gate_up_E2FL if isinstance(weights, moe_ops.Dense) else weights.gate_up_codes
    again = remade("moe.h", order_R.shape[0] * gate_up.shape[1] * z_TL.itemsize)
    save = {} if again else {"save": "all"}
    rows_RL = experts(z_TL, weights, offs_E, activation, row_weights_R=row_weights_R, order_R=order_R, **save)
    return moe_ops.combine(rows_RL, order_R, None, top_k)


def in_turn(call: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """A function whose call does the work and gives its result."""
    return call


def own_latents(rows_TL: torch.Tensor, sequences: Sequences) -> tuple[torch.Tensor, Sequences]:
    """The latent rows that a call's queries see, and their cut: those of its own tokens."""
    return rows_TL, sequences


@dataclass(frozen=True)
class Parts:
    """One callable an operation, each with the signature of its namesake in `perilune.ops`.

    conv: `ops.conv.short_conv`; kda: `ops.kda.kda`; mla: `ops.mla.attention`; experts: `ops.moe.experts`;
    linear: `ops.linear.linear`. latents: `own_latents`, or rows of other ranks too; not used with decoding state.
    mixture: `mixture` above, which calls `experts`; or experts that live on other ranks (`perilune.parallel`).
    mix_ahead: whether attention residuals may take finished blocks in passes of their own where no gradient is needed
        (`model.residual`), which rounds once more.
    beside: `in_turn`, or a version that starts the call on another stream while others wait for ranks (the mixture for
        rows, kda for states).
    """

    conv: Callable[..., tuple[torch.Tensor, torch.Tensor]] = short_conv
    kda: Callable[..., Any] = kda_ops.kda
    latents: Callable[[torch.Tensor, Sequences], tuple[torch.Tensor, Sequences]] = own_latents
    mla: Callable[..., Any] = mla_ops.attention
    experts: Callable[..., torch.Tensor] = moe_ops.experts
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = linear
    mixture: Callable[..., torch.Tensor] = mixture
    mix_ahead: bool = True
    beside: Callable[[Callable[[], torch.Tensor], torch.device], Callable[[], torch.Tensor]] = in_turn


DEFAULT = Parts()

# A token's numbers do not depend on what else is in the call (level bitwise-batch; fp32 or fp64, no gradient in MLA).
EXACT = Parts(
    mla=mla_ops.attention_exact,
    experts=partial(moe_ops.experts, exact=True),
    linear=linear_exact,
    mix_ahead=False,
)
