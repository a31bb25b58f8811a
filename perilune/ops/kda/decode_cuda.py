"""Compiles and launches decode.cu (Hopper, K = V = 128) without a C++ compiler: NVRTC, which PyTorch's CUDA wheels
bring, and the CUDA driver, both through ctypes.

Never required: `why_not` says what is missing, and the Triton kernels of decode_triton.py do the same work.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from perilune.config import Gate
from perilune.errors import Error
from perilune.ops.kda.decode import Projected, Tail, Weights

DIM = 128
THREADS = 128
MATRIX_BYTES = DIM * DIM * 4
_TYPES = {torch.float32: "float", torch.bfloat16: "bf16"}
_ALIGN = 16  # bytes; a lane reads four channels at once

_POINTERS = [
    *("q", "k", "v", "g_raw", "out_gate", "beta_logit", "conv_q", "conv_k", "conv_v", "A_log", "dt_bias", "norm"),
    *("matrix", "window", "slots", "counts", "targets", "k_ring", "u_ring", "g_ring", "o"),
]
_STRIDES = ["q_stride", "k_stride", "v_stride", "g_stride", "gate_stride", "beta_stride"]


class _Arguments(ctypes.Structure):
    """`struct Arguments` of decode.cu, field by field."""

    _fields_ = (
        [(name, c_void_p) for name in _POINTERS]
        + [(name, c_int64) for name in _STRIDES]
        + [(name, c_int) for name in ("heads", "tokens", "store")]
        + [(name, c_float) for name in ("eps", "lower_bound")]
    )


def why_not(
    inputs: Projected, weights: Weights, matrix_SHKV: torch.Tensor, window_S3C: torch.Tensor, tail: Tail | None = None
) -> str | None:
    """None where decode.cu does these tensors; otherwise what stands against it, in a few words."""
    device = inputs.q_THK.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"{device} is not a Hopper GPU"
    if tuple(matrix_SHKV.shape[2:]) != (DIM, DIM):
        return f"key and value dims are {tuple(matrix_SHKV.shape[2:])}, not 128"
    if weights.A_log_H.dtype != torch.float32 or weights.dt_bias_HK.dtype != torch.float32:
        return "A_log and dt_bias are not fp32"
    same = {x.dtype for x in vars(inputs).values() if x is not inputs.beta_logit_TH}
    convs = {weights.conv_q_CW.dtype, weights.conv_k_CW.dtype, weights.conv_v_CW.dtype}
    rings = {tail.k_SHRK.dtype, tail.u_SHRV.dtype} if tail else {torch.float32}
    others = {inputs.beta_logit_TH.dtype, weights.norm_V.dtype, window_S3C.dtype}
    if len(same) > 1 or len(convs) > 1 or len(rings) > 1 or not same | convs | rings | others <= _TYPES.keys():
        return "dtypes are mixed, or not fp32 or bf16"
    wide = [x for x in vars(inputs).values() if x is not inputs.beta_logit_TH]
    wide += [weights.conv_q_CW, weights.conv_k_CW, weights.conv_v_CW, weights.dt_bias_HK, matrix_SHKV, window_S3C]
    if any(x.data_ptr() % _ALIGN for x in wide) or any(x.stride(0) % 8 for x in vars(inputs).values() if x.dim() == 3):
        return "a tensor is not aligned to 16 bytes"
    return _missing_library()


def step(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    slots_N: torch.Tensor,
    tokens: int,
    counts_N: torch.Tensor | None,
    store: bool,
) -> torch.Tensor:
    """The in-place form; see `decode_step_inplace`, `verify`, `replay_inplace`."""
    arguments, o_THV = _arguments(inputs, weights, matrix_SHKV, window_S3C, slots_N, tokens, store)
    arguments.counts = counts_N.data_ptr() if counts_N is not None else None
    _launch("step", _defines(inputs, weights, window_S3C, torch.float32), arguments, len(slots_N), matrix_SHKV.device)
    return o_THV


def tail_step(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    tail: Tail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    tokens: int,
    shift: bool,
    target_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """The tail form; see `tail_step_inplace`, `tail_verify_inplace`."""
    arguments, o_THV = _arguments(inputs, weights, matrix_SHKV, window_S3C, slots_N, tokens, shift)
    _tail_arguments(arguments, tail, lengths_N, target_N)
    defines = _defines(inputs, weights, window_S3C, tail.k_SHRK.dtype)
    _launch("tail_step", defines, arguments, len(slots_N), matrix_SHKV.device)
    return o_THV


def fold(
    matrix_SHKV: torch.Tensor,
    tail: Tail,
    lengths_N: torch.Tensor,
    slots_N: torch.Tensor,
    target_N: torch.Tensor,
    gate: Gate,
) -> None:
    """What `tail_step` does with a full tail, by itself (the Triton kernel is faster at it)."""
    arguments = _Arguments(matrix=matrix_SHKV.data_ptr(), slots=slots_N.data_ptr(), heads=matrix_SHKV.shape[1])
    _tail_arguments(arguments, tail, lengths_N, target_N)
    types = ("bf16", "bf16", "float", "float", "bf16", _TYPES[tail.k_SHRK.dtype])
    _launch("fold", (*types, str(int(gate.mode == "safe"))), arguments, len(slots_N), matrix_SHKV.device)


def _arguments(
    inputs: Projected,
    weights: Weights,
    matrix_SHKV: torch.Tensor,
    window_S3C: torch.Tensor,
    slots_N: torch.Tensor,
    tokens: int,
    store: bool,
) -> tuple[_Arguments, torch.Tensor]:
    """The arguments that all steps share, and the output."""
    o_THV = torch.empty_like(inputs.v_THV, memory_format=torch.contiguous_format)
    tensors = (
        *(inputs.q_THK, inputs.k_THK, inputs.v_THV, inputs.g_raw_THK, inputs.out_gate_THV, inputs.beta_logit_TH),
        *(weights.conv_q_CW, weights.conv_k_CW, weights.conv_v_CW, weights.A_log_H, weights.dt_bias_HK),
        *(weights.norm_V, matrix_SHKV, window_S3C, slots_N),
    )
    arguments = _Arguments(*[x.data_ptr() for x in tensors])
    arguments.o = o_THV.data_ptr()
    for name, x in zip(_STRIDES, tensors, strict=False):
        setattr(arguments, name, x.stride(0))
    arguments.heads, arguments.tokens, arguments.store = matrix_SHKV.shape[1], tokens, int(store)
    arguments.eps, arguments.lower_bound = weights.eps, weights.gate.lower_bound or 0.0
    return arguments, o_THV


def _tail_arguments(arguments: _Arguments, tail: Tail, lengths_N: torch.Tensor, target_N: torch.Tensor | None) -> None:
    arguments.k_ring, arguments.u_ring = tail.k_SHRK.data_ptr(), tail.u_SHRV.data_ptr()
    arguments.g_ring, arguments.counts = tail.g_SHRK.data_ptr(), lengths_N.data_ptr()
    arguments.targets = target_N.data_ptr() if target_N is not None else None


def _defines(inputs: Projected, weights: Weights, window_S3C: torch.Tensor, ring: torch.dtype) -> tuple[str, ...]:
    """Values of X, B, W, P, WINDOW, RING, SAFE."""
    dtypes = (
        *(inputs.q_THK.dtype, inputs.beta_logit_TH.dtype, weights.conv_q_CW.dtype, weights.norm_V.dtype),
        *(window_S3C.dtype, ring),
    )
    return (*(_TYPES[dtype] for dtype in dtypes), str(int(weights.gate.mode == "safe")))


def _launch(name: str, defines: tuple[str, ...], arguments: _Arguments, sequences: int, device: torch.device) -> None:
    if not sequences:
        return
    with torch.cuda.device(device):
        function = _function(name, defines, torch.cuda.current_device())
        packed = (c_void_p * 1)(ctypes.addressof(arguments))
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        grid = (arguments.heads, sequences, 1, THREADS, 1, 1, MATRIX_BYTES)
        _must(_driver().cuLaunchKernel(function, *grid, stream, packed, None), f"launch of {name}")


@functools.cache
def _function(name: str, defines: tuple[str, ...], device: int) -> c_void_p:
    """The loaded kernel, allowed its 64 KB of shared memory."""
    driver, module, function = _driver(), c_void_p(), c_void_p()
    _must(driver.cuModuleLoadData(ctypes.byref(module), _cubin(defines)), "loading of decode.cu")
    _must(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"look-up of {name}")
    dynamic_shared_bytes = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _must(driver.cuFuncSetAttribute(function, dynamic_shared_bytes, MATRIX_BYTES), "shared memory")
    return function


@functools.cache
def _cubin(defines: tuple[str, ...]) -> bytes:
    """decode.cu compiled for sm_90 with the given values of X, B, W, P, WINDOW, RING, SAFE."""
    library = _nvrtc()
    assert library is not None
    source = (Path(__file__).parent / "decode.cu").read_bytes()
    options = [b"-arch=sm_90", b"-std=c++17"]
    names = ("X", "B", "W", "P", "WINDOW", "RING", "SAFE")
    options += [f"-D{name}={value}".encode() for name, value in zip(names, defines, strict=True)]
    program, size = c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), source, b"decode.cu", 0, None, None)
    failed = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if failed:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise Error(f"decode.cu does not compile for {defines}: {log.value.decode()[:500]}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, cubin)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def _must(code: int, what: str) -> None:
    if code:
        raise Error(f"KDA decode: {what} failed with CUDA driver error {code}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _missing_library() -> str | None:
    return None if _nvrtc() else "NVRTC (libnvrtc.so) is not found; `pip install nvidia-cuda-nvrtc` brings it"


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
