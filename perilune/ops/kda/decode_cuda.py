"""Launches the CUDA C++ kernels (decode*.cu, Hopper, K = V = 128), compiled by nvrtc.py.

Never required: `why_not` says what is missing, and the Triton kernels of decode_triton.py do the same work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from perilune.config import Gate
from perilune.errors import Error
from perilune.ops import nvrtc
from perilune.ops.kda.decode_call import Call

DIM = 128
THREADS = 480  # 15 warps
COMMON = tuple(
    Path(__file__).parent / name for name in ("decode.cuh", "decode_shared.cuh", "decode_fetch.cuh", "decode_token.cuh")
)
SOURCES = {
    "step": (*COMMON, Path(__file__).parent / "decode_step.cu"),
    "tail_step": (*COMMON, Path(__file__).parent / "decode_tail.cu"),
}
SHARED_BYTES = 232_448  # of a block: all that a multiprocessor has
_TYPES = {torch.float32: "float", torch.bfloat16: "bf16"}
_ALIGN = 16  # bytes; a lane reads four channels at once

_POINTERS = [
    *("q", "k", "v", "g_raw", "beta_logit", "out_gate", "conv_q", "conv_k", "conv_v", "A_log", "dt_bias", "norm"),
    *("matrix", "window", "slots", "matrices", "counts", "targets", "k_ring", "u_ring", "g_ring", "o"),
]
_STRIDES = ["q_stride", "k_stride", "v_stride", "g_stride", "beta_stride", "gate_stride"]


class _Arguments(ctypes.Structure):
    """`struct Arguments` of decode_shared.cuh, field by field."""

    _fields_ = (
        [(name, c_void_p) for name in _POINTERS]
        + [(name, c_int64) for name in _STRIDES]
        + [(name, c_int) for name in ("heads", "sequences", "store")]
        + [(name, c_float) for name in ("eps", "lower_bound")]
    )


class _One(ctypes.Structure):
    """`struct Given` of decode_shared.cuh."""

    _fields_ = (("one", _Arguments), ("counter", c_void_p))


class _Table(ctypes.Structure):
    """The same with LAYERS; heads and sequences are for the host's count of blocks."""

    _fields_ = (
        *(("rows", c_void_p), ("counter", c_void_p), ("layers", c_int)),
        *(("heads", c_int), ("sequences", c_int)),
    )


def why_not(call: Call) -> str | None:
    """None where the kernels do these tensors; otherwise what stands against it, in a few words."""
    inputs, weights, tail = call.inputs, call.weights, call.tail
    device = inputs.q_THK.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"{device} is not a Hopper GPU"
    if tuple(call.matrix_SHKV.shape[2:]) != (DIM, DIM):
        return f"key and value dims are {tuple(call.matrix_SHKV.shape[2:])}, not 128"
    if weights.A_log_H.dtype != torch.float32 or weights.dt_bias_HK.dtype != torch.float32:
        return "A_log and dt_bias are not fp32"
    same = {x.dtype for x in vars(inputs).values() if x is not inputs.beta_logit_TH}
    convs = {weights.conv_q_CW.dtype, weights.conv_k_CW.dtype, weights.conv_v_CW.dtype}
    rings = {tail.k_SHRK.dtype, tail.u_SHRV.dtype} if tail else {torch.float32}
    others = {inputs.beta_logit_TH.dtype, weights.norm_V.dtype, call.window_S3C.dtype}
    if len(same) > 1 or len(convs) > 1 or len(rings) > 1 or not same | convs | rings | others <= _TYPES.keys():
        return "dtypes are mixed, or not fp32 or bf16"
    wide = [x for x in vars(inputs).values() if x is not inputs.beta_logit_TH]
    wide += [weights.conv_q_CW, weights.conv_k_CW, weights.conv_v_CW, weights.dt_bias_HK]
    wide += [call.matrix_SHKV, call.window_S3C, *(vars(tail).values() if tail else ())]
    if any(x.data_ptr() % _ALIGN for x in wide) or any(x.stride(0) % 8 for x in vars(inputs).values() if x.dim() == 3):
        return "a tensor is not aligned to 16 bytes"
    return nvrtc.missing()


def step(call: Call) -> torch.Tensor:
    """The in-place form; see `decode_step_inplace`, `verify`, `replay_inplace`."""
    o_THV = call.output()
    arguments = _arguments(call, o_THV)
    _launch("step", _defines(call), arguments, o_THV.device)
    return o_THV


def tail_step(call: Call) -> torch.Tensor:
    """The tail form; see `tail_step_inplace`, `tail_verify_inplace`."""
    assert call.tail is not None
    o_THV = call.output()
    arguments = _arguments(call, o_THV)
    arguments.k_ring, arguments.u_ring = call.tail.k_SHRK.data_ptr(), call.tail.u_SHRV.data_ptr()
    arguments.g_ring = call.tail.g_SHRK.data_ptr()
    assert call.tokens == 1 or call.target_N is None  # drafts are folded once some are accepted
    _launch("tail_step", _defines(call), arguments, o_THV.device)
    return o_THV


def table(calls: Sequence[Call]) -> torch.Tensor:
    """The arguments of several layers' in-place steps, on the device; outputs are left out. Raises Error where the
    layers differ in what the kernel is compiled for."""
    kinds = {_defines(call, layers=True) for call in calls}
    if len(kinds) > 1:
        raise Error(f"layers differ in dtype or gate: {sorted(kinds)}; must be the same in all")
    rows = (_Arguments * len(calls))(*(_arguments(call, None) for call in calls))
    return torch.frombuffer(bytearray(rows), dtype=torch.uint8).to(calls[0].matrix_SHKV.device)


def step_layers(first: Call, rows: torch.Tensor, layers: int) -> None:
    """The in-place form for all layers of `table` in one launch; `first` is one of its calls."""
    given = _Table(rows.data_ptr(), None, layers, first.matrix_SHKV.shape[1], len(first.slots_N))
    _launch("step", _defines(first, layers=True), given, rows.device)


def _arguments(call: Call, o_THV: torch.Tensor | None) -> _Arguments:
    """The arguments that all steps share; no outputs where o_THV is None."""
    pools = (call.matrix_SHKV, call.window_S3C, call.slots_N, call.homes_N)
    arguments = _Arguments(*[x.data_ptr() for x in (*call.given, *pools)])
    optional = {"counts": call.counts_N, "targets": call.target_N, "o": o_THV}
    for name, x in optional.items():
        setattr(arguments, name, None if x is None else x.data_ptr())
    for name, stride in zip(_STRIDES, call.strides, strict=True):
        setattr(arguments, name, stride)
    arguments.heads, arguments.sequences = call.matrix_SHKV.shape[1], len(call.slots_N)
    arguments.store = int(call.store)
    arguments.eps, arguments.lower_bound = call.weights.eps, call.weights.gate.lower_bound or 0.0
    return arguments


def _defines(call: Call, layers: bool = False) -> tuple[tuple[str, str], ...]:
    """What the sources want to know."""
    ring = torch.float32 if call.tail is None else call.tail.k_SHRK.dtype
    dtypes = {
        "X": call.inputs.q_THK.dtype,
        "B": call.inputs.beta_logit_TH.dtype,
        "W": call.weights.conv_q_CW.dtype,
        "P": call.weights.norm_V.dtype,
        "WINDOW": call.window_S3C.dtype,
        "RING": ring,
    }
    return _options(dtypes, call.weights.gate, call.tokens, layers)


def _options(
    dtypes: dict[str, torch.dtype], gate: Gate, tokens: int, layers: bool = False
) -> tuple[tuple[str, str], ...]:
    numbers = {"SAFE": int(gate.mode == "safe"), "TOKENS": tokens, "LAYERS": int(layers)}
    return (*((k, _TYPES[v]) for k, v in dtypes.items()), *((k, str(v)) for k, v in numbers.items()))


def _launch(
    name: str, defines: tuple[tuple[str, str], ...], arguments: _Arguments | _Table, device: torch.device
) -> None:
    """A block a multiprocessor for all (layer, head, sequence) items."""
    items = arguments.heads * arguments.sequences * (arguments.layers if isinstance(arguments, _Table) else 1)
    if not items:
        return
    with torch.cuda.device(device):
        blocks = min(items, torch.cuda.get_device_properties(device).multi_processor_count)
        # Where blocks have several items, whoever is free takes the next.
        counter = torch.zeros(1, dtype=torch.int32, device=device) if items > 2 * blocks else None
        given = arguments if isinstance(arguments, _Table) else _One(arguments)
        given.counter = None if counter is None else counter.data_ptr()
        function = nvrtc.load(SOURCES[name], name, defines, SHARED_BYTES, torch.cuda.current_device())
        nvrtc.launch(function, (blocks, 1), THREADS, SHARED_BYTES, given, waits=True)


__all__ = ["step", "step_layers", "table", "tail_step", "why_not"]
