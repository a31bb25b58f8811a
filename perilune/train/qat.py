"""Quantisation-aware training: what the run's settings make of the model's `QuantConfig`.

The rounding itself is in `perilune.train.masters` (weights, once a step) and `perilune.model.moe` (activations).
"""

from __future__ import annotations

import dataclasses

from perilune.config import QuantConfig
from perilune.errors import Error
from perilune.train.config import QatConfig


def qat_quant(qat: QatConfig, stored: QuantConfig | None, source: str) -> QuantConfig | None:
    """The quantisation of the trained model: none without `qat.enabled`, else the settings' own.

    stored: of the model in `source` that the run starts from. Raises Error where its rule is another one.
    """
    if not qat.enabled:
        return None
    if stored is None:
        return QuantConfig(scale_rule=qat.scale_rule, activations=qat.activations)
    if stored.scale_rule != qat.scale_rule:
        raise Error(
            f"qat.scale_rule is {qat.scale_rule!r}, but {source!r} is quantised by {stored.scale_rule!r}; "
            "weights and scales of one rule are another model's under the other"
        )
    return dataclasses.replace(stored, activations=qat.activations)


__all__ = ["qat_quant"]
