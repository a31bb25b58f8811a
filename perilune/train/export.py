"""A run's checkpoint in the released layout, written from its files without the whole model in memory.

Tensors are read a layer's few experts at a time and written shard by shard, so the peak is one output shard and one
piece; no process group, no GPU, and no other rank is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from perilune.chat import Tokenizer
from perilune.errors import Error
from perilune.model import save
from perilune.parallel.checkpoint import Part
from perilune.parallel.layout import KEPT, Box
from perilune.train.checkpoint import list_checkpoints, open_checkpoint, read_checkpoint, read_settings
from perilune.train.config import from_dict
from perilune.train.setup import shape_of, tokenizer_path
from perilune.train.write import naming

# Experts read at a time.
EXPERTS = 16


def export(run: str | Path, out: str | Path, step: int | None = None) -> Path:
    """Write checkpoint `step` (the newest by default) of the run in folder `run` to `out`, with its tokenizer.

    Raises Error for a folder without a run or without that checkpoint, and for what `save` cannot write.
    """
    run, out = Path(run), Path(out)
    found = {int(path.name.rpartition("-")[2]): path for path in list_checkpoints(run / "steps")}
    if not found or (step is not None and step not in found):
        has = ", ".join(map(str, found)) or "none"
        wanted = "" if step is None else f" of step {step}"
        raise Error(f"export: {run} has no checkpoint{wanted}; there are: {has}")
    config = from_dict(read_settings(run / "config.json"))
    tokenizer = Tokenizer.load(tokenizer_path(config))
    source = _Source(found[max(found) if step is None else step], getattr(torch, config.dtype))
    shape = shape_of(config, tokenizer)
    model: Any = _Stored(shape, source)
    save(model, out)
    with naming(out):
        tokenizer.save(out)
    return out


class _Source:
    """The tensors of a checkpoint's files, read in boxes. dtype: of the run's computation."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        _, self.sizes = open_checkpoint(path)
        self.path, self.reader, self.dtype = path, FileSystemReader(path), dtype
        # It would be parsed again for every box.
        metadata = self.reader.read_metadata()
        self.reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]
        self._name, self._first, self._piece = "", 0, torch.empty(0)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows first .. last of a tensor, in the dtype that the run computes in."""
        size, stored = self.sizes[f"model/{name}"]
        part = torch.empty(last - first, *size[1:], dtype=stored)
        begin = (first, *(0 for _ in size[1:]))
        box = Box(begin, tuple(part.shape), tuple(0 for _ in size))
        read_checkpoint(self.path, {f"model/{name}": Part.of(part, [box], size)}, self.reader)
        kept = name.endswith(KEPT) or name.endswith("bias_E")
        return part if kept else part.to(self.dtype)

    def expert(self, name: str, index: int) -> Tensor:
        """One matrix of a stack; its neighbours are read with it, since they are asked for next."""
        if name != self._name or not self._first <= index < self._first + len(self._piece):
            first = index // EXPERTS * EXPERTS
            self._name, self._first = name, first
            self._piece = self.rows(name, first, min(first + EXPERTS, self.sizes[f"model/{name}"][0][0]))
        return self._piece[index - self._first]


class _Lazy:
    """What `perilune.model.save` asks of a parameter, read when it is needed."""

    def __init__(self, source: _Source, name: str, pick: tuple[Any, ...] = ()) -> None:
        self.source, self.name, self.pick = source, name, pick
        size, self.dtype = source.sizes[f"model/{name}"]
        self.shape = size
        self.itemsize = source.dtype.itemsize

    def __getitem__(self, index: Any) -> _Lazy:
        return _Lazy(self.source, self.name, (*self.pick, index))

    def detach(self) -> Tensor:
        pick = self.pick
        if len(self.shape) == 3:
            value, pick = self.source.expert(self.name, pick[0]), pick[1:]
        else:
            value = self.source.rows(self.name, 0, self.shape[0])
        for index in pick:
            value = value[index]
        return value


class _Stored:
    """What `perilune.model.save` asks of a model."""

    def __init__(self, config: Any, source: _Source) -> None:
        self.config, self.source = config, source
        self.lm_head = SimpleNamespace(weight=SimpleNamespace(dtype=source.dtype))

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        for name in self.source.sizes:
            if name.startswith("model/"):
                yield name.removeprefix("model/"), _Lazy(self.source, name.removeprefix("model/"))

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        return iter(())


__all__ = ["export"]
