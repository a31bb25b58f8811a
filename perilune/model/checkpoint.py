"""Checkpoints in the released Hugging Face layout: config.json, safetensors shards and their index.

Reading and writing go tensor by tensor, so the peak is the model plus one shard (writing) or one tensor (reading).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
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
    packed: bool = False,
) -> Transformer:
    """Read a Kimi-K3 or Kimi-Linear checkpoint folder.

    dtype: of all weights but the ones the released files keep in float32 (convolutions, A_log, dt_bias, o_norm,
    router bias); None takes the widest that the file's matrices have. Vision tensors are skipped and counted.
    packed: routed experts that are stored as MXFP4 codes stay so in memory, for inference; the numbers are the same.

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
        packed = packed and config.quant is not None
        model = _construct(config, parts, torch.device(device), _dtypes(table, tensors, dtype), packed)
        places = dict(model.named_parameters()) | dict(model.named_buffers())
        with torch.no_grad():
            for entry in dict.fromkeys(table.values()):
                if packed and entry.packed:
                    for place, name in zip(_code_places(places, entry), entry.stored(), strict=True):
                        place.copy_(tensors[name].read())
                else:
                    place = _place(places[entry.param], entry)
                    place.copy_(_read(entry, tensors, folder).reshape(place.shape))
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
        weight_map = _weight_map(index_path)
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


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> shard, which must be a plain file name."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Error(f"{str(path)!r} is not an index: a JSON object with 'weight_map'") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise Error(f"{str(path)!r} names the shard {name!r}; must be the name of a file in the same folder")
    return dict(weight_map)


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
    """Parameter name -> dtype: `dtype`, or the widest of the matrices' own (vectors keep theirs); float32 where that
    is always kept.

    Raises Error for a stored dtype that is no floating-point weight, and for a `dtype` that a model cannot have.
    """
    if dtype is not None and dtype not in KINDS.values():
        raise Error(f"dtype is {dtype}; allowed: {', '.join(map(str, KINDS.values()))}, or None")
    wide = torch.bfloat16
    for name, entry in table.items():
        kind = tensors[name].kind
        if entry.packed:
            if kind != "U8":
                raise Error(f"{name} has dtype {kind}; must be U8 (uint8)")
        elif kind not in KINDS:
            raise Error(f"{name} has dtype {kind}; must be one of {', '.join(KINDS)}")
        elif not entry.float32 and len(entry.shape) > 1:
            wide = torch.promote_types(wide, KINDS[kind])
    kept = torch.promote_types(dtype or wide, torch.float32)

    def choose(name: str, entry: Entry) -> torch.dtype:
        if entry.float32:
            return kept
        return dtype or (wide if len(entry.shape) > 1 else KINDS[tensors[name].kind])

    return {entry.param: choose(name, entry) for name, entry in table.items()}


def _construct(
    config: ModelConfig, parts: Parts, device: torch.device, dtypes: dict[str, torch.dtype], packed: bool
) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config, parts, packed)
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, parameter in module.named_parameters(recurse=False):
            value = torch.empty(parameter.shape, dtype=dtypes[prefix + name], device=device)
            setattr(module, name, nn.Parameter(value))
        for name, buffer in module.named_buffers(recurse=False):
            kind = buffer.dtype if buffer.dtype == torch.uint8 else dtypes[prefix + name]
            setattr(module, name, torch.empty(buffer.shape, dtype=kind, device=device))
    return model


def _code_places(places: Mapping[str, torch.Tensor], entry: Entry) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and the scales of `entry` in a model whose experts are packed, as views."""
    return _place(places[f"{entry.param}_codes"], entry), _place(places[f"{entry.param}_scales"], entry)


def _place(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The part of our parameter that `entry` fills, as a view."""
    if entry.index is not None:
        tensor = tensor[entry.index]
    return tensor if entry.rows is None else tensor[entry.rows[0] : entry.rows[1]]


def _read(entry: Entry, tensors: dict[str, _Stored], folder: Path) -> torch.Tensor:
    parts = [tensors[name].read() for name in entry.stored()]
    if entry.packed:
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
            if entry.packed and entry.param not in places:
                codes = (place.contiguous().cpu() for place in _code_places(places, entry))
                tensors |= dict(zip(entry.stored(), codes, strict=True))
            else:
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
