"""Stores give back the same bytes, say when there is no room, and leave nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
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


def test_a_tensor_of_another_device_would_stay_there() -> None:
    with pytest.raises(Error, match="MemoryStore was given a tensor of meta"):
        MemoryStore().put(torch.ones(3, device="meta"))


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


def test_past_the_page_cache_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system refuses direct transfers, when they are asked for or when one is made, files are as good."""
    for refused in ("never", "asked", "made"):
        with monkeypatch.context() as patch:
            control, write = fcntl.fcntl, os.pwrite

            def refuse(fd: int, command: int, flags: int = 0) -> int:
                if command == fcntl.F_SETFL and flags & os.O_DIRECT:
                    raise OSError(errno.EINVAL, "no")
                return control(fd, command, flags)  # noqa: B023

            def picky(fd: int, data: memoryview, at: int) -> int:
                if control(fd, fcntl.F_GETFL) & os.O_DIRECT:  # noqa: B023
                    raise OSError(errno.EINVAL, "no")
                return write(fd, data, at)  # noqa: B023

            if refused == "asked":
                patch.setattr(fcntl, "fcntl", refuse)
            if refused == "made":
                patch.setattr(os, "pwrite", picky)
            store, x = FileStore(tmp_path), torch.randn(5001)
            tickets = [store.put(x * i) for i in range(5)]
            assert all(torch.equal(store.get(ticket), x * i) for i, ticket in enumerate(tickets))


def test_transfers_are_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses, offsets and sizes are whole pages, whatever the tensor's size."""
    seen: list[tuple[int, int, int]] = []
    write = os.pwrite

    def note(fd: int, data: memoryview, at: int) -> int:
        seen.append((torch.frombuffer(data, dtype=torch.uint8).data_ptr(), len(data), at))
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", note)
    store = FileStore(tmp_path)
    for numbers in (1, 1024, 100_003):
        store.get(store.put(torch.ones(numbers)))
    assert len(seen) >= 3
    assert all(number % 4096 == 0 for one in seen for number in one)


def test_writes_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, waiting = os.pwrite, threading.Semaphore(0)

    def held_up(fd: int, data: memoryview, at: int) -> int:
        assert waiting.acquire(timeout=20)
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", held_up)
    store = FileStore(tmp_path, pending=8 * 4096)
    tickets = [store.put(torch.full((1024,), float(i))) for i in range(8)]
    late = threading.Thread(target=lambda: tickets.append(store.put(torch.full((1024,), 8.0))))
    late.start()
    late.join(0.2)
    assert late.is_alive()
    for _ in range(9):
        waiting.release()
    late.join(20)
    assert [store.get(ticket)[0].item() for ticket in tickets] == list(range(9))


def test_no_memory_for_a_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    store, x = FileStore(tmp_path), torch.ones(3)
    monkeypatch.setattr(torch, "empty", none_left)
    with pytest.raises(Error, match=r"host memory: a buffer of 4096 bytes for files cannot be had"):
        store.put(x)
    assert store.held == 0


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"memory.nvme is .*must be a folder"):
        FileStore(tmp_path / "absent")
