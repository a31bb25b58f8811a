"""What brings a checkpoint's bytes from its files: the same bits by every reader, whole and in parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import tiny_config

from perilune import Error, Transformer
from perilune.config import QuantConfig
from perilune.model import (
    Piece,
    Share,
    give_memory_inplace,
    initialize,
    load,
    open_checkpoint,
    outline,
    places_of,
    save,
)

fast = pytest.mark.skipif("sys.platform != 'linux'", reason="fastsafetensors has binaries for Linux only")
READERS = ["safetensors", pytest.param("fastsafetensors", marks=fast)]


@pytest.fixture(params=["kimi_linear", "kimi_k3", "packed"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Several files; tensors of one expert lie in different ones."""
    config = tiny_config("kimi_k3" if request.param == "packed" else request.param)
    if request.param == "packed":
        config = dataclasses.replace(config, quant=QuantConfig())
    save(initialize(Transformer(config), 3), tmp_path / "it", max_shard_bytes=60_000)
    assert len(list((tmp_path / "it").glob("*.safetensors"))) > 2
    return tmp_path / "it"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("packed", [False, True])
def test_every_reader_gives_the_bits_of_the_files(folder: Path, reader: str, packed: bool) -> None:
    one, two = load(folder, packed=packed), load(folder, packed=packed, reader=reader)  # type: ignore[arg-type]
    assert one.state_dict().keys() == two.state_dict().keys()
    for name, value in one.state_dict().items():
        assert value.dtype == two.state_dict()[name].dtype
        assert torch.equal(value, two.state_dict()[name]), name


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("dim", [0, 1])
def test_shares_are_parts_of_the_whole_and_no_other_tensor_is_touched(folder: Path, reader: str, dim: int) -> None:
    """Halves of all that can be halved; every other tensor is left as it was, NaN."""
    whole = load(folder)
    with open_checkpoint(folder, reader) as stored:  # type: ignore[arg-type]
        places = {entry: places_of(_tensors(whole), entry)[0] for entry in stored.entries}
        wanted = [entry for entry in stored.entries if not entry.packed and _halves(places[entry], dim)][::2]
        for part in range(2):
            model = give_memory_inplace(outline(stored.config), stored.dtypes(), torch.device("cpu"))
            tensors = dict(model.named_parameters()) | dict(model.named_buffers())
            for value in tensors.values():
                value.detach().fill_(float("nan"))
            pieces = []
            for entry in wanted:
                (place,) = places_of(tensors, entry)
                pieces.append(Piece(entry, (place.chunk(2, dim)[part],), Share(dim, part, 2)))
            size = stored.fill(pieces)
            asked = sum(piece.targets[0].nbytes for piece in pieces)
            total = sum(stored.tensors[entry.name].nbytes for entry in wanted)
            # A vector that is padded, or has another shape in the file, is read whole.
            assert asked <= size <= (total if reader == "fastsafetensors" else asked + 4096 * len(wanted))
            written = 0
            for entry in stored.entries:
                (mine,), theirs = places_of(tensors, entry), places[entry]
                if entry in wanted:
                    assert torch.equal(mine.chunk(2, dim)[part], theirs.chunk(2, dim)[part]), entry.name
                    assert mine.chunk(2, dim)[1 - part].isnan().all(), entry.name
                    written += 1
                else:
                    assert mine.isnan().all(), entry.name
            assert written == len(wanted) > 5


def _halves(place: torch.Tensor, dim: int) -> bool:
    return place.dim() > dim and place.shape[dim] % 2 == 0


def _tensors(model: Transformer) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def test_a_reader_that_is_not_there_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Error, match="reader is 'mmap'; allowed: 'safetensors', 'fastsafetensors'"):
        load(folder, reader="mmap")  # type: ignore[arg-type]
    monkeypatch.setattr("perilune.model.reading.find_spec", lambda name: None)
    with pytest.raises(Error, match=r"not installed; pip install 'perilune\[fastsafetensors\]'"):
        load(folder, reader="fastsafetensors")


@fast
def test_a_file_that_is_cut_while_it_is_read_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing hangs: the library reads in threads of its own."""
    from perilune.model import reading_fast

    inner: Callable[..., object] = reading_fast.read_tensors

    def cut(path: Path, *rest: object) -> object:
        path.write_bytes(path.read_bytes()[:2000])
        return inner(path, *rest)

    monkeypatch.setattr(reading_fast, "read_tensors", cut)
    with pytest.raises(Error, match="fastsafetensors cannot read"):
        load(folder, reader="fastsafetensors")


@fast
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library opens the files by name once more: weights of two checkpoints must not become one model."""
    from perilune.model import reading_fast

    inner: Callable[..., object] = reading_fast.read_tensors
    others = [initialize(Transformer(load(folder).config), 4)]

    def replace(path: Path, *rest: object) -> object:
        if others:
            save(others.pop(), folder, max_shard_bytes=60_000)
        return inner(path, *rest)

    monkeypatch.setattr(reading_fast, "read_tensors", replace)
    with pytest.raises(Error, match="was replaced while it was read"):
        load(folder, reader="fastsafetensors")
