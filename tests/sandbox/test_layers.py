"""Layers against a plain model: a dictionary of pages."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.sandbox.errors import BadSnapshot, Exhausted
from perilune.sandbox.layers import PATCH_BYTES, Layers
from perilune.sandbox.pages import PAGE, coalesce, header_size, lay_over, open_layer, write_layer

PAGES = 64
SIZE = PAGES * PAGE


def page(value: int) -> bytes:
    return value.to_bytes(8, "little") * (PAGE // 8)


def write(path: Path, pages: dict[int, int]) -> None:
    order = sorted(pages)
    write_layer(path, SIZE, coalesce(order), [page(pages[number]) for number in order])


def contents(image: Path, patches: tuple[Path, ...] = ()) -> list[int]:
    data = bytearray(image.read_bytes().ljust(SIZE, b"\0"))
    for patch in patches:
        layer, raw = open_layer(patch), patch.read_bytes()
        for place, offset, length in layer.places():
            data[place : place + length] = raw[offset : offset + length]
    return [int.from_bytes(data[i * PAGE : i * PAGE + 8], "little") for i in range(PAGES)]


@given(st.sets(st.integers(0, 500)))
def test_coalesce(pages: set[int]) -> None:
    """Extents are ascending, do not touch, and hold the very same pages."""
    extents = coalesce(sorted(pages))
    assert [number for first, count in extents for number in range(first, first + count)] == sorted(pages)
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(extents))


# A machine's life: writes between captures; "live" captures go on, others resume from what was captured.
steps = st.lists(
    st.tuples(st.dictionaries(st.integers(0, PAGES - 1), st.integers(0, 3), max_size=20), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(steps=steps, patch_limit=st.sampled_from([0, 8 * PAGE, PATCH_BYTES]))
def test_any_chain_of_captures_is_the_memory_it_was_taken_of(
    steps: list[tuple[dict[int, int], bool]], patch_limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Live captures, resumes, merges, patches and images in any order: every snapshot stays what it was."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("perilune.sandbox.layers.PATCH_BYTES", patch_limit)
        place = tmp_path_factory.mktemp("layers")
        layers = Layers(place, 1 << 30)
        memory = [0] * PAGES
        base: tuple[str, ...] = ()
        chain: tuple[str, ...] = ()
        dirty: dict[int, int] = {}
        taken: list[tuple[tuple[str, ...], list[int]]] = []
        for number, (writes, live) in enumerate(steps):
            for at, value in writes.items():
                memory[at] = value
                dirty[at] = value
            with layers.staged(f"s{number}") as staging:
                write(staging / "memory", dirty)
                chain, _ = layers.extend(staging / "memory", base, chain, staging)
            taken.append((chain, list(memory)))
            if not live and chain:
                started = layers.memory(chain, SIZE, 1)
                assert contents(started.image, started.patches) == memory
                base = started.base
                # What is patched in is written by the machine's process, and so found as written.
                dirty = {
                    n: memory[n]
                    for patch in started.patches
                    for f, c in open_layer(patch).extents
                    for n in range(f, f + c)
                }
        for known, expected in taken:
            if known:
                built = layers.memory(known, SIZE, 1, whole=True)
                assert contents(built.image) == expected


def test_the_number_of_layers_is_logarithmic(tmp_path: Path) -> None:
    """200 captures of one page each, over a first layer of 32: the first stays, and few others are left."""
    layers = Layers(tmp_path, 1 << 30)
    rng = random.Random(0)
    chain: tuple[str, ...] = ()
    written = 0
    for number in range(200):
        with layers.staged("s") as staging:
            pages = {n: n + 1 for n in range(32)} if number == 0 else {rng.randrange(PAGES): number + 100}
            write(staging / "memory", pages)
            chain, rows = layers.extend(staging / "memory", chain, chain, staging)
            written += sum(row.bytes for row in rows)
        if number == 0:
            first = chain[0]
    assert chain[0] == first
    assert len(chain) <= 8
    assert written < 200 * 40 * PAGE


def test_nothing_changed_is_no_layer(tmp_path: Path) -> None:
    """A capture with the pages of the last one adds nothing."""
    layers = Layers(tmp_path, 1 << 30)
    with layers.staged("a") as staging:
        write(staging / "memory", {3: 7, 4: 8})
        chain, rows = layers.extend(staging / "memory", (), (), staging)
    assert len(rows) == 1
    with layers.staged("b") as staging:
        write(staging / "memory", {3: 7, 4: 8})
        again, rows = layers.extend(staging / "memory", (), chain, staging)
    assert (again, rows) == (chain, [])


@pytest.mark.parametrize("where", ["magic", "table", "page", "end"])
def test_a_changed_byte_is_found(tmp_path: Path, where: str) -> None:
    """No layer whose bytes are not those of its name is ever used."""
    layers = Layers(tmp_path, 1 << 30)
    with layers.staged("a") as staging:
        write(staging / "memory", {3: 7, 9: 8})
        chain, _ = layers.extend(staging / "memory", (), (), staging)
    path = layers.path(chain[0])
    path.chmod(0o644)
    offset = {"magic": 0, "table": 33, "page": header_size(2) + 5, "end": path.stat().st_size - 1}[where]
    with path.open("rb+") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(BadSnapshot, match=chain[0]):
        Layers(tmp_path, 1 << 30).memory(chain, SIZE, 1)


def test_a_cut_or_crossed_layer_is_refused(tmp_path: Path) -> None:
    """Tables that do not fit their file."""
    good = tmp_path / "good"
    write(good, {3: 7, 9: 8})
    data = good.read_bytes()
    for name, bad in {
        "cut": data[:-1],
        "short": data[:40],
        "other": b"x" * 100,
        "outside": data[:32] + (1 << 40).to_bytes(8, "little") + data[40:],
        "crossed": data[:48] + (0).to_bytes(8, "little") + data[56:],
    }.items():
        path = tmp_path / name
        path.write_bytes(bad)
        with pytest.raises(BadSnapshot, match=name):
            open_layer(path)


def test_the_quota_refuses_before_it_writes(tmp_path: Path) -> None:
    """Images go first, then `Exhausted` with the numbers."""
    layers = Layers(tmp_path, 1 << 20)
    with layers.staged("a") as staging:
        write(staging / "memory", {n: n + 1 for n in range(50)})
        chain, _ = layers.extend(staging / "memory", (), (), staging)
    memory = layers.memory(chain, SIZE, 1)
    room = (1 << 20) - layers.path(chain[0]).stat().st_size - (64 << 10)
    with pytest.raises(Exhausted, match="disk quota"):
        layers.reserve(room)  # a machine is being started from the image
    assert memory.image.exists()
    layers.release(memory)
    layers.reserve(room)
    assert not memory.image.exists()
    with pytest.raises(Exhausted, match="disk quota"):
        layers.reserve(1 << 20)
    assert layers.memory(chain, SIZE, 1).image.exists()


def test_reconcile_keeps_what_is_named(tmp_path: Path) -> None:
    """Layers without a name in the store and staged captures go; images of another boot go."""
    layers = Layers(tmp_path, 1 << 30)
    rows = []
    for number in range(2):
        with layers.staged("a") as staging:
            write(staging / "memory", {number: 7})
            _, new = layers.extend(staging / "memory", (), (), staging)
            rows += new
    image = layers.memory([rows[0].id], SIZE, 1).image
    (tmp_path / "staging" / "left").mkdir()
    fresh = Layers(tmp_path, 1 << 30)
    removed = fresh.reconcile([rows[0].id], "boot-1")
    assert sorted(removed) == sorted([f"layers/{rows[1].id}", "staging/left"])
    assert not image.exists()
    image = fresh.memory([rows[0].id], SIZE, 1).image
    assert Layers(tmp_path, 1 << 30).reconcile([rows[0].id], "boot-1") == []
    assert image.exists()


def test_lay_over_keeps_holes(tmp_path: Path) -> None:
    """An image has blocks only where a layer has pages."""
    write(tmp_path / "layer", {60: 7})
    image = tmp_path / "image"
    with image.open("wb+") as file:
        os.ftruncate(file.fileno(), SIZE)
        lay_over(open_layer(tmp_path / "layer"), file.fileno())
    assert contents(image) == [0] * 60 + [7] + [0] * 3
    assert image.stat().st_blocks * 512 <= 2 * PAGE
