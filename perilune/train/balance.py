"""Quantile Balancing over the steps of a training run, and how evenly experts are loaded.

Legend: T tokens, E experts, B histogram bins.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from perilune.model import Transformer
from perilune.ops.moe import Routing, expert_load, histogram_bias, quantile_bias, threshold_histogram
from perilune.train.config import BalanceConfig


class Balancer:
    """Collects the routings of a step's micro-batches and then sets every router's bias for the next step.

    With `bins` = 0 all scores of a step are kept and the quantile is exact; otherwise a histogram is added up.
    """

    def __init__(self, model: Transformer, config: BalanceConfig) -> None:
        self.config, self.top_k, self.experts = config, model.config.moe.top_k, model.config.moe.num_experts
        # With pipeline stages only some layers are here.
        here = [i for i in model.config.sparse_layers if hasattr(model.layers[i], "ffn")]
        self.bias: dict[int, Tensor] = {i: model.layers[i].ffn.router.bias_E for i in here}  # type: ignore[union-attr, misc]
        self.active = config.enabled and self.top_k < self.experts
        self._clear()

    def _clear(self) -> None:
        self.load: dict[int, Tensor] = {}
        self.seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.counts: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, routings: Mapping[int, Routing]) -> None:
        """Count one micro-batch; keys are layers."""
        for layer, routing in routings.items():
            load_E = expert_load(routing.ids_TJ, self.experts)
            self.load[layer] = self.load[layer] + load_E if layer in self.load else load_E
            if not self.active or routing.threshold_T is None:
                continue
            scores_TE, threshold_T = routing.scores_TE.detach(), routing.threshold_T
            if self.config.bins == 0:
                self.seen.setdefault(layer, []).append((scores_TE, threshold_T))
            else:
                more_EB = threshold_histogram(scores_TE, threshold_T, self.bias[layer], self.config.bins)
                self.counts[layer] = self.counts[layer] + more_EB if layer in self.counts else more_EB

    def sums(self) -> list[Tensor]:
        """What `add` has counted, to be added up over the ranks of a run, in place, before `update`."""
        return [*self.load.values(), *self.counts.values()]

    @torch.no_grad()
    def update(self) -> dict[int, Tensor]:
        """Set the biases, forget the step, and return its tokens per expert, on the host: layer -> int64 [E]."""
        for layer, pairs in self.seen.items():
            scores_TE, threshold_T = torch.cat([s for s, _ in pairs]), torch.cat([t for _, t in pairs])
            self._set(layer, quantile_bias(scores_TE, threshold_T, self.top_k))
        for layer, counts_EB in self.counts.items():
            self._set(layer, histogram_bias(counts_EB, self.bias[layer], self.top_k))
        load = self.load
        self._clear()
        # All layers in one read of the device.
        return dict(zip(load, torch.stack(list(load.values())).cpu(), strict=True)) if load else {}

    def _set(self, layer: int, new_E: Tensor) -> None:
        keep = self.config.ema
        self.bias[layer].mul_(keep).add_(new_E.to(self.bias[layer].dtype), alpha=1 - keep)


def imbalance(load_E: Tensor) -> float:
    """Load of the fullest expert over the mean load: 1 is even, E is everything on one. 1 without tokens.

    MaxVio of the DeepSeek-V3 report is this minus 1.
    """
    total = float(load_E.sum())
    return float(load_E.max()) * load_E.numel() / total if total else 1.0


__all__ = ["Balancer", "imbalance"]
