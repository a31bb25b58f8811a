"""KDA kernel B3 in CUDA C++ (gradients.cu) for Hopper: dq, dk, dv, dg, d beta, d A_log and d dt_bias in one launch.

Formulas and letters are those of `triton_gradients`, whose kernels do the same work elsewhere. The kernel reads only
what the scans and K1 left, once, and writes final gradients: 232 KB a chunk and head, where two launches that hand the
products of the states over move 360 KB.

The gate is chosen when the kernel is compiled. The softplus gate has no bound: a warp whose channels decay too much for
the factors of the bounded form takes smaller steps (gradients_steep.cuh), by itself.

Legend: T tokens, H heads, K key dim, V value dim, C rows of a chunk (64), X chunks of all sequences.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from perilune.ops import nvrtc
from perilune.ops.aligned import on_16_bytes

if TYPE_CHECKING:
    from perilune.ops.kda.triton_forward import Inputs

DIM = 128
WARPS = 8
THREADS = 32 * WARPS
SHARED_BYTES = 226_560  # sizeof(Shared): one block a multiprocessor
_PARTS = ("warp", "gradients_tiles", "gradients_parts", "gradients_{}", "gradients_pairs", "gradients_steep")
_GATES = {"safe": "bounded", "softplus": "softplus"}
_TYPES = {torch.float32: "float", torch.bfloat16: "bf16"}

_POINTERS = [
    *("q", "k", "g", "beta", "A_log", "dt_bias", "table", "norms", "A", "S", "dS", "U", "dU", "d_o"),
    *("dq", "dk", "dg", "dv", "d_beta", "d_bias", "d_A"),
]


class Arguments(ctypes.Structure):
    """`struct Arguments` of gradients.cu, field by field."""

    _fields_ = (
        [(name, c_void_p) for name in _POINTERS]
        + [(name, c_int64) for name in ("count", "q_head", "k_head", "g_head", "beta_head", "beta_token")]
        + [(name, c_float) for name in ("scale", "lower_bound")]
    )


def why_not(x: Inputs) -> str | None:
    """None where gradients.cu does these inputs; otherwise what stands against it, in a few words."""
    if x.q.device.type != "cuda" or torch.cuda.get_device_capability(x.q.device) != (9, 0):
        return f"{x.q.device} is not a Hopper GPU"
    if (x.q.shape[2], x.v.shape[2]) != (DIM, DIM):
        return f"key and value dims are {(x.q.shape[2], x.v.shape[2])}, not 128"
    if x.gate.mode == "safe" and not -5.0 <= x.lower_bound <= 0.0:
        return "the gate's lower bound is not in [-5, 0]"
    low = all(t.dtype == torch.bfloat16 for t in (x.q, x.k, x.v, x.g)) and x.beta.dtype in _TYPES
    if not low or not all(_readable(t) for t in (x.q, x.k, x.g)):
        return "a tensor is not bfloat16, not contiguous in its channels, or not aligned to 16 bytes"
    return nvrtc.missing()


def _readable(t: torch.Tensor) -> bool:
    """Whether rows of t [T, H, 128] can be read 16 bytes at a time."""
    aligned = t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(1) % 8 == 0
    return aligned and t.stride(2) == 1 and t.stride(0) < 2**31 // 64


def arguments(
    x: Inputs,
    A: torch.Tensor,
    norms: torch.Tensor,
    S: torch.Tensor,
    U: torch.Tensor,
    dS: torch.Tensor,
    dU: torch.Tensor,
    d_o: torch.Tensor,
) -> tuple[Arguments, tuple[torch.Tensor, ...]]:
    """The kernel's arguments and its outputs: dq, dk, dv, dg, d beta; d A_log and d dt_bias of each chunk.

    A = A beta of K1 [X, H, C, C], norms [X, H, 2, C], S and dS transposed [X, H, V, K], U and dU [X, H, C, V].
    """
    X, H = A.shape[:2]
    dq, dk, dv, dg = (t.new_empty(t.shape) for t in (x.q, x.k, x.v, x.g))
    d_beta = x.beta.new_empty(x.beta.shape)
    d_bias, d_A = norms.new_empty(X, H, DIM), norms.new_empty(X, H, WARPS)
    tensors = (
        *(x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, x.layout.table, norms, A, S, dS, U, dU, d_o),
        *(dq, dk, dg, dv, d_beta, d_bias, d_A),
    )
    filled = Arguments(*[t.data_ptr() for t in tensors])
    filled.count, filled.scale, filled.lower_bound = X * H, DIM**-0.5, x.lower_bound
    for name, t in (("q", x.q), ("k", x.k), ("g", x.g), ("beta", x.beta)):
        setattr(filled, f"{name}_head", t.stride(1))
    filled.beta_token = x.beta.stride(0)
    return filled, (dq, dk, dv, dg, d_beta, d_A, d_bias)


def sources(mode: Literal["safe", "softplus"]) -> tuple[Path, ...]:
    """The kernel with this gate, part by part."""
    names = [f"{part}.cuh".format(_GATES[mode]) for part in _PARTS]
    return tuple(Path(__file__).parent / name for name in (*names, "gradients.cu"))


def defines(x: Inputs) -> tuple[tuple[str, str], ...]:
    """What gradients.cu is compiled for: these inputs' layout."""
    strides = ((f"{name}_TOKEN", str(t.stride(0))) for name, t in (("Q", x.q), ("K", x.k), ("G", x.g)))
    return (("BETA", _TYPES[x.beta.dtype]), ("HEADS", str(x.q.shape[1])), *strides)


def gradients(
    x: Inputs,
    A: torch.Tensor,
    norms: torch.Tensor,
    S: torch.Tensor,
    U: torch.Tensor,
    dS: torch.Tensor,
    dU: torch.Tensor,
    d_o: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, dg_raw, d beta_logit, d A_log [H], d dt_bias [H, K]; arguments as `arguments` has them."""
    d_o = on_16_bytes(d_o.to(torch.bfloat16))
    filled, (dq, dk, dv, dg, d_beta, d_A, d_bias) = arguments(x, A, norms, S, U, dS, dU, d_o)
    if filled.count:
        with torch.cuda.device(x.q.device):
            kernel = nvrtc.load(
                sources(x.gate.mode), "gradients", defines(x), SHARED_BYTES, torch.cuda.current_device()
            )
            processors = torch.cuda.get_device_properties(x.q.device).multi_processor_count
            nvrtc.launch(kernel, (min(filled.count, processors), 1), THREADS, SHARED_BYTES, filled)
    return dq, dk, dv, dg, d_beta, d_A.sum((0, 2)), d_bias.sum(0)


__all__ = ["Arguments", "arguments", "gradients", "sources", "why_not"]
