"""Which runner computes the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from perilune.errors import Error
from perilune.model import Stats, Transformer
from perilune.serve.config import EngineConfig
from perilune.serve.pools import Pools
from perilune.serve.runner_exact import ExactRunner
from perilune.serve.work import Chunk, Device


class Runner(Device, Protocol):
    """A device that computes."""

    def forward(
        self, chunks: Sequence[Chunk], stats: Stats | None = None, tokens_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Advance every chunk's slot; the normed hidden states x_RD of the last `rows` positions of each, in order.

        tokens_T: int64, the chunks' tokens where they are on the device only; each chunk has one then.
        """

    def head(self, x_RD: torch.Tensor) -> torch.Tensor:
        """logits_RV."""

    def refresh(self) -> None:
        """The model's weights have changed."""

    def release(self) -> None:
        """Give the slots' memory back."""

    def take(self) -> None:
        """Allocate the slots again."""


def runner_for(model: Transformer, pools: Pools, config: EngineConfig) -> Runner:
    """The exact runner where the configuration asks for it, else the paged one. Raises Error for what it cannot do."""
    dtype = model.lm_head.weight.dtype
    if config.exact:
        if pools.device.type != "cpu" or dtype not in (torch.float32, torch.float64) or config.kv != "model":
            raise Error(
                f"engine.exact needs float32 or float64 on the CPU, and kv 'model'; it is {dtype} on {pools.device}"
            )
        return ExactRunner(model, pools)
    from perilune.serve.runner_paged import PagedRunner

    return PagedRunner(model, pools, config)


__all__ = ["Runner", "runner_for"]
