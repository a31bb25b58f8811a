"""The CUDA kernels of KDA decode on a CPU: compiled as C++ with cuda_on_cpu.h and run thread by thread.

Finds wrong numbers, deadlocks and some races where there is no GPU; says nothing about speed or memory ordering.
"""

from __future__ import annotations

import ctypes
import functools

import pytest
from sources_on_cpu import FUSED, check, compiled, rewritten, skip_without_compiler

from perilune.ops.kda import decode_cuda

BODIES = {
    "narrow": "return narrow_host(low, high);",
    "address": "return 0;",
    "wait": "barrier_wait(&barrier, parity);",
    "arrive": "barrier_arrive(&barrier, 0);",
    "expect": "barrier_arrive(&barrier, bytes);",
    "copy16": "bulk_copy(to, from, 16, nullptr);",
    "arrive_copied": "arrive_after_copies(&barrier);",
    "copy": "bulk_copy(to, from, bytes, &barrier);",
    "init": "barrier_init(&barrier, arrivals);",
    "fence": "",
    "follow": "",
    "meet": "gather(reader_meeting, 256);",
    "meet_preparers": "gather(preparer_meeting, 128);",
}
ENTRY = """
extern "C" int run(void *given, int x, int y, int threads, int seed) {
  return run_grid([&] { KERNEL(*static_cast<Given *>(given)); }, {x, y}, threads, SHARED_BYTES, seed);
}
"""
RESIDENT = 5  # blocks: several items each


def source(kernel: str) -> str:
    """The kernel's sources with their assembly replaced."""
    text = "\n".join(path.read_text() for path in decode_cuda.SOURCES[kernel])
    return rewritten(text, BODIES, 128, "shared_memory").replace("__shared__ ", "static ")


@functools.cache
def library(kernel: str, defines: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    """A kernel for some values of its macros."""
    # No contraction: the GPU's compiler is asked for none where bits must agree.
    flags = (*FUSED, "-ffp-contract=off")
    return compiled("cuda_on_cpu.h", f"{source(kernel)}{ENTRY}", (*defines, ("KERNEL", kernel)), flags)


def launch(name, defines, arguments, device) -> None:
    """Stands in for decode_cuda's launch."""
    layers = getattr(arguments, "layers", 1)
    counter = ctypes.c_int(0)
    grid = min(layers * arguments.heads * arguments.sequences, RESIDENT), 1
    given = arguments if isinstance(arguments, decode_cuda._Table) else decode_cuda._One(arguments)
    given.counter = ctypes.addressof(counter)
    check(library(name, defines).run(ctypes.byref(given), *grid, decode_cuda.THREADS, 1))


@pytest.fixture
def cuda_on_cpu(monkeypatch) -> None:
    """decode_cuda on CPU tensors, in this test."""
    skip_without_compiler()
    monkeypatch.setattr(decode_cuda, "_launch", launch)
