"""Checkpoints of a run: written whole under a temporary name, then renamed, so that one is complete or absent.

A checkpoint is a folder `step-00000120` with torch's distributed-checkpoint files (all tensors) and meta.json
(everything that is plain numbers: step, position in the data).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from perilune.errors import Error

_NAME = re.compile(r"step-(\d{8})")
_TEMPORARY = ".writing"
# torch's wrapper of what its planner and storage raise is no Exception.
_FAILURES = (Exception, CheckpointException)


def save_checkpoint(folder: str | Path, step: int, tensors: Mapping[str, Tensor], meta: Any, keep: int) -> Path:
    """Write checkpoint `step` into `folder`, then remove all but the newest `keep`; returns its path.

    meta: JSON-able. Raises Error when it cannot be written (a full disk, no permission): nothing of it is left behind
    and the earlier checkpoints are as they were.
    """
    folder = Path(folder)
    path = folder / f"step-{step:08d}"
    temporary = folder / (path.name + _TEMPORARY)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        with _single_process():
            save(dict(tensors), storage_writer=FileSystemWriter(temporary), no_dist=True)
        _write(temporary / "meta.json", json.dumps(meta))
        _sync(temporary)
        if path.exists():
            shutil.rmtree(path)
        os.rename(temporary, path)
        _sync(folder)
    except BaseException as cause:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(cause, _FAILURES):
            raise Error(f"checkpoint {path} could not be written: {_reason(cause)}") from cause
        raise
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def list_checkpoints(folder: str | Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name) and (p / "meta.json").is_file())


def remove_incomplete(folder: str | Path) -> int:
    """Delete what an interrupted writer left in `folder`; returns how many there were."""
    found = [p for p in Path(folder).glob(f"step-*{_TEMPORARY}") if p.is_dir()] if Path(folder).is_dir() else []
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return len(found)


def load_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], Any]:
    """All tensors of a checkpoint, on the CPU, and its meta. Raises Error when files are missing or damaged."""
    path = Path(path)
    try:
        meta = json.loads((path / "meta.json").read_text("utf-8"))
        reader = FileSystemReader(path)
        entries = reader.read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with _single_process():
            load(tensors, storage_reader=reader, no_dist=True)
    except _FAILURES as cause:
        raise Error(f"checkpoint {path} cannot be read: {_reason(cause)}") from cause
    return tensors, meta


def pack_optimizers(optimizers: Mapping[str, torch.optim.Optimizer], names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """The optimizers' per-parameter tensors under flat names: optim/<parameter>/<key>."""
    return {
        f"optim/{names[param]}/{key}": value
        for optimizer in optimizers.values()
        for param, state in optimizer.state.items()
        for key, value in state.items()
    }


def unpack_optimizers(
    tensors: Mapping[str, Tensor], optimizers: Mapping[str, torch.optim.Optimizer], params: Mapping[str, Tensor]
) -> None:
    """Put tensors named by `pack_optimizers` back. Raises Error for a parameter that no optimizer has."""
    owner = {
        param: optimizer for optimizer in optimizers.values() for g in optimizer.param_groups for param in g["params"]
    }
    for name, value in tensors.items():
        kind, _, rest = name.partition("/")
        if kind != "optim":
            continue
        param_name, _, key = rest.rpartition("/")
        param = params.get(param_name)
        if param is None or param not in owner:
            raise Error(f"checkpoint holds {name}, but the model has no such trained parameter")
        # A scalar counter stays where the optimizer made it, on the CPU.
        owner[param].state[param][key] = value if value.dim() == 0 else value.to(param.device)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the folder's entries (names) durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _single_process() -> Iterator[None]:
    """Without torch's remark that no process group is set up: none is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _reason(cause: BaseException) -> str:
    """What the operating system said, if it was that, else the first line of the innermost message."""
    failures = getattr(cause, "failures", None)
    if failures:
        cause = next(iter(failures.values()))[0]
    chain = [cause]
    while (below := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(below)
    for link in chain:
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]


__all__ = [
    "list_checkpoints",
    "load_checkpoint",
    "pack_optimizers",
    "remove_incomplete",
    "save_checkpoint",
    "unpack_optimizers",
]
