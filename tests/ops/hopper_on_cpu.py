"""latent.cu on a CPU: compiled as C++ with hopper_on_cpu.h and run thread by thread, clusters too.

Finds wrong numbers, deadlocks and some races where there is no GPU; says nothing about speed or memory ordering.
"""

from __future__ import annotations

import ctypes
import functools

import pytest
from sources_on_cpu import check, compiled, rewritten, skip_without_compiler, tensor_map

from perilune.ops.mla import paged_cuda

ENTRY = """
extern "C" int run(const Arguments *given, int blocks, int sequences, int seed) {
  return run_grid([given] { latent(*given); }, blocks, sequences, seed);
}
"""


@functools.cache
def library(defines: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    """The kernel for some values of its macros."""
    text = rewritten(paged_cuda.SOURCES[-1].read_text(), {}, 1024, "shared_of(cluster_rank())")
    return compiled("hopper_on_cpu.h", f"{text}{ENTRY}", defines)


def launch(defines, grid, arguments, seed=0) -> None:
    check(library(defines).run(ctypes.byref(arguments), *grid, seed))


@pytest.fixture
def hopper_on_cpu(monkeypatch) -> None:
    """paged_cuda.split_parts on CPU tensors, in this test."""
    skip_without_compiler()
    monkeypatch.setattr(paged_cuda, "tensor_map", tensor_map)
    monkeypatch.setattr(paged_cuda, "_launch", launch)
