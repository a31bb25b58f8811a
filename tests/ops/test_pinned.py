"""Pinned host memory: exact bytes, told to CUDA while they are mapped and only then."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from perilune.ops import pinned
from perilune.ops.pinned import LEAST, host_empty


class Runtime:
    """Stands for CUDA's runtime: knows what is registered, and reads it when it is told to forget it."""

    def __init__(self, answer: int = 0) -> None:
        self.known: dict[int, int] = {}
        self.answer = answer

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == 0
        self.known[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        with open("/proc/self/maps") as maps:
            ranges = [line.split()[0].split("-") for line in maps]
        assert any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)
        del self.known[address]
        return 0


@pytest.mark.parametrize("size", [LEAST, 3 * LEAST + 2, 5 * LEAST])
def test_it_is_registered_as_long_as_it_is_mapped(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    x = host_empty((size // 2,), torch.bfloat16, pin=True)
    assert list(runtime.known.values()) == [size]
    x.fill_(3.0)
    part = x[5:]
    del x
    gc.collect()
    assert runtime.known
    assert float(part.float().min()) == 3.0
    del part
    gc.collect()
    assert not runtime.known


def test_small_and_plain_memory_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("CUDA was asked"))
    assert host_empty((4, LEAST), torch.float32, pin=False).shape == (4, LEAST)
    assert host_empty((0,), torch.float32, pin=False).numel() == 0
    seen: list[bool] = []
    monkeypatch.setattr(pinned.torch, "empty", lambda *a, pin_memory, **k: seen.append(pin_memory))
    host_empty((3,), torch.uint8, pin=True)
    assert seen == [True]


def test_what_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="host memory cannot be mapped"):
        host_empty((1 << 60,), torch.uint8, pin=True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(answer=2))
    with pytest.raises(RuntimeError, match="cannot be pinned: CUDA error 2"):
        host_empty((LEAST,), torch.uint8, pin=True)


@pytest.mark.gpu
def test_gpu_copies_run_beside_the_host() -> None:
    """Really pinned: a copy out behind a kernel that takes 50 ms returns at once, and the bytes are right."""
    x = torch.randn(1 << 26, device="cuda")
    host = host_empty(x.shape, x.dtype, pin=True)
    assert host.is_pinned()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(100_000_000)
    host.copy_(x, non_blocking=True)
    end.record()
    assert not end.query()
    end.synchronize()
    assert torch.equal(host, x.cpu())
    assert torch.equal(host.to("cuda", non_blocking=True), x)
    torch.cuda.synchronize()
    for _ in range(20):
        del host
        host = host_empty(x.shape, x.dtype, pin=True)
        host[-1] = 1.0
    assert host.is_pinned()
