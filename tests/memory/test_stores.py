"""Stores give back the same bytes, say when there is no room, and leave nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from perilune import Error
from perilune.memory import FileStore, MemoryStore, Store


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else FileStore(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("numbers", [0, 1, 100_003])
def test_the_same_bytes_whatever_happens_to_the_tensor(store: Store, dtype: torch.dtype, numbers: int) -> None:
    x = torch.randint(0, 256, (numbers * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    kept = x.clone().view(torch.uint8)
    ticket = store.put(x)
    assert store.held == x.nbytes
    x.zero_()
    store.prefetch(ticket)
    for _ in range(2):
        got = store.get(ticket)
        assert got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), kept)
        got.zero_()
    store.drop(ticket)
    assert store.held == 0


def test_files_have_no_names(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    ticket = store.put(torch.ones(1000))
    store.get(ticket)
    assert not list(tmp_path.iterdir())
    descriptor = ticket.descriptor.fileno()
    store.drop(ticket)
    del ticket
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_host_memory_short() -> None:
    store = MemoryStore(limit=100)
    ticket = store.put(torch.ones(20))
    with pytest.raises(Error, match=r"memory.host_bytes is 100; 80 bytes of activations lie there and 24 more"):
        store.put(torch.ones(6))
    store.drop(ticket)
    store.drop(store.put(torch.ones(25)))


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = FileStore(tmp_path)
    ticket = store.put(torch.ones(10))
    store.get(ticket)
    monkeypatch.setattr(os, "pwrite", full)
    late = store.put(torch.ones(10))
    message = rf"memory.nvme is '{tmp_path}': No space left on device with \d"
    with pytest.raises(Error, match=message):
        store.get(late)
    with pytest.raises(Error, match=message):
        store.put(torch.ones(10))


def test_a_write_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, bytes(data)[:7], at))
    store, x = FileStore(tmp_path), torch.arange(50.0)
    assert torch.equal(store.get(store.put(x)), x)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"memory.nvme is .*must be a folder"):
        FileStore(tmp_path / "absent")
