"""The activation manager in a training run: from the config's [memory] to a context around each step's passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from perilune.errors import Error
from perilune.memory.manager import Memory
from perilune.memory.plan import Plan, load_plan
from perilune.memory.profile import fit, profile
from perilune.memory.stores import FileStore, MemoryStore, Store
from perilune.model import Transformer
from perilune.train.config import MemoryConfig

# Bytes a second between a GPU and its host, or within a CPU's memory, by which `fit` weighs moving against computing.
LINK = {"cuda": 40e9, "cpu": 5e9}


class Activations:
    """`step` wraps the passes of one step. Without a plan it does nothing."""

    def __init__(self, config: MemoryConfig, model: Transformer, device: torch.device, ranks: int) -> None:
        """Raises Error for a plan that does not exist or cannot be carried out, and for several ranks."""
        self.config, self.device = config, device
        self.memory: Memory | None = None
        self._weights = [*model.parameters(), *model.buffers()]
        if config.plan == "none":
            return
        if ranks > 1:
            raise Error(f"memory.plan is {config.plan!r}; a run of several processes needs 'none'")
        if config.plan != "fit":
            self.memory = self.manager(load_plan(config.plan))

    def step(self, forward: Callable[[], Tensor]) -> contextlib.AbstractContextManager[None]:
        """forward: the loss of one micro-batch; run once, before the first step, where a plan is to be fitted."""
        if self.config.plan == "fit" and self.memory is None:
            self.memory = self.manager(self.plan(forward))
        return contextlib.nullcontext() if self.memory is None else self.memory.step()

    def plan(self, forward: Callable[[], Tensor]) -> Plan:
        if self.config.plan != "fit":
            return load_plan(self.config.plan)
        return fit(profile(forward, self._weights, self.device), self.config.budget, LINK[self.device.type])

    def manager(self, plan: Plan, inputs: Sequence[Tensor] = ()) -> Memory:
        """inputs: tensors of the batch, which exist with or without a plan and are not counted."""
        wanted = {rule.placement.where for rule in plan.rules}
        host: Store | None = None
        if "host" in wanted and self.device.type == "cuda":
            from perilune.memory.pinned import PinnedStore

            host = PinnedStore(self.device, self.config.host_bytes)
        elif "host" in wanted:
            host = MemoryStore(self.config.host_bytes)
        if "nvme" in wanted and self.config.nvme is None:
            raise Error("memory.nvme is not set, and the plan sends tensors there; name a folder")
        nvme = FileStore(Path(self.config.nvme)) if "nvme" in wanted and self.config.nvme is not None else None
        return Memory(plan, [*self._weights, *inputs], host, nvme)


__all__ = ["LINK", "Activations"]
