"""torch's selective activation checkpointing of each sublayer: matrix products are kept, all else computed again."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from perilune.ops import names

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._grouped_mm.default}


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class Selective:
    """A decider that checkpoints the regions of whole sublayers and leaves every other name alone."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {}
        self.waits: Any = None

    def step(self) -> AbstractContextManager[None]:
        return names.deciding(self)

    def keep(self, name: str, x: torch.Tensor, again: Any, args: Any) -> None:
        pass

    def layer(self, index: int | None) -> None:
        pass

    def remade(self, name: str, size: int) -> bool:
        return True

    def region(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name not in ("attn", "ffn") or not torch.is_grad_enabled():
            return function(*args)
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
