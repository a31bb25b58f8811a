"""latent.cu on a CPU: compiled as C++ with hopper_on_cpu.h and run thread by thread, clusters too.

Finds wrong numbers, deadlocks and some races where there is no GPU; says nothing about speed or memory ordering.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from perilune.ops.mla import paged_cuda

ENTRY = """
extern "C" int run(const Arguments *given, int blocks, int sequences, int seed) {
  return run_grid([given] { latent(*given); }, blocks, sequences, seed);
}
"""


@functools.cache
def library(defines: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    """The kernel for some values of its macros."""
    text = paged_cuda.SOURCES[-1].read_text()
    shared = "extern __shared__ __align__(1024) unsigned char memory[];"
    assert shared in text
    text = text.replace(shared, "unsigned char *memory = shared_of(cluster_rank());")
    folder = Path(tempfile.mkdtemp(prefix="hopper_on_cpu"))
    (folder / "kernel.cpp").write_text(f'#include "{Path(__file__).parent}/hopper_on_cpu.h"\n{text}{ENTRY}')
    flags = [
        "-O1",
        "-fno-strict-aliasing",
        "-std=c++17",
        "-w",
        "-Wno-psabi",
        "-shared",
        "-fPIC",
        "-Wl,-Bsymbolic",
        "-fno-gnu-unique",
    ]
    flags += [f"-D{key}={value}" for key, value in defines]
    subprocess.run(["g++", *flags, "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True, timeout=120)
    loaded = ctypes.CDLL(str(folder / "kernel.so"))
    shutil.rmtree(folder)
    return loaded


def tensor_map(x, rows, columns, stride, box_rows):
    """Stands in for the driver's: what copy_to_all of hopper_on_cpu.h needs."""
    assert columns == stride
    return (ctypes.c_uint64 * 16)(x.data_ptr(), x.element_size(), rows, columns, box_rows)


def launch(defines, grid, arguments, seed=0) -> None:
    failed = library(defines).run(ctypes.byref(arguments), *grid, seed)
    assert not failed, {1: "a block hangs", 2: "copies are in flight at the end"}[failed]


@pytest.fixture
def hopper_on_cpu(monkeypatch) -> None:
    """paged_cuda.split_parts on CPU tensors, in this test."""
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    monkeypatch.setattr(paged_cuda, "tensor_map", tensor_map)
    monkeypatch.setattr(paged_cuda, "_launch", launch)
