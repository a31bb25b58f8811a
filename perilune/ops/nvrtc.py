"""CUDA C++ kernels without a C++ compiler: NVRTC, which PyTorch's CUDA wheels bring, and the CUDA driver, by ctypes.

Never required: `missing` says what is not there, and a Triton kernel does the same work.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from ctypes import c_int, c_uint, c_void_p
from pathlib import Path

import torch

from perilune.errors import Error


@functools.cache
def missing() -> str | None:
    """None if NVRTC is found, otherwise what to install."""
    return None if _nvrtc() else "NVRTC (libnvrtc.so) is not found; `pip install nvidia-cuda-nvrtc` brings it"


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute`: its id, and a union of 64 bytes of which an int is used."""

    _fields_ = (("id", c_int), ("_pad", c_int), ("value", c_int), ("_rest", c_int * 15))


class _Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        *(("stream", c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", c_uint)),
    )


_WAITS = _Attribute(id=6, value=1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def launch(
    function: c_void_p,
    blocks: tuple[int, int],
    threads: int,
    shared: int,
    arguments: ctypes.Structure,
    waits: bool = False,
) -> None:
    """Start a kernel that takes one structure, on the current device and stream. shared: bytes of shared memory.

    waits: the kernel waits for the one before it by itself (`griddepcontrol.wait`), so its blocks may start early.
    """
    _attach()
    packed = (c_void_p * 1)(ctypes.addressof(arguments))
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    config = _Config(*blocks, 1, threads, 1, 1, shared, stream, ctypes.pointer(_WAITS), int(waits))
    _must(_driver().cuLaunchKernelEx(ctypes.byref(config), function, packed, None), "launch")


@functools.cache
def load(
    sources: tuple[Path, ...], name: str, defines: tuple[tuple[str, str], ...], shared: int, device: int
) -> c_void_p:
    """Kernel `name` of the sources, one after the other, for `device`, which is current; compiled at the first call.

    shared: bytes of shared memory that its launches may ask for. Raises Error with the compiler's message.
    """
    _attach()
    driver, module, function = _driver(), c_void_p(), c_void_p()
    _must(driver.cuModuleLoadData(ctypes.byref(module), compiled(sources, defines)), f"loading of {name}")
    _must(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"look-up of {name}")
    dynamic_shared_bytes = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _must(driver.cuFuncSetAttribute(function, dynamic_shared_bytes, shared), "shared memory")
    return function


@functools.cache
def compiled(sources: tuple[Path, ...], defines: tuple[tuple[str, str], ...]) -> bytes:
    """Machine code for Hopper (sm_90a: with its own instructions)."""
    library = _nvrtc()
    assert library is not None
    text = b"\n".join(path.read_bytes() for path in sources)
    options = [b"-arch=sm_90a", b"-std=c++17", *(f"-D{key}={value}".encode() for key, value in defines)]
    program, size = c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), text, sources[-1].name.encode(), 0, None, None)
    failed = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if failed:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise Error(f"{sources[-1].name} does not compile for {dict(defines)}: {log.value.decode()[:500]}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, cubin)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def _attach() -> None:
    """Give this thread the current device's context: autograd's threads may not have one yet."""
    driver, context, device = _driver(), c_void_p(), ctypes.c_int()
    _must(driver.cuCtxGetCurrent(ctypes.byref(context)), "look for a context")
    if context.value is None:
        _must(driver.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device()), "look-up of the device")
        _must(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "look-up of the device's context")
        _must(driver.cuCtxSetCurrent(context), "choice of the context")


def _must(code: int, what: str) -> None:
    if code:
        raise Error(f"CUDA kernel: {what} failed with CUDA driver error {code}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    """NVRTC from the nvidia wheels beside torch, from a CUDA installation, or from the loader's path."""
    wheels = importlib.util.find_spec("nvidia")
    folders = [Path(root) for root in (wheels.submodule_search_locations or [])] if wheels else []
    folders += [Path(sys.prefix) / "lib", Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    found = [x for folder in folders for x in sorted(folder.glob("**/libnvrtc.so.*")) if "alt" not in x.name]
    for path in (*map(str, found), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            # NVRTC looks its builtins up by name only: they must be in the process already.
            for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
                if "alt" not in builtins.name:
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


__all__ = ["compiled", "launch", "load", "missing"]
