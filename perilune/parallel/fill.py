"""A rank's part of a model gets its memory and its numbers; nothing else of the model is ever there.

Numbers come box by box, from an initialisation or a checkpoint: what lies in this rank's part is copied, the rest is
let go. So the peak is the part and one box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from perilune.errors import Error
from perilune.model import Piece, Transformer, initial_values, open_checkpoint, places_of
from perilune.parallel.collectives import local
from perilune.parallel.layout import Box, Layout

# (name of a parameter or buffer, where a box begins in it, its size) -> whether this rank has any of it.
Wanted = Callable[[str, Sequence[int], Sequence[int]], bool]
# Names, where boxes begin, and their numbers; boxes that are not wanted may be left out.
Values = Callable[[Wanted], Iterator[tuple[str, tuple[int, ...], torch.Tensor]]]


def drawn(model: Transformer, seed: int) -> Values:
    """The starting weights of `perilune.model.initialize`. All are drawn on every rank, so that the layout changes
    none; model: an outline, not cut yet."""
    config = model.config
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    buffers = {name: tuple(value.shape) for name, value in model.named_buffers()}
    return lambda wanted: initial_values(config, shapes, buffers, seed)


def stored(folder: str | Path, model: Transformer) -> Values:
    """The weights of a released checkpoint, tensor by tensor, and only those that are wanted; model: as for `drawn`."""
    whole = {name: value.to("meta") for name, value in _tensors(model).items()}

    def read(wanted: Wanted) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        with open_checkpoint(folder) as files:
            for entry in files.entries:
                (place,) = places_of(whole, entry)
                shape = tuple(place.shape) if entry.index is None else (1, *place.shape)
                begin = [0] * len(shape)
                if entry.index is not None:
                    begin[0] = entry.index
                if entry.rows is not None:
                    begin[0 if entry.index is None else 1] = entry.rows[0]
                if wanted(entry.param, begin, shape):
                    value = torch.empty(place.shape, dtype=place.dtype)
                    files.fill([Piece(entry, (value,))])
                    yield entry.param, tuple(begin), value.view(shape)

    return read


def give_memory(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Memory for modules made on "meta", in place, unset; sharded parameters get their own part of it."""
    for module in modules:
        module.to_empty(device=device)


@torch.no_grad()
def fill(model: Transformer, layout: Layout, shapes: Mapping[str, Sequence[int]], values: Values) -> None:
    """Copy what this rank holds of `values` into the model. shapes: of whole parameters.

    Raises Error for a parameter or buffer that `values` leaves unset.
    """
    parts = {name: local(value.detach()) for name, value in _tensors(model).items()}
    boxes = {
        name: layout.boxes(name, shapes[name]) if name in shapes else [_all_of(part)] for name, part in parts.items()
    }
    left = {name: part.numel() for name, part in parts.items()}

    def wanted(name: str, begin: Sequence[int], size: Sequence[int]) -> bool:
        return any(_overlap(box, begin, size) is not None for box in boxes.get(name, ()))

    for name, begin, value in values(wanted):
        for box in boxes.get(name, ()):
            both = _overlap(box, begin, value.shape)
            if both is not None:
                low, high = both
                source = value[tuple(slice(a - b, c - b) for a, c, b in zip(low, high, begin, strict=True))]
                at = tuple(slice(a - b, c - b) for a, c, b in zip(low, high, box.begin, strict=True))
                box.of_part(parts[name])[at].copy_(source)
                left[name] -= source.numel()
    unset = sorted(name for name, count in left.items() if count)
    if unset:
        raise Error(f"{len(unset)} parameters have no values: {', '.join(unset[:5])}")


def _tensors(model: Transformer) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _all_of(part: torch.Tensor) -> Box:
    none = (0,) * part.dim()
    return Box(none, tuple(part.shape), none)


def _overlap(box: Box, begin: Sequence[int], size: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """First and end corner of what two boxes of the whole share."""
    low = tuple(map(max, box.begin, begin))
    ends = ((a + n, b + m) for a, n, b, m in zip(box.begin, box.size, begin, size, strict=True))
    high = tuple(min(pair) for pair in ends)
    return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None


__all__ = ["Values", "Wanted", "drawn", "fill", "give_memory", "stored"]
