"""Which runner computes the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from perilune.errors import Error
from perilune.model import Stats, Transformer
from perilune.serve.config import EngineConfig
from perilune.serve.pools import Pools
from perilune.serve.runner_exact import ExactRunner
from perilune.serve.work import Chunk, Device

if TYPE_CHECKING:
    from perilune.serve.ranks.lead import Ranks


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

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's weights by name, or empty ones of their shapes where no process has them whole."""

    def put_weight(self, name: str, value: torch.Tensor) -> None:
        """Replace one; `value` is whole."""

    def refresh(self) -> None:
        """The model's weights have changed."""

    def release(self, weights: bool = False) -> None:
        """Give arenas and slots back, perhaps the weights too; no slot is in use."""

    def take(self, weights: bool = False) -> None:
        """Allocate them again; weights are unset then."""


def runner_for(model: Transformer, pools: Pools, config: EngineConfig, ranks: Ranks | None = None) -> Runner:
    """The exact runner where the configuration asks for it, else the paged one; ranks: who computes with it.

    Raises Error for what it cannot do.
    """
    dtype = model.lm_head.weight.dtype
    if config.exact:
        if pools.device.type != "cpu" or dtype not in (torch.float32, torch.float64) or config.kv != "model":
            raise Error(
                f"engine.exact needs float32 or float64 on the CPU, and kv 'model'; it is {dtype} on {pools.device}"
            )
        return ExactRunner(model, pools)
    from perilune.serve.runner_paged import PagedRunner

    runner = PagedRunner(model, pools, config)
    if ranks is None:
        return runner
    from perilune.serve.ranks.runner import LeadRunner

    return LeadRunner(runner, ranks)


__all__ = ["Runner", "runner_for"]
