"""Checkpoints in the released Hugging Face layout: config.json, safetensors shards and their index.

Reading and writing go tensor by tensor, so the peak is the model plus one shard (writing) or one tensor (reading).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.model.names import VISION_PREFIXES, Entry, entries, released_name
from perilune.model.parts import DEFAULT, Parts
from perilune.model.transformer import Transformer
from perilune.ops.mx import decode_mxfp4, encode_mxfp4

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LISTED = 5


def load(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    parts: Parts = DEFAULT,
) -> Transformer:
    """Read a Kimi-K3 or Kimi-Linear checkpoint folder.

    dtype: of all weights but the ones the released files keep in float32 (convolutions, A_log, dt_bias, o_norm,
    router bias); None takes each from its file, packed experts as bfloat16. Vision tensors are skipped and counted.

    Raises Error, before any weight is read, listing missing, extra and wrongly shaped tensors; for a truncated
    shard; for an index that names a tensor or file that is not there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise Error(f"checkpoint {str(folder)!r} is not a folder")
    config = ModelConfig.from_pretrained(folder)
    table = {stored: entry for entry in entries(config) for stored in entry.stored()}
    with ExitStack() as stack:
        tensors = _open(folder, stack)
        _compare(folder, table, tensors)
        model = _construct(config, parts, torch.device(device), _dtypes(table, tensors, dtype))
        places = dict(model.named_parameters()) | dict(model.named_buffers())
        with torch.no_grad():
            for entry in dict.fromkeys(table.values()):
                place = _place(places[entry.param], entry)
                place.copy_(_read(entry, tensors, folder).reshape(place.shape))
    return model


def save(model: Transformer, folder: str | Path, max_shard_bytes: int = 5_000_000_000) -> None:
    """Write `model` as a checkpoint folder in the layout of its config's family.

    A folder that is already there is replaced as a whole once everything is written; its other files (a tokenizer)
    stay. Routed experts are packed to MXFP4 if `config.quant` is set. Raises Error on a full disk or a path that
    cannot be written; the old folder is then untouched.
    """
    folder = Path(folder)
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


class _Stored:
    """A tensor in an open shard: its shape is known before it is read."""

    def __init__(self, file: Any, name: str) -> None:
        self.file, self.name = file, name
        view = file.get_slice(name)
        self.shape, self.kind = tuple(view.get_shape()), str(view.get_dtype())

    def read(self) -> torch.Tensor:
        tensor: torch.Tensor = self.file.get_tensor(self.name)
        return tensor


def _open(folder: Path, stack: ExitStack) -> dict[str, _Stored]:
    index_path = folder / INDEX
    if index_path.exists():
        try:
            weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError):
            raise Error(f"{str(index_path)!r} is not an index: a JSON object with 'weight_map'") from None
    elif (folder / SINGLE).exists():
        weight_map = None
    else:
        raise Error(f"checkpoint {str(folder)!r} has neither {INDEX} nor {SINGLE}")
    tensors: dict[str, _Stored] = {}
    for shard in [SINGLE] if weight_map is None else sorted(set(weight_map.values())):
        path = folder / shard
        if not path.is_file():
            raise Error(f"{INDEX} names the shard {shard!r}, which is not in {str(folder)!r}")
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise Error(f"shard {str(path)!r} cannot be read (truncated or damaged): {error}") from None
        names = set(file.keys())
        named = names if weight_map is None else {n for n, where in weight_map.items() if where == shard}
        absent = sorted(named - names)
        if absent:
            raise Error(f"{INDEX} places {_some(absent)} in {shard!r}, which does not hold it")
        tensors |= {released_name(name): _Stored(file, name) for name in named}
    return tensors


def _compare(folder: Path, table: dict[str, Entry], tensors: dict[str, _Stored]) -> None:
    vision = [name for name in tensors if name.startswith(VISION_PREFIXES)]
    for name in vision:
        del tensors[name]
    if vision:
        log.warning("%s: skipped %d vision tensors; only the language model is loaded", folder, len(vision))
    missing = sorted(table.keys() - tensors.keys())
    extra = sorted(tensors.keys() - table.keys())
    wrong = [
        f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
        for entry in dict.fromkeys(table.values())
        for name, shape in entry.stored().items()
        if name in tensors and tensors[name].shape != shape
    ]
    faults = [
        f"{len(names)} {kind}: {_some(names)}"
        for kind, names in (("missing", missing), ("extra", extra), ("wrongly shaped", wrong))
        if names
    ]
    if faults:
        raise Error(f"checkpoint {str(folder)!r} does not fit its config.json; " + "; ".join(faults))


def _some(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


KINDS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _dtypes(table: dict[str, Entry], tensors: dict[str, _Stored], dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Parameter name -> dtype."""
    dtypes: dict[str, torch.dtype] = {}
    for name, entry in table.items():
        if entry.float32 and dtype != torch.float64:
            dtypes[entry.param] = torch.float32
        else:
            dtypes[entry.param] = dtype or KINDS.get(tensors[name].kind, torch.bfloat16)
    return dtypes


def _construct(config: ModelConfig, parts: Parts, device: torch.device, dtypes: dict[str, torch.dtype]) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config, parts)
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, parameter in module.named_parameters(recurse=False):
            value = torch.empty(parameter.shape, dtype=dtypes[prefix + name], device=device)
            setattr(module, name, nn.Parameter(value))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=dtypes[prefix + name], device=device))
    return model


def _place(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The part of our parameter that `entry` fills, as a view."""
    if entry.index is not None:
        tensor = tensor[entry.index]
    return tensor if entry.rows is None else tensor[entry.rows[0] : entry.rows[1]]


def _read(entry: Entry, tensors: dict[str, _Stored], folder: Path) -> torch.Tensor:
    parts = [tensors[name].read() for name in entry.stored()]
    if entry.packed:
        for part, name in zip(parts, entry.stored(), strict=True):
            if part.dtype != torch.uint8:
                raise Error(f"{name} in {str(folder)!r} has dtype {part.dtype}; must be uint8")
        return decode_mxfp4(parts[0], parts[1], torch.float32)
    value = parts[0]
    if entry.valid is not None:
        if value[entry.valid :].any():
            raise Error(f"{entry.name} in {str(folder)!r} has values after its first {entry.valid}; must be zeros")
        return value[: entry.valid]
    return value


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
            tensors |= _stored_values(entry, _place(places[entry.param], entry).detach(), rule)
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


def _replace(folder: Path, fresh: Path) -> None:
    """Put `fresh` in the place of `folder`, carrying over files that are no part of a checkpoint."""
    fresh.chmod(0o755)
    if not folder.exists():
        fresh.rename(folder)
        return
    for path in folder.iterdir():
        if path.name != "config.json" and not path.name.startswith("model") and not (fresh / path.name).exists():
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, fresh / path.name)
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    folder.rename(old / "it")
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


__all__ = ["load", "save"]
