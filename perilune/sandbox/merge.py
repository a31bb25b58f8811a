"""A capture becomes a layer: what has not changed is left out, small layers before it are merged in."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

from perilune.sandbox.pages import PAGE, Layer, coalesce, write_layer

# page -> (file that has it, where in the file)
Pages = dict[int, tuple[Path, int]]


def merge(capture: Layer, above: Sequence[Layer], previous: Sequence[Layer]) -> tuple[int, Layer | Pages] | None:
    """How many layers of `previous` stay, and what comes after them; None if nothing has changed.

    capture: all pages written since the machine's start. above: the layers of `previous` that the image does not have
    from which it was started. A layer is merged with the one before it while that is at most twice as large: their
    number is logarithmic in the number of captures, and so is the number of times that a byte is written again. The
    first layer, which many sandboxes share, is left as it is.
    """
    changed = _changed(capture, above) if above else places(capture)
    if not changed:
        return None
    kept = len(previous)
    whole = not above
    while kept > 1 and previous[kept - 1].data_bytes <= 2 * len(changed) * PAGE:
        kept -= 1
        whole = False
        changed = {**places(previous[kept]), **changed}
    return kept, capture if whole else changed


def places(layer: Layer) -> Pages:
    """Where each page of a layer lies."""
    return {
        (place + at) // PAGE: (layer.path, offset + at)
        for place, offset, length in layer.places()
        for at in range(0, length, PAGE)
    }


def _changed(capture: Layer, above: Sequence[Layer]) -> Pages:
    """The capture's pages without those that are in the newest layer of `above` that has them, with the same bytes."""
    before: Pages = {}
    for layer in above:
        before |= places(layer)
    pages = places(capture)
    files = _Files()
    for page in before.keys() & pages.keys():
        if files.page(pages[page]) == files.page(before[page]):
            del pages[page]
    return pages


class _Files:
    """Maps of layer files."""

    def __init__(self) -> None:
        self._maps: dict[Path, memoryview] = {}

    def page(self, place: tuple[Path, int], count: int = 1) -> memoryview:
        path, offset = place
        if path not in self._maps:
            with path.open("rb") as file:
                self._maps[path] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return self._maps[path][offset : offset + count * PAGE]


def write_pages(path: Path, pages: Pages, size: int) -> None:
    """Write a layer of pages that lie in other layers."""
    order = sorted(pages)
    files = _Files()
    write_layer(path, size, coalesce(order), (files.page(pages[page]) for page in order))


__all__ = ["Pages", "merge", "places", "write_pages"]
