"""Launches forward.cu and backward.cu: varlen attention on Hopper for bf16, keys 192 and values 128 wide.

Never required: `why_not` says what is missing, and the Triton kernels of triton_varlen.py do the same work.

Legend: T query tokens, S key tokens, H heads, Q query/key width, V value width.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch

from perilune.ops import nvrtc
from perilune.ops.mla.tensor_map import tensor_map

WIDTH, VALUES = 192, 128
TILE, STEP = 128, 64  # rows that a block holds (also keys of a forward step); rows of a backward step
THREADS = 384
SHARED_BYTES = 232_448
_HERE = Path(__file__).parent
FORWARD, BACKWARD = ((_HERE / "wgmma.cuh", _HERE / name) for name in ("forward.cu", "backward.cu"))
_WIDTHS = ("q_width", "k_width", "v_width")


def _structure(maps: tuple[str, ...], pointers: tuple[str, ...], numbers: tuple[str, ...]) -> list[Any]:
    return [
        *((name, c_uint64 * 16) for name in maps),
        *((name, c_void_p) for name in pointers),
        *((name, c_int) for name in numbers),
        ("scale", c_float),
        ("padding", c_int * 15),  # the tensor maps give the structures their alignment
    ]


class _Forward(ctypes.Structure):
    """`struct Arguments` of forward.cu, field by field."""

    _fields_ = _structure(
        ("q", "k", "v"), ("o", "lse", "peak", "table"), ("tiles", "heads", "tokens", *_WIDTHS, "causal")
    )


class _Backward(ctypes.Structure):
    """`struct Arguments` of backward.cu, field by field."""

    _fields_ = _structure(
        ("q", "k", "v", "d_o"),
        ("d_q", "d_k", "d_v", "lse", "delta", "table"),
        ("tiles", "heads", "tokens", *_WIDTHS, "o_width", "causal"),
    )


def why_not(q_THQ: torch.Tensor, k_SHQ: torch.Tensor, v_SHV: torch.Tensor) -> str | None:
    """None where forward.cu does these tensors; otherwise what stands against it, in a few words."""
    if not q_THQ.is_cuda or torch.cuda.get_device_capability(q_THQ.device) != (9, 0):
        return f"{q_THQ.device} is not a Hopper GPU"
    if (q_THQ.shape[2], v_SHV.shape[2]) != (WIDTH, VALUES):
        return f"keys and values are {q_THQ.shape[2]} and {v_SHV.shape[2]} wide, not 192 and 128"
    if not q_THQ.dtype == k_SHQ.dtype == v_SHV.dtype == torch.bfloat16:
        return "q, k and v are not all bf16"
    return nvrtc.missing()


def forward(
    q_THQ: torch.Tensor,
    k_SHQ: torch.Tensor,
    v_SHV: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """o_THV, lse_HT, max_logit_H. q, k, v are `aligned`; table is `query_tiles` of 128 (triton_varlen, tiles)."""
    tokens, heads, _ = q_THQ.shape
    o_THV = v_SHV.new_empty(tokens, heads, VALUES)
    lse_HT = torch.empty(heads, tokens, dtype=torch.float32, device=q_THQ.device)
    peak_HX8 = torch.empty(heads, len(table), 8, dtype=torch.float32, device=q_THQ.device)
    arguments = _Forward(
        *(_map(x, TILE) for x in (q_THQ, k_SHQ, v_SHV)),
        *(x.data_ptr() for x in (o_THV, lse_HT, peak_HX8, table)),
        *(len(table), heads, tokens, q_THQ.stride(1), k_SHQ.stride(1), v_SHV.stride(1), int(causal), scale),
    )
    _launch(FORWARD, "forward", (("TURNS", "1"),), len(table) * heads, arguments, q_THQ.device)
    return o_THV, lse_HT, peak_HX8.amax((1, 2))


def backward(
    d_o_THV: torch.Tensor,
    q_THQ: torch.Tensor,
    k_SHQ: torch.Tensor,
    v_SHV: torch.Tensor,
    lse_HT: torch.Tensor,
    delta_HT: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """d_q, d_k, d_v. d_o, q, k, v are `aligned`; delta is the sum over values of o d_o; tables: `key_tiles` and
    `query_tiles` of 128."""
    (tokens, heads, _), device = q_THQ.shape, q_THQ.device
    d_q_THQ, d_k_SHQ, d_v_SHV = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q_THQ, k_SHQ, v_SHV))
    widths = (x.stride(1) for x in (q_THQ, k_SHQ, v_SHV, d_o_THV))
    rest = (heads, tokens, *widths, int(causal), scale)
    pointers = [x.data_ptr() for x in (d_q_THQ, d_k_SHQ, d_v_SHV, lse_HT, delta_HT)]
    for name, table, (q_rows, k_rows) in zip(("keys", "queries"), tables, ((STEP, TILE), (TILE, STEP)), strict=True):
        if len(table):
            maps = (_map(q_THQ, q_rows), _map(k_SHQ, k_rows), _map(v_SHV, k_rows), _map(d_o_THV, q_rows))
            arguments = _Backward(*maps, *pointers, table.data_ptr(), len(table), *rest)
            _launch(BACKWARD, name, (), len(table) * heads, arguments, device)
    return d_q_THQ, d_k_SHQ, d_v_SHV


def _launch(
    sources: tuple[Path, ...],
    name: str,
    defines: tuple[tuple[str, str], ...],
    blocks: int,
    arguments: ctypes.Structure,
    device: torch.device,
) -> None:
    with torch.cuda.device(device):
        kernel = nvrtc.load(sources, name, defines, SHARED_BYTES, torch.cuda.current_device())
        nvrtc.launch(kernel, (blocks, 1), THREADS, SHARED_BYTES, arguments)


def _map(x_THW: torch.Tensor, box_rows: int) -> ctypes.Array[c_uint64]:
    """x as rows of all heads side by side."""
    rows, heads, width = x_THW.shape
    return tensor_map(x_THW, max(rows, 1), (heads - 1) * x_THW.stride(1) + width, x_THW.stride(0), box_rows)


__all__ = ["TILE", "backward", "forward", "why_not"]
