"""How fast a checkpoint came from its files."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from perilune.model import Reader, Transformer, load

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """Bytes that a process read from a checkpoint, seconds from the first to the last in its place, and what read."""

    bytes: int
    seconds: float
    reader: Reader = "safetensors"

    @property
    def gb_s(self) -> float:
        return self.bytes / max(self.seconds, 1e-9) / 1e9


def load_whole(
    folder: str | Path, device: torch.device, dtype: torch.dtype | None, packed: bool, reader: Reader
) -> tuple[Transformer, Loaded]:
    """`perilune.model.load`, timed."""
    begin = time.perf_counter()
    model = load(folder, device, dtype, packed=packed, reader=reader)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    return model, Loaded(size, time.perf_counter() - begin, reader)


def report(loaded: list[Loaded]) -> None:
    """Say it, a line for each rank."""
    for rank, one in enumerate(loaded):
        what = (rank, one.bytes / 1e9, one.seconds, one.gb_s, one.reader)
        log.info("rank %d read %.2f GB in %.1f s: %.2f GB/s (%s)", *what)


__all__ = ["Loaded", "load_whole", "report"]
