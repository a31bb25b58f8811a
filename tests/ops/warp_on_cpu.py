"""Builds a CUDA kernel of perilune/ops/kda for the CPU, with warp_on_cpu.h in the place of warp.cuh."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def build(folder, sources, kernel, defines):
    """A library with run(blocks, arguments) and shared_bytes(). sources: as the kernel's module has them."""
    assert sources[0].name == "warp.cuh"
    includes = [HERE / "warp_on_cpu.h", *sources[1:]]
    text = "".join(f'#include "{path}"\n' for path in includes)
    text += f'extern "C" void run(int blocks, Arguments *a) {{ launch({kernel}, blocks, THREADS, a); }}\n'
    text += 'extern "C" int shared_bytes() { return sizeof(Shared); }\n'
    name = "_".join((*(path.stem for path in sources), *map(str, defines.values())))
    source, target = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(text)
    options = [f"-D{key}={value}" for key, value in defines.items()]
    command = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC", *options, "-o", target, source]
    subprocess.run(command, check=True, timeout=100)
    return ctypes.CDLL(str(target))
