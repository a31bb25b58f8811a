"""A memory layer: some pages of a guest's memory, packed in one file.

    16 bytes   b"perilune-pages1\\n"
    8 bytes    size of the memory, little endian
    8 bytes    number of extents n
    n x 16     first page, number of pages (ascending, not touching)
    zeros      up to the next multiple of PAGE
    pages      the extents' bytes, one after the other

Page data starts at a multiple of the page size, so that file systems with reflinks can share it with an image.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perilune.sandbox.errors import BadSnapshot

PAGE = 4096
MAGIC = b"perilune-pages1\n"
_FIXED = struct.Struct("<16sQQ")
_EXTENT = struct.Struct("<QQ")

# (first page, number of pages)
Extent = tuple[int, int]


@dataclass(frozen=True)
class Layer:
    """An opened layer file: where each extent lies. size: bytes of the guest's memory."""

    path: Path
    size: int
    extents: tuple[Extent, ...]

    @property
    def data_offset(self) -> int:
        return header_size(len(self.extents))

    @property
    def data_bytes(self) -> int:
        return sum(count for _, count in self.extents) * PAGE

    def places(self) -> Iterator[tuple[int, int, int]]:
        """(offset in memory, offset in the file, bytes) of each extent."""
        offset = self.data_offset
        for first, count in self.extents:
            yield first * PAGE, offset, count * PAGE
            offset += count * PAGE


def header_size(extents: int) -> int:
    """Bytes before the first page."""
    return -(-(_FIXED.size + extents * _EXTENT.size) // PAGE) * PAGE


def header(size: int, extents: Sequence[Extent]) -> bytes:
    """The bytes before the first page of a layer with these extents."""
    fixed = _FIXED.pack(MAGIC, size, len(extents))
    table = b"".join(_EXTENT.pack(first, count) for first, count in extents)
    return (fixed + table).ljust(header_size(len(extents)), b"\0")


def open_layer(path: Path) -> Layer:
    """Read a layer's table; raises `BadSnapshot` if it is not a whole layer."""
    with path.open("rb") as file:
        start = file.read(_FIXED.size)
        if len(start) < _FIXED.size or not start.startswith(MAGIC):
            raise BadSnapshot(f"{path.name}: not a memory layer (it starts with {start[:16]!r})")
        _, size, number = _FIXED.unpack(start)
        table = file.read(number * _EXTENT.size)
        length = os.fstat(file.fileno()).st_size
    if len(table) != number * _EXTENT.size:
        raise BadSnapshot(f"{path.name}: its table of {number} extents is cut short")
    layer = Layer(path, size, tuple(_EXTENT.iter_unpack(table)))
    _check(layer, length)
    return layer


def _check(layer: Layer, length: int) -> None:
    end = 0
    for first, count in layer.extents:
        if first < end or count < 1 or (first + count) * PAGE > layer.size:
            raise BadSnapshot(f"{layer.path.name}: extent ({first}, {count}) overlaps or leaves the memory")
        end = first + count
    expected = layer.data_offset + layer.data_bytes
    if length != expected:
        raise BadSnapshot(f"{layer.path.name}: {length} bytes, its table says {expected}")


def write_layer(path: Path, size: int, extents: Sequence[Extent], chunks: Iterable[bytes | memoryview]) -> None:
    """Write a layer file; `chunks` joined are the pages of `extents`."""
    with path.open("xb", buffering=1 << 20) as file:
        file.write(header(size, extents))
        for chunk in chunks:
            file.write(chunk)


def lay_over(layer: Layer, image: int) -> None:
    """Copy a layer's pages to their places in the open image file, sharing blocks where the file system can."""
    with layer.path.open("rb") as source:
        for place, offset, length in layer.places():
            done = 0
            while done < length:
                moved = os.copy_file_range(source.fileno(), image, length - done, offset + done, place + done)
                if not moved:
                    raise BadSnapshot(f"{layer.path.name}: it was cut while it was read")
                done += moved


def coalesce(pages: Iterable[int]) -> list[Extent]:
    """Ascending page numbers as extents."""
    extents: list[Extent] = []
    first = count = 0
    for page in pages:
        if count and page == first + count:
            count += 1
            continue
        if count:
            extents.append((first, count))
        first, count = page, 1
    if count:
        extents.append((first, count))
    return extents


__all__ = [
    "PAGE",
    "Extent",
    "Layer",
    "coalesce",
    "header",
    "header_size",
    "lay_over",
    "open_layer",
    "write_layer",
]
