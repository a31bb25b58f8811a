"""Checkpoints in the released Hugging Face layout: config.json, safetensors shards and their index.

Reading and writing go tensor by tensor, so the peak is the model plus one shard (writing) or one tensor (reading).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
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

    A folder that is already there is replaced as a whole once everything is written; its other files (a tokenizer)
    stay. Routed experts are packed to MXFP4 if `config.quant` is set. Raises Error on a full disk or a path that
    cannot be written; the old folder is then untouched.
    """
    # A link is followed: the folder that it names is replaced, not the link.
    folder = Path(folder).resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise Error(f"checkpoint {str(folder)!r} cannot be written: {error.strerror}") from None
    try:
        _write(model, fresh, max_shard_bytes)
        _replace(folder, fresh)
    except (OSError, SafetensorError) as error:
        raise Error(f"checkpoint {str(folder)!r} cannot be written: {error}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


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
    (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        # safetensors makes files that only their owner may read.
        path.chmod(0o644)
        _sync(path)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


# What belongs to a checkpoint and goes with the old one; every other file of the folder stays.
OURS = re.compile(r"config\.json|model\.safetensors(\.index\.json)?|model-\d+-of-\d+\.safetensors")


def _replace(folder: Path, fresh: Path) -> None:
    """Put `fresh` in the place of `folder`, carrying over files that are no part of a checkpoint."""
    fresh.chmod(0o755)
    if not folder.exists():
        fresh.rename(folder)
        return
    for path in folder.iterdir():
        if OURS.fullmatch(path.name) or (fresh / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, fresh / path.name, symlinks=True)
        else:
            shutil.copy2(path, fresh / path.name, follow_symlinks=False)
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    try:
        folder.rename(old / "it")
        try:
            fresh.rename(folder)
        except OSError:
            (old / "it").rename(folder)
            raise
    except OSError:
        # Empty unless the old folder could not be put back; then it stays here.
        with suppress(OSError):
            old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


__all__ = ["load", "save"]
