"""Content-addressed layers on disk, and the memory images that are made of them.

    layers/ID          never changes; ID is the BLAKE2b checksum of its bytes
    images/KEY.ram     the layers of one memory laid over each other: a cache that can be made again at any time;
                       KEY.layers names them
    staging/NAME/      captures on their way in; emptied at every start

A layer is committed in this order: written, synced, renamed into `layers/`, then named by the store's transaction.
What a crash leaves behind is therefore either named and whole, or not named and removed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perilune.sandbox.errors import BadSnapshot, Exhausted, Recoverable
from perilune.sandbox.merge import merge, write_pages
from perilune.sandbox.pages import Layer, lay_over, open_layer
from perilune.sandbox.sparse import copy_into, copy_sparse, fill_holes
from perilune.sandbox.store import LayerRow

_CHUNK = 1 << 20
# Laying this much over a machine's memory at its start costs less than making an image of it first.
PATCH_BYTES = 32 << 20


@dataclass(frozen=True)
class Memory:
    """A memory ready to be started from: an image of the first `base` layers, and the layers still to be laid over."""

    image: Path
    base: tuple[str, ...]
    patches: tuple[Path, ...]


class Layers:
    """The layer files of one root directory. Methods block: call them in threads. limit: bytes of disk, for all."""

    def __init__(self, root: Path, limit: int) -> None:
        self.root = root
        self.limit = limit
        self._layers = root / "layers"
        self._images = root / "images"
        self._staging = root / "staging"
        for directory in (self._layers, self._images, self._staging):
            directory.mkdir(parents=True, exist_ok=True, mode=0o711)
        self._verified: set[str] = set()
        self._lock = threading.Lock()
        self._building: dict[str, threading.Lock] = {}
        self._held: Counter[Path] = Counter()

    # At the start

    def reconcile(self, known: Iterable[str], boot: str) -> list[str]:
        """Remove what no transaction named: staged captures and unnamed layers. Returns what was removed.

        boot: this boot of the host. Images of another one may be torn (they are not synced) and go as well.
        """
        removed = []
        names = set(known)
        for path in self._staging.iterdir():
            shutil.rmtree(path, ignore_errors=True)
            removed.append(f"staging/{path.name}")
        for path in self._layers.iterdir():
            if path.name not in names:
                path.unlink()
                removed.append(f"layers/{path.name}")
        mark = self._images / "boot"
        same = mark.exists() and mark.read_text() == boot
        for path in self._images.glob("*" if not same else "*.new*"):
            path.unlink()
        mark.write_text(boot)
        return removed

    # Layers

    def path(self, layer: str) -> Path:
        """Where a layer's file is."""
        return self._layers / layer

    @contextlib.contextmanager
    def staged(self, name: str) -> Iterator[Path]:
        """A directory for a capture on its way in, removed afterwards."""
        directory = self._staging / name
        shutil.rmtree(directory, ignore_errors=True)
        try:
            directory.mkdir(mode=0o700)
        except OSError as error:
            raise Recoverable(f"no room for a capture: {error}") from error
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def take(self, path: Path, kind: str) -> LayerRow:
        """Move a staged file in; raises `Exhausted` before anything is written if the quota does not allow it."""
        status = path.stat()
        self.reserve(status.st_blocks << 9)
        with path.open("rb+") as file:
            digest = _checksum(file.fileno())
            os.fchmod(file.fileno(), 0o444)
            os.fdatasync(file.fileno())
        return self._name(path, digest, kind, status.st_size)

    def copy(self, path: Path, kind: str, staging: Path) -> LayerRow:
        """Copy a file in that somebody else may still have open, and be able to change."""
        status = path.lstat()
        self.reserve(status.st_blocks << 9)
        target = staging / f"copy-{path.name}"
        copy_sparse(path, target)
        return self.take(target, kind)

    def _name(self, path: Path, digest: str, kind: str, size: int) -> LayerRow:
        target = self._layers / digest
        if not target.exists():
            os.rename(path, target)
            fd = os.open(self._layers, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        self._verified.add(digest)
        return LayerRow(digest, kind, size)

    def verify(self, layer: str) -> Path:
        """The layer's file, its checksum compared once for as long as this object lives."""
        path = self._layers / layer
        if layer not in self._verified:
            try:
                with path.open("rb") as file:
                    found = _checksum(file.fileno())
            except FileNotFoundError:
                raise BadSnapshot(f"layer {layer}: its file is gone") from None
            if found != layer:
                raise BadSnapshot(f"layer {layer}: its bytes have the checksum {found}")
            self._verified.add(layer)
        return path

    def remove(self, rows: Iterable[LayerRow]) -> None:
        """Delete layers that no snapshot uses; machines that have them open keep them until they end."""
        gone = {row.id for row in rows}
        for layer in gone:
            (self._layers / layer).unlink(missing_ok=True)
            self._verified.discard(layer)
        for listing in self._images.glob("*.layers"):
            if gone.intersection(listing.read_text().split()):
                listing.with_suffix(".ram").unlink(missing_ok=True)
                listing.unlink()

    # The quota

    def used(self) -> int:
        """Bytes on disk of layers and images."""
        total = 0
        for directory in (self._layers, self._images):
            for entry in os.scandir(directory):
                with contextlib.suppress(FileNotFoundError):
                    total += entry.stat().st_blocks << 9
        return total

    def reserve(self, size: int) -> None:
        """Raise `Exhausted` if `size` more bytes go over the limit even without images."""
        with self._lock:
            used = self.used()
            if used + size <= self.limit:
                return
            images = [path for path in self._images.glob("*.ram") if not self._held[path]]
            for path in sorted(images, key=lambda path: path.stat().st_atime):
                used -= path.stat().st_blocks << 9
                path.unlink()
                if used + size <= self.limit:
                    return
        raise Exhausted(f"disk quota: {used} bytes are used, {size} more go over the limit of {self.limit}")

    # Memory

    def memory(self, layers: Sequence[str], size: int, copies: int, whole: bool = False) -> Memory:
        """What `copies` machines of this memory start from. whole: make the image whatever its patches cost.

        The image stays where it is until `release`.
        """
        paths = [self.verify(layer) for layer in layers]
        built, base = self._hold_longest(layers, size)
        try:
            missing = [open_layer(path) for path in paths[built:]]
            cost = sum(layer.data_bytes for layer in missing)
            if base is not None and not whole and cost * copies <= PATCH_BYTES:
                held, base = base, None
                return Memory(held, tuple(layers[:built]), tuple(paths[built:]))
            image = self._build(layers, base, missing, size)
            return Memory(image, tuple(layers), ())
        finally:
            if base is not None:
                self._let_go(base)

    def release(self, memory: Memory) -> None:
        """Its machines have opened it, or will not."""
        self._let_go(memory.image)

    def _hold_longest(self, layers: Sequence[str], size: int) -> tuple[int, Path | None]:
        """The image that is there of the most of the first layers, and of how many."""
        with self._lock:
            for built in range(len(layers), 0, -1):
                image = self._image(layers[:built], size)
                if image.exists():
                    self._held[image] += 1
                    return built, image
        return 0, None

    def _let_go(self, image: Path) -> None:
        with self._lock:
            self._held[image] -= 1
            if self._held[image] <= 0:
                del self._held[image]

    def _image(self, layers: Sequence[str], size: int) -> Path:
        key = hashlib.blake2b(f"{size} {' '.join(layers)}".encode(), digest_size=16).hexdigest()
        return self._images / f"{key}.ram"

    def _build(self, layers: Sequence[str], base: Path | None, missing: Sequence[Layer], size: int) -> Path:
        """Lay `missing` over a copy of `base`; the result is held."""
        target = self._image(layers, size)
        with self._lock:
            lock = self._building.setdefault(target.name, threading.Lock())
        with lock:
            with self._lock:
                if target.exists():
                    self._held[target] += 1
                    return target
            self.reserve(sum(layer.data_bytes for layer in missing))
            new = target.with_suffix(f".new{threading.get_ident()}")
            fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o444)
            try:
                if base is not None:
                    copy_into(base, fd, follow=True)
                os.ftruncate(fd, size)
                for layer in missing:
                    lay_over(layer, fd)
                fill_holes(fd, size)
                target.with_suffix(".layers").write_text(" ".join(layers))
                with self._lock:
                    os.rename(new, target)
                    self._held[target] += 1
            except BaseException as error:
                new.unlink()
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise Exhausted(f"no room for a memory image of {size >> 20} MiB: {error}") from error
                raise
            finally:
                os.close(fd)
        return target

    def extend(
        self, capture: Path, base: Sequence[str], previous: Sequence[str], staging: Path
    ) -> tuple[tuple[str, ...], list[LayerRow]]:
        """Make a capture the newest layer of a memory; returns all its layers, and the rows of new ones.

        base: the layers in the image that the machine was started from. previous: those of its last snapshot.
        """
        opened = [open_layer(self.path(layer)) for layer in previous]
        # After a merge the image's layers are not the first ones any more; then every layer is looked at.
        shared = len(base) if tuple(previous[: len(base)]) == tuple(base) else 0
        merged = merge(open_layer(capture), opened[shared:], opened)
        if merged is None:
            return tuple(previous), []
        kept, pages = merged
        if isinstance(pages, Layer):
            new = capture
        else:
            new = staging / "merged"
            write_pages(new, pages, open_layer(capture).size)
        row = self.take(new, "memory")
        return (*previous[:kept], row.id), [row]


def _checksum(fd: int) -> str:
    digest = hashlib.blake2b(digest_size=32)
    buffer = bytearray(_CHUNK)
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb", buffering=0, closefd=False) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


__all__ = ["Layers", "Memory"]
