"""A checkpoint folder as it is read: what it holds is known, and fits its config.json, before any weight is read.

Loading a whole model and loading a rank's part are one thing: pieces, each of which names a tensor, the share of it
that is wanted and where that goes. Tensors are read one after the other.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.model.names import VISION_PREFIXES, Entry, entries, released_name
from perilune.model.quantized import check_quantized
from perilune.ops.mx import decode_mxfp4

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LISTED = 5
KINDS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What brings the bytes from the files. fastsafetensors reads each file by several threads, straight to the device.
Reader = Literal["safetensors", "fastsafetensors"]


@dataclass(frozen=True)
class Share:
    """The run `part` of `parts` equal ones along `dim` of the place that a tensor fills."""

    dim: int
    part: int
    parts: int


@dataclass(frozen=True)
class Piece:
    """What is wanted of one tensor. entry: the tensor, its index and rows those of the place in the model that is
    filled. targets: where it goes, a view with the share's shape; two of them take MXFP4 codes and scales as they are.
    """

    entry: Entry
    targets: tuple[torch.Tensor, ...]
    share: Share | None = None


class Stored:
    """A tensor in an open file: its shape is known before it is read. name: in that file."""

    def __init__(self, path: Path, file: Any, name: str) -> None:
        self.path, self.file, self.name = path, file, name
        view = file.get_slice(name)
        self.shape, self.kind = tuple(view.get_shape()), str(view.get_dtype())

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * KINDS.get(self.kind, torch.uint8).itemsize

    def read(self, at: tuple[slice, ...] | None = None) -> torch.Tensor:
        """All of it, or the part at `at`; nothing else is read."""
        tensor: torch.Tensor = self.file.get_tensor(self.name) if at is None else self.file.get_slice(self.name)[at]
        return tensor


class Arrived:
    """What `Stored` is, of a tensor that was read whole."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.shape = value, tuple(value.shape)

    def read(self, at: tuple[slice, ...] | None = None) -> torch.Tensor:
        return self.value if at is None else self.value[at]


class Checkpoint:
    """An open folder whose tensors are those of its config. entries: each tensor of the model, in file order."""

    def __init__(
        self, folder: Path, config: ModelConfig, tensors: dict[str, Stored], reader: Reader, identity: tuple[int, ...]
    ) -> None:
        self.folder, self.config, self.tensors, self.reader, self.identity = folder, config, tensors, reader, identity
        _refuse_too_few(folder, config, len(tensors))
        self.entries = tuple(entries(config))
        ignored = () if config.quant is None else config.quant.hf.get("ignore", ())
        check_quantized(f"checkpoint {str(folder)!r}", self.entries, tensors.keys(), ignored)
        _compare(folder, self.entries, tensors)
        _require_kinds(self.entries, tensors)

    def dtypes(self, dtype: torch.dtype | None = None) -> dict[str, torch.dtype]:
        """Parameter name -> dtype: `dtype`, or the widest of the matrices' own (vectors keep theirs); float32 where
        that is always kept.

        Raises Error for a `dtype` that a model cannot have.
        """
        if dtype is not None and dtype not in KINDS.values():
            raise Error(f"dtype is {dtype}; allowed: {', '.join(map(str, KINDS.values()))}, or None")
        wide = torch.bfloat16
        for entry in self.entries:
            if not entry.packed and not entry.float32 and len(entry.shape) > 1:
                wide = torch.promote_types(wide, KINDS[self.tensors[entry.name].kind])
        kept = torch.promote_types(dtype or wide, torch.float32)

        def choose(entry: Entry) -> torch.dtype:
            if entry.float32:
                return kept
            return dtype or (wide if len(entry.shape) > 1 else KINDS[self.tensors[entry.name].kind])

        return {entry.param: choose(entry) for entry in self.entries}

    @torch.no_grad()
    def fill(self, pieces: Iterable[Piece]) -> int:
        """Read what the pieces ask for into their targets; how many bytes were read.

        Raises Error for values where the format wants zeros.
        """
        if self.reader == "fastsafetensors":
            size = self._fill_fast(list(pieces))
            # It opened the files once more, by name.
            self.require_unchanged()
            return size
        return sum(self._put(piece, [self.tensors[name] for name in piece.entry.stored()]) for piece in pieces)

    def require_unchanged(self) -> None:
        """Raise Error if another checkpoint has taken the place of this one since it was opened."""
        if _identity(self.folder) != self.identity:
            raise Error(f"checkpoint {str(self.folder)!r} was replaced while it was read; read it again")

    def _fill_fast(self, pieces: Sequence[Piece]) -> int:
        """Tensors come file by file, in the files' order; one of which only a share is wanted is read whole."""
        # Only here: it is an extra.
        from perilune.model.reading_fast import read_tensors

        files: dict[Path, dict[str, tuple[Piece, Stored]]] = {}
        for piece in pieces:
            for name in piece.entry.stored():
                stored = self.tensors[name]
                files.setdefault(stored.path, {})[stored.name] = (piece, stored)
        size, waiting = 0, dict[Stored, Arrived]()
        for path, wanted in files.items():
            sizes = {name: stored.nbytes for name, (_, stored) in wanted.items()}
            size += sum(sizes.values())
            for name, value in read_tensors(path, sizes, pieces[0].targets[0].device):
                piece, stored = wanted[name]
                waiting[stored] = Arrived(value)
                both = [self.tensors[one] for one in piece.entry.stored()]
                if all(one in waiting for one in both):
                    self._put(piece, [waiting.pop(one) for one in both])
        return size

    def _put(self, piece: Piece, sources: Sequence[Stored | Arrived]) -> int:
        """Fill the targets of a piece; the bytes that were asked of its sources."""
        entry, share, target = piece.entry, piece.share, piece.targets[0]
        if len(piece.targets) > 1:
            codes = [source.read() for source in sources]
            for place, value in zip(piece.targets, codes, strict=True):
                place.copy_(value)
            return sum(value.nbytes for value in codes)
        if share is not None and not entry.packed and entry.valid is None:
            width, shape = target.shape[share.dim], sources[0].shape
            if len(shape) > share.dim and shape[share.dim] == width * share.parts:
                mine = slice(share.part * width, (share.part + 1) * width)
                value = sources[0].read((*[slice(None)] * share.dim, mine))
                target.copy_(value.reshape(target.shape))
                return value.nbytes
        values = [source.read() for source in sources]
        value = decode_mxfp4(values[0], values[1], torch.float32) if entry.packed else values[0]
        if entry.valid is not None:
            if value[entry.valid :].any():
                raise Error(
                    f"{entry.name} in {str(self.folder)!r} has values after its first {entry.valid}; must be zeros"
                )
            value = value[: entry.valid]
        if share is not None:
            whole = list(target.shape)
            whole[share.dim] *= share.parts
            value = value.reshape(whole).chunk(share.parts, share.dim)[share.part]
        target.copy_(value.reshape(target.shape))
        return sum(one.nbytes for one in values)


@contextmanager
def open_checkpoint(folder: str | Path, reader: Reader = "safetensors") -> Iterator[Checkpoint]:
    """The checkpoint in a folder, open until the end of the block; no weight is read.

    Vision tensors are skipped and counted. Raises Error for a path that is no folder, listing missing, extra and
    wrongly shaped tensors, for a dtype that is no weight's, for a truncated file, for an index that names a tensor or
    file that is not there, for two sets of weights in one folder, for a folder that is replaced meanwhile, and for a
    reader that is unknown or not installed.
    """
    if reader not in get_args(Reader):
        raise Error(f"reader is {reader!r}; allowed: {', '.join(map(repr, get_args(Reader)))}")
    if reader == "fastsafetensors" and find_spec("fastsafetensors") is None:
        raise Error(f"reader is {reader!r}, which is not installed; pip install 'perilune[fastsafetensors]'")
    folder = Path(folder)
    if not folder.is_dir():
        raise Error(f"checkpoint {str(folder)!r} is not a folder")
    identity = _identity(folder)
    config = ModelConfig.from_pretrained(folder)
    with ExitStack() as stack:
        found = Checkpoint(folder, config, _open(folder, stack), reader, identity)
        found.require_unchanged()
        yield found


def places_of(tensors: Mapping[str, torch.Tensor], entry: Entry) -> tuple[torch.Tensor, ...]:
    """What `entry` fills of a model's tensors by name, as views: two, codes and scales, of an expert kept packed."""
    if entry.packed and entry.param not in tensors:
        return tuple(_place(tensors[f"{entry.param}_{kind}"], entry) for kind in ("codes", "scales"))
    return (_place(tensors[entry.param], entry),)


def _place(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    if entry.index is not None:
        tensor = tensor[entry.index]
    return tensor if entry.rows is None else tensor[entry.rows[0] : entry.rows[1]]


def _identity(folder: Path) -> tuple[int, ...]:
    """Of the folder's config.json, which `save` takes away before all other files and puts there after them."""
    try:
        found = (folder / "config.json").stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _open(folder: Path, stack: ExitStack) -> dict[str, Stored]:
    index_path = folder / INDEX
    if index_path.exists():
        weight_map = _weight_map(index_path)
        # Other libraries read the single file where there is one.
        if (folder / SINGLE).exists() and SINGLE not in weight_map.values():
            raise Error(f"checkpoint {str(folder)!r} has both {INDEX} and {SINGLE}; remove the one that is stale")
    elif (folder / SINGLE).exists():
        weight_map = None
    else:
        raise Error(f"checkpoint {str(folder)!r} has neither {INDEX} nor {SINGLE}")
    tensors: dict[str, Stored] = {}
    for shard in [SINGLE] if weight_map is None else sorted(set(weight_map.values())):
        path = folder / shard
        try:
            if not path.is_file():
                raise Error(f"{INDEX} names the shard {shard!r}, which is not in {str(folder)!r}")
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise Error(f"shard {str(path)!r} cannot be read (truncated or damaged): {error}") from None
        names = set(file.keys())
        named = names if weight_map is None else {n for n, where in weight_map.items() if where == shard}
        absent = sorted(named - names)
        if absent:
            raise Error(f"{INDEX} places {_some(absent)} in {shard!r}, which does not hold it")
        for name in sorted(named):
            released = released_name(name)
            if released in tensors:
                raise Error(f"{tensors[released].name} and {name} in {str(folder)!r} are one tensor of the model")
            tensors[released] = Stored(path, file, name)
    return tensors


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> shard, which must be a plain file name."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = set(weight_map.values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise Error(f"{str(path)!r} is not an index: a JSON object with 'weight_map'") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise Error(f"{str(path)!r} names the shard {name!r}; must be the name of a file in the same folder")
    return dict(weight_map)


def _refuse_too_few(folder: Path, config: ModelConfig, held: int) -> None:
    """A config that is wrong about its experts may ask for more names than fit into memory."""
    least = 3 * len(config.sparse_layers) * config.moe.num_experts
    if least > held:
        raise Error(
            f"checkpoint {str(folder)!r} does not fit its config.json; it has {held} tensors, which is too few for "
            f"{len(config.sparse_layers)} layers of num_experts = {config.moe.num_experts}"
        )


def _require_kinds(wanted: Sequence[Entry], tensors: Mapping[str, Stored]) -> None:
    for entry in wanted:
        for name in entry.stored():
            kind = tensors[name].kind
            if entry.packed and kind != "U8":
                raise Error(f"{name} has dtype {kind}; must be U8 (uint8)")
            if not entry.packed and kind not in KINDS:
                raise Error(f"{name} has dtype {kind}; must be one of {', '.join(KINDS)}")


def _compare(folder: Path, wanted: Sequence[Entry], tensors: dict[str, Stored]) -> None:
    vision = [name for name in tensors if name.startswith(VISION_PREFIXES)]
    for name in vision:
        del tensors[name]
    if vision:
        log.warning("%s: skipped %d vision tensors; only the language model is loaded", folder, len(vision))
    shapes = {name: shape for entry in wanted for name, shape in entry.stored().items()}
    missing = sorted(shapes.keys() - tensors.keys())
    extra = sorted(tensors.keys() - shapes.keys())
    wrong = [
        f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in shapes.items()
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


__all__ = [
    "INDEX",
    "SINGLE",
    "Checkpoint",
    "Piece",
    "Reader",
    "Share",
    "open_checkpoint",
    "places_of",
]
