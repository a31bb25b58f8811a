"""Post-training quantisation: routed experts rounded to MXFP4 in place, with the error of each.

Legend: E experts.
"""

from __future__ import annotations

import dataclasses

import torch

from perilune.config import QuantConfig
from perilune.errors import Error
from perilune.model.names import quantized_parameters
from perilune.model.transformer import Transformer
from perilune.ops.mx import decode_mxfp4, encode_mxfp4


@dataclasses.dataclass(frozen=True)
class Rounding:
    """What rounding did to one stacked parameter.

    relative: Frobenius norm of the change over that of the weights. worst: the same of the expert it hit hardest.
    clipped: share of values past the largest element of their block's scale. zeros: share that became zero.
    """

    name: str
    relative: float
    worst: float
    worst_expert: int
    clipped: float
    zeros: float


@torch.no_grad()
def quantize(model: Transformer, quant: QuantConfig) -> list[Rounding]:
    """Round the routed experts of `model` to MXFP4 by `quant.scale_rule`, in place, and set its config's `quant`.

    One entry a parameter, in the order of the layers. `save` then writes the codes. Raises Error for a model that is
    quantised already, and for one whose expert sizes are no multiples of 32.
    """
    stored = model.config.quant
    if stored is not None:
        raise Error(
            f"the model is quantised already, by scale_rule {stored.scale_rule!r}; asked for is {quant.scale_rule!r}. "
            "Start from the weights before rounding"
        )
    model.set_quant(quant)
    params = dict(model.named_parameters())
    named = quantized_parameters(model.config)
    return [_round(name, params[name], quant.scale_rule) for name in params if name in named]


def _round(name: str, weight_E: torch.Tensor, rule: str) -> Rounding:
    """One expert at a time: stacked weights may be most of the memory."""
    squares, changes, clipped, zeros = [], [], 0.0, 0.0
    for w in weight_E:
        codes, scale = encode_mxfp4(w, rule)
        rounded = decode_mxfp4(codes, scale, w.dtype)
        largest = 6.0 * torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
        squares.append(w.double().square().sum())
        changes.append((rounded - w).double().square().sum())
        clipped += float((w.abs() > largest).double().mean())
        zeros += float(((rounded == 0) & (w != 0)).double().mean())
        w.copy_(rounded)
    before_E, change_E = torch.stack(squares), torch.stack(changes)
    relative_E = (change_E / before_E.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
    worst = int(relative_E.argmax())
    total = float((change_E.sum() / before_E.sum().clamp_min(torch.finfo(torch.float64).tiny)).sqrt())
    count = len(squares)
    return Rounding(name, total, float(relative_E[worst]), worst, clipped / count, zeros / count)


__all__ = ["Rounding", "quantize"]
