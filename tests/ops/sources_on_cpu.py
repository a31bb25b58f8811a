"""CUDA sources as C++ on a CPU: what the emulators of single kernels share.

A header (cuda_on_cpu.h, hopper_on_cpu.h, warp_on_cpu.h) has the words that C++ lacks; functions of inline assembly get
other bodies; the kernel is entered through a function `run` that each emulator writes for itself.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Fused where the sources say so, as on the GPU.
FUSED = ("-mfma",) if platform.machine() == "x86_64" else ()
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def rewritten(text: str, bodies: dict[str, str], alignment: int, memory: str) -> str:
    """The sources with other bodies for the functions named, and `memory` in the place of dynamic shared memory."""
    for name, body in bodies.items():
        start = re.search(rf"__device__ __forceinline__ \w+ {name}\([^{{]*\) \{{", text)
        assert start, name
        end, depth = start.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        text = f"{text[: start.end()]} {body} }}{text[end:]}"
    shared = f"extern __shared__ __align__({alignment}) unsigned char memory[];"
    assert shared in text
    text = text.replace(shared, f"unsigned char *memory = {memory};")
    assert "asm" not in text
    return text


def compiled(header: str, text: str, defines: Iterable[tuple[str, object]], flags: Iterable[str] = ()) -> ctypes.CDLL:
    """A library of `text` behind a header of this folder."""
    folder = Path(tempfile.mkdtemp(prefix="sources_on_cpu"))
    (folder / "kernel.cpp").write_text(f'#include "{HERE}/{header}"\n{text}')
    # Symbolic: `step` is a name of glibc too. Not unique: one process loads many libraries of the same names.
    options = ["-O1", "-fno-strict-aliasing", "-std=c++17", "-w", "-Wno-psabi", "-shared", "-fPIC"]
    options += ["-Wl,-Bsymbolic", "-fno-gnu-unique", *flags, *(f"-D{key}={value}" for key, value in defines)]
    subprocess.run(["g++", *options, "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True, timeout=120)
    loaded = ctypes.CDLL(str(folder / "kernel.so"))
    shutil.rmtree(folder)
    return loaded


def check(failed: int) -> None:
    """What `run_grid` of the headers returned."""
    assert not failed, {1: "a block hangs", 2: "copies are in flight at the end"}[failed]


def tensor_map(x, rows, columns, stride, box_rows):
    """Stands in for the driver's: what the copies of hopper_on_cpu.h need."""
    assert columns == stride
    return (ctypes.c_uint64 * 16)(x.data_ptr(), x.element_size(), rows, columns, box_rows)


def skip_without_compiler() -> None:
    if not shutil.which("g++"):
        pytest.skip("needs g++")


__all__ = ["FUSED", "check", "compiled", "needs_compiler", "rewritten", "skip_without_compiler", "tensor_map"]
