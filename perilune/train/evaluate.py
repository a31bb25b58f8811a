"""Loss on held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.model import Transformer
from perilune.train.data import Batch
from perilune.train.loss import cross_entropy


@dataclass(frozen=True)
class Evaluation:
    """nats: summed over `tokens` predicted tokens, which stand for `bytes` bytes of text."""

    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / max(1, self.tokens)

    @property
    def bits_per_byte(self) -> float | None:
        """None where the number of bytes is not known."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def summed_loss(model: Transformer, batch: Batch, max_logits: int) -> tuple[Tensor, Tensor]:
    """(sum over the counted tokens, their number)."""
    x_TD = model.hidden(batch.tokens_T, batch.sequences).x_TD
    return cross_entropy(x_TD, model.lm_head.weight, batch.targets_T, batch.mask_T, max_logits)


@torch.no_grad()
def evaluate(
    model: Transformer,
    batches: Iterable[Batch],
    max_logits: int = 4096 * 2048,
    loss_of: Callable[[Transformer, Batch, int], tuple[Tensor, Tensor]] = summed_loss,
) -> Evaluation:
    """Sum the loss of `model` over `batches`; the model is not changed. loss_of: `summed_loss`, or one over ranks."""
    device = next(model.parameters()).device
    nats, tokens, size = 0.0, 0, 0
    for batch in batches:
        batch = batch.to(device)
        loss, count = loss_of(model, batch, max_logits)
        nats, tokens, size = nats + loss.item(), tokens + int(count), size + batch.bytes
    return Evaluation(nats, tokens, size)


__all__ = ["Evaluation", "evaluate", "summed_loss"]
