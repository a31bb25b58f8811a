"""Checkpoints of a run: written whole under a temporary name, then renamed, so that one is complete or absent.

A checkpoint is a folder `step-00000120` with torch's distributed-checkpoint files (all tensors, whole under their own
names whatever ranks wrote them) and meta.json (everything that is plain numbers: step, position in the data). In a run
of several ranks all of them call `save_checkpoint`, and each writes its part.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
        with _all_or_none():
            if _leads():
                folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(temporary, ignore_errors=True)
        with _all_or_none(), _single_process():
            save(dict(tensors), storage_writer=FileSystemWriter(temporary), no_dist=_ranks() == 1)
        with _all_or_none():
            if _leads():
                _write(temporary / "meta.json", json.dumps(meta))
                _sync(temporary)
                if path.exists():
                    shutil.rmtree(path)
                os.rename(temporary, path)
                _sync(folder)
    except BaseException as cause:
        if _leads():
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(cause, _FAILURES):
            raise Error(f"checkpoint {path} could not be written: {_reason(cause)}") from cause
        raise
    if _leads():
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


def open_checkpoint(path: str | Path) -> tuple[Any, dict[str, tuple[torch.Size, torch.dtype]]]:
    """A checkpoint's meta, and sizes and dtypes of its tensors by name. Raises Error when it is missing or damaged."""
    path = Path(path)
    try:
        meta = json.loads((path / "meta.json").read_text("utf-8"))
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
    except _FAILURES as cause:
        raise Error(f"checkpoint {path} cannot be read: {_reason(cause)}") from cause
    return meta, {
        name: (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_checkpoint(path: str | Path, tensors: Mapping[str, Tensor], reader: FileSystemReader | None = None) -> None:
    """Fill `tensors` by name, in place: whole ones, or a rank's part (`perilune.parallel.checkpoint.Part`).

    Each rank reads what it needs by itself, with a reader of its own unless one is given. Raises Error for a name or a
    size that is not the checkpoint's.
    """
    try:
        with _single_process(), torch.no_grad():
            load(dict(tensors), storage_reader=reader or FileSystemReader(Path(path)), no_dist=True)
    except _FAILURES as cause:
        raise Error(f"checkpoint {path} cannot be read: {_reason(cause)}") from cause


def load_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], Any]:
    """All tensors of a checkpoint, whole, on the CPU, and its meta. Raises Error when files are missing or damaged."""
    meta, stored = open_checkpoint(path)
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in stored.items()}
    read_checkpoint(path, tensors)
    return tensors, meta


def read_settings(path: Path) -> dict[str, Any]:
    """The config.json of the run that a folder holds."""
    try:
        settings = json.loads(path.read_bytes())
    except OSError as cause:
        raise Error(f"{path}, of the run to continue, cannot be read: {cause.strerror}") from None
    except ValueError as cause:
        raise Error(f"{path}, of the run to continue, is not JSON: {cause}") from None
    if not isinstance(settings, dict):
        raise Error(f"{path}, of the run to continue, holds a {type(settings).__name__}; must be an object")
    return settings


def pack_optimizers(optimizers: Mapping[str, torch.optim.Optimizer], names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """The optimizers' per-parameter tensors under flat names: optim/<parameter>/<key>."""
    return {
        f"optim/{names[param]}/{key}": value
        for optimizer in optimizers.values()
        for param, state in optimizer.state.items()
        for key, value in state.items()
    }


def parameter_of(name: str) -> str:
    """The parameter of a name made by `pack_optimizers`."""
    return name.partition("/")[2].rpartition("/")[0]


def empty_states(
    stored: Mapping[str, tuple[torch.Size, torch.dtype]],
    params: Mapping[str, Tensor],
    known: Container[str],
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """Memory for those optimizer tensors of a checkpoint that belong to `params`, like this rank's part of them.

    known: the parameters of the whole model. device: None: that of each parameter. Raises Error for a tensor
    of any other.
    """
    states = {}
    for name, (size, dtype) in stored.items():
        if not name.startswith("optim/"):
            continue
        if parameter_of(name) not in known:
            raise Error(f"checkpoint holds {name}, but the model has no such trained parameter")
        param = params.get(parameter_of(name))
        if param is not None:
            # A scalar counter stays where the optimizer makes it, on the CPU.
            like = torch.empty_like(param, dtype=dtype, device=device, requires_grad=False)
            states[name] = like if size else torch.empty(size, dtype=dtype)
    return states


def unpack_optimizers(
    tensors: Mapping[str, Tensor], optimizers: Mapping[str, torch.optim.Optimizer], params: Mapping[str, Tensor]
) -> None:
    """Make tensors named by `pack_optimizers` all that optimizers know. Raises Error for a parameter that none has."""
    for optimizer in optimizers.values():
        optimizer.state.clear()
    owner = {
        param: optimizer for optimizer in optimizers.values() for g in optimizer.param_groups for param in g["params"]
    }
    for name, value in tensors.items():
        param = params.get(parameter_of(name))
        if param is None or param not in owner:
            raise Error(f"checkpoint holds {name}, but the model has no such trained parameter")
        owner[param].state[param][name.rpartition("/")[2]] = value


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _leads() -> bool:
    return _ranks() == 1 or dist.get_rank() == 0


@contextlib.contextmanager
def _all_or_none() -> Iterator[None]:
    """What is done inside by one or all ranks either works on all of them, or raises on all of them."""
    problem: BaseException | None = None
    try:
        yield
    except _FAILURES as cause:
        problem = cause
    if _ranks() == 1:
        if problem is not None:
            raise problem
        return
    told: list[str | None] = [None] * _ranks()
    dist.all_gather_object(told, None if problem is None else _reason(problem))
    if problem is not None:
        raise problem
    for rank, text in enumerate(told):
        if text is not None:
            raise Error(f"rank {rank}: {text}")


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
    "empty_states",
    "list_checkpoints",
    "load_checkpoint",
    "open_checkpoint",
    "pack_optimizers",
    "parameter_of",
    "read_checkpoint",
    "read_settings",
    "remove_incomplete",
    "save_checkpoint",
    "unpack_optimizers",
]
