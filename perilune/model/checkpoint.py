"""Checkpoints in the released Hugging Face layout: config.json, safetensors shards and their index.

Reading and writing go tensor by tensor, so the peak is the model plus one shard (writing) or one tensor (reading).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from perilune.errors import Error
from perilune.model.names import Entry, entries
from perilune.model.parts import DEFAULT, Parts
from perilune.model.reading import INDEX, SINGLE, Piece, Reader, open_checkpoint, places_of
from perilune.model.transformer import Transformer
from perilune.model.unset import give_memory_inplace, outline
from perilune.ops.mx import encode_mxfp4


def load(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    parts: Parts = DEFAULT,
    packed: bool = False,
    reader: Reader = "safetensors",
) -> Transformer:
    """Read a Kimi-K3 or Kimi-Linear checkpoint folder.

    dtype: of all weights but the ones the released files keep in float32 (convolutions, A_log, dt_bias, o_norm,
    router bias); None takes the widest that the file's matrices have. Vision tensors are skipped and counted.
    packed: routed experts that are stored as MXFP4 codes stay so in memory, for inference; the numbers are the same.
    reader: what brings the bytes from the files; "fastsafetensors" is an extra.

    Raises Error as `open_checkpoint` and `Checkpoint.dtypes` do, before any weight is read.
    """
    with open_checkpoint(folder, reader) as stored:
        packed = packed and stored.config.quant is not None
        model = outline(stored.config, parts, packed)
        give_memory_inplace(model, stored.dtypes(dtype), torch.device(device))
        places = dict(model.named_parameters()) | dict(model.named_buffers())
        stored.fill(Piece(entry, places_of(places, entry)) for entry in stored.entries)
    return model


def save(model: Transformer, folder: str | Path, max_shard_bytes: int = 5_000_000_000) -> None:
    """Write `model` as a checkpoint folder in the layout of its config's family.

    The files are written under another name in the folder and take the place of its old checkpoint at the end;
    config.json goes first and comes last, so that what can be loaded is whole. Other files (a tokenizer) stay.
    Routed experts are packed to MXFP4 if `config.quant` is set.

    Raises Error on a full disk, a path that cannot be written (the old checkpoint is then untouched) and a folder that
    another process is writing to.
    """
    folder = Path(folder)
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _claim(folder) as alone:
            fresh = Path(tempfile.mkdtemp(prefix=WRITING, dir=folder))
            try:
                _write(model, fresh, max_shard_bytes)
                _replace(folder, fresh)
            finally:
                _remove(fresh)
            # Of processes that were killed.
            for left in folder.glob(f"{WRITING}*") if alone else ():
                shutil.rmtree(left, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise Error(f"checkpoint {str(folder)!r} cannot be written: {error}") from None
    finally:
        if new:
            # Stays if it has become a checkpoint.
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def _claim(folder: Path) -> Iterator[bool]:
    """Keep other calls of `save` out of a folder; False where its file system has no locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            raise Error(
                f"checkpoint {str(folder)!r} is being written by someone else; wait for it or choose another folder"
            ) from None
        except OSError:
            alone = False
        yield alone
    finally:
        os.close(handle)


def _stored_values(entry: Entry, value: torch.Tensor, rule: str) -> dict[str, torch.Tensor]:
    if entry.packed:
        packed, scale = encode_mxfp4(value.float(), rule=rule)
        return dict(zip(entry.stored(), (packed.contiguous(), scale.contiguous()), strict=True))
    if entry.float32:
        value = value.float()
    if entry.valid is not None:
        value = nn.functional.pad(value, (0, entry.shape[0] - value.shape[0]))
    return {entry.name: value.reshape(entry.shape).contiguous().cpu()}


def _shards(model: Transformer, limit: int) -> Iterator[list[Entry]]:
    """Entries cut into shards of at most `limit` bytes (one tensor may exceed it alone)."""
    places = dict(model.named_parameters()) | dict(model.named_buffers())
    shard: list[Entry] = []
    used = 0
    for entry in entries(model.config):
        numel = torch.Size(entry.shape).numel()
        size = numel * 17 // 32 if entry.packed else numel * (4 if entry.float32 else places[entry.param].itemsize)
        if shard and used + size > limit:
            yield shard
            shard, used = [], 0
        shard.append(entry)
        used += size
    yield shard


def _write(model: Transformer, folder: Path, limit: int) -> None:
    places = dict(model.named_parameters()) | dict(model.named_buffers())
    rule = model.config.quant.scale_rule if model.config.quant else "even"
    shards = list(_shards(model, limit))
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for entry in shard:
            if entry.packed and entry.param not in places:
                codes = (place.contiguous().cpu() for place in places_of(places, entry))
                tensors |= dict(zip(entry.stored(), codes, strict=True))
            else:
                (place,) = places_of(places, entry)
                tensors |= _stored_values(entry, place.detach(), rule)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(t.nbytes for t in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    hf = model.config.to_hf()
    dtype = str(model.lm_head.weight.dtype).removeprefix("torch.")
    for level in (hf, hf.get("text_config", {})):
        if "dtype" in level:
            level["dtype"] = dtype
    (folder / CONFIG).write_text(json.dumps(hf, indent=1) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        # safetensors makes files that only their owner may read.
        path.chmod(0o644)
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# What belongs to a checkpoint and goes with the old one; every other file of the folder stays.
OURS = re.compile(r"config\.json|model\.safetensors(\.index\.json)?|model-\d+-of-\d+\.safetensors")
WRITING, CONFIG = ".writing-", "config.json"


def _replace(folder: Path, fresh: Path) -> None:
    """Move the checkpoint in `fresh` to `folder`, after the one there has moved to `fresh`/old; all or nothing."""
    files = sorted(fresh.iterdir(), key=lambda path: path.name == CONFIG)
    away = [path for path in folder.iterdir() if OURS.fullmatch(path.name)]
    old = fresh / "old"
    old.mkdir()
    moves = [(path, old / path.name) for path in sorted(away, key=lambda path: path.name != CONFIG)]
    moves += [(path, folder / path.name) for path in files]
    done: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            source.rename(target)
            done.append((source, target))
    except BaseException:
        for source, target in reversed(done):
            target.rename(source)
        raise
    _sync(folder)
    shutil.rmtree(old, ignore_errors=True)


def _remove(fresh: Path) -> None:
    """All but an old checkpoint that could not be put back."""
    for path in fresh.iterdir():
        if path.is_file():
            path.unlink(missing_ok=True)
    for path in (fresh / "old", fresh):
        with suppress(OSError):
            path.rmdir()


__all__ = ["load", "save"]
