"""The CUDA kernels of KDA decode on a CPU: compiled as C++ with cuda_on_cpu.h and run thread by thread.

Finds wrong numbers, deadlocks and some races where there is no GPU; says nothing about speed or memory ordering.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

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
    for name, body in BODIES.items():
        start = re.search(rf"__device__ __forceinline__ \w+ {name}\([^)]*\) \{{", text)
        assert start, name
        end, depth = start.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        text = f"{text[: start.end()]} {body} }}{text[end:]}"
    text = text.replace(
        "extern __shared__ __align__(128) unsigned char memory[];", "unsigned char *memory = shared_memory;"
    )
    text = text.replace("__shared__ ", "static ")
    assert "asm" not in text
    return text


@functools.cache
def library(kernel: str, defines: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    """A kernel for some values of its macros."""
    folder = Path(tempfile.mkdtemp(prefix="cuda_on_cpu"))
    (folder / "kernel.cpp").write_text(f'#include "{Path(__file__).parent}/cuda_on_cpu.h"\n{source(kernel)}{ENTRY}')
    # No contraction: the GPU's compiler is asked for none where bits must agree. Symbolic: `step` is a name of glibc.
    flags = [
        *(["-mfma"] if platform.machine() == "x86_64" else []),
        "-O1",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-std=c++17",
        "-w",
        "-shared",
        "-fPIC",
    ]
    flags += ["-Wl,-Bsymbolic", *(f"-D{key}={value}" for key, value in defines)]
    flags += [f"-DKERNEL={kernel}"]
    subprocess.run(["g++", *flags, "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True, timeout=120)
    loaded = ctypes.CDLL(str(folder / "kernel.so"))
    shutil.rmtree(folder)
    return loaded


def launch(name, defines, arguments, device) -> None:
    """Stands in for decode_cuda's launch."""
    layers = getattr(arguments, "layers", 1)
    counter = ctypes.c_int(0)
    grid = min(layers * arguments.heads * arguments.sequences, RESIDENT), 1
    given = arguments if isinstance(arguments, decode_cuda._Table) else decode_cuda._One(arguments)
    given.counter = ctypes.addressof(counter)
    failed = library(name, defines).run(ctypes.byref(given), *grid, decode_cuda.THREADS, 1)
    assert not failed, {1: "a block hangs", 2: "copies are in flight at the end"}[failed]


@pytest.fixture
def cuda_on_cpu(monkeypatch) -> None:
    """decode_cuda on CPU tensors, in this test."""
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    monkeypatch.setattr(decode_cuda, "_launch", launch)
