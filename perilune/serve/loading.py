"""How fast a checkpoint came from its files."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from perilune.model import Transformer, load

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """Bytes that a process read from a checkpoint, and seconds from the first to the last in its place."""

    bytes: int
    seconds: float

    @property
    def gb_s(self) -> float:
        return self.bytes / max(self.seconds, 1e-9) / 1e9


def load_whole(
    folder: str | Path, device: torch.device, dtype: torch.dtype | None, packed: bool
) -> tuple[Transformer, Loaded]:
    """`perilune.model.load`, timed."""
    begin = time.perf_counter()
    model = load(folder, device, dtype, packed=packed)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return model, Loaded(
        sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")), time.perf_counter() - begin
    )


def report(loaded: list[Loaded]) -> None:
    """Say it, a line for each rank."""
    for rank, one in enumerate(loaded):
        log.info("rank %d read %.2f GB in %.1f s: %.2f GB/s", rank, one.bytes / 1e9, one.seconds, one.gb_s)


__all__ = ["Loaded", "load_whole", "report"]
