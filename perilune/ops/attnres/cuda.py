"""Launches mix.cu (Hopper, bf16 sources), compiled by NVRTC.

Never required: `why_not` says what is missing, and the Triton kernels of triton.py do the same work.

Legend: T tokens, D model width, N sources, P blocks of the backward pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from perilune.ops import nvrtc
from perilune.ops.attnres.partial import Partial

SOURCE = Path(__file__).parent / "mix.cu"
MAX_SOURCES, MAX_WIDTH, MAX_MIXERS = 9, 8192, 24
GROUP = 4  # mixers that a block of the completed kernel works on
# Two blocks share a multiprocessor in the forward pass of few sources: one alone waits for its own sums too long.
FEW_SOURCES = 4
SHARED_BYTES = {1: 232_448, 2: 115_712}
_ALIGN = 16  # bytes of a vector and of a bulk copy
_TYPES = {torch.float32: "float", torch.bfloat16: "bf16"}


class _Arguments(ctypes.Structure):
    """`struct Arguments` of mix.cu, field by field."""

    _fields_ = (
        *((name, c_void_p * MAX_SOURCES) for name in ("sources", "later", "d_sources")),
        *((name, c_void_p) for name in ("norm_w", "query_w", "out_w", "y", "d_y")),
        *((name, c_void_p) for name in ("s", "r", "r_out", "d_w", "d_out_w")),
        *((name, c_void_p * MAX_MIXERS) for name in ("norms", "queries")),
        *((name, c_void_p) for name in ("h", "lse")),
        ("tokens", c_int64),
        ("mixers", c_int),
        ("eps", c_float),
        ("out_eps", c_float),
    )


def why_not(
    sources: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], aligned: Sequence[torch.Tensor] = ()
) -> str | None:
    """None where mix.cu does such sources and weights; otherwise what stands against it, in a few words.

    aligned: further tensors that are read or written in vectors.
    """
    first = sources[0]
    width = first.shape[-1]
    if not first.is_cuda or torch.cuda.get_device_capability(first.device) != (9, 0):
        return f"{first.device} is not a Hopper GPU"
    if first.dtype != torch.bfloat16:
        return f"the sources are {first.dtype}, not bf16"
    if len({w.dtype for w in weights}) > 1 or weights[0].dtype not in _TYPES:
        return f"the weights are {[w.dtype for w in weights]}; must be all fp32 or all bf16"
    if len(sources) > MAX_SOURCES or width % 8 or not 8 <= width <= MAX_WIDTH:
        return f"{len(sources)} sources of width {width}; allowed: {MAX_SOURCES}, a multiple of 8 up to {MAX_WIDTH}"
    if any(x.data_ptr() % _ALIGN for x in (*sources, *aligned)):
        return "a tensor is not aligned to 16 bytes"
    return nvrtc.missing()


def forward(
    rows: Sequence[torch.Tensor],
    norm_w: torch.Tensor,
    query_w: torch.Tensor,
    out_w: torch.Tensor,
    eps: float,
    out_eps: float,
    s_TN: torch.Tensor,
    r_TN: torch.Tensor,
    r_out_T: torch.Tensor,
) -> torch.Tensor:
    """The normed mixture y_TD; fills s, r [T, N] and r_out [T]."""
    y_TD = torch.empty_like(rows[0])
    given = _arguments(rows, norm_w, query_w, out_w, s_TN, r_TN, r_out_T)
    given.y, given.eps, given.out_eps = y_TD.data_ptr(), eps, out_eps
    blocks = 2 if len(rows) <= FEW_SOURCES else 1
    _launch(
        "forward",
        _defines(rows, norm_w, blocks, later=False),
        given,
        rows[0].device,
        min(y_TD.shape[0], _grid(y_TD.device, blocks)),
    )
    return y_TD


def backward(
    rows: Sequence[torch.Tensor],
    norm_w: torch.Tensor,
    query_w: torch.Tensor,
    out_w: torch.Tensor,
    d_y: torch.Tensor,
    s_TN: torch.Tensor,
    r_TN: torch.Tensor,
    r_out_T: torch.Tensor,
    later: Sequence[torch.Tensor] | None,
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The sources' gradients, `later` added, and the blocks' shares of those of w and out_w, fp32 [P, D]."""
    d_rows = [torch.empty_like(x) for x in rows]
    P = min(d_y.shape[0], _grid(d_y.device, 1))
    d_w_PD, d_out_w_PD = s_TN.new_empty(2, P, rows[0].shape[1])
    given = _arguments(rows, norm_w, query_w, out_w, s_TN, r_TN, r_out_T)
    given.d_y, given.d_w, given.d_out_w = d_y.data_ptr(), d_w_PD.data_ptr(), d_out_w_PD.data_ptr()
    for i, d in enumerate(d_rows):
        given.d_sources[i] = d.data_ptr()
        given.later[i] = None if later is None else later[i].data_ptr()
    _launch("backward", _defines(rows, norm_w, 1, later is not None), given, rows[0].device, P)
    return d_rows, d_w_PD, d_out_w_PD


def mix_completed(
    sources: Sequence[torch.Tensor], norm_w_D: Sequence[torch.Tensor], query_w_D: Sequence[torch.Tensor], eps: float
) -> list[Partial]:
    """`attnres.mix_completed` for up to 8 sources and 24 mixers."""
    T, D = sources[0].shape
    M = len(norm_w_D)
    h_MTD = sources[0].new_empty(M, T, D)
    lse_MT = h_MTD.new_empty(M, T, dtype=torch.float32)
    given = _Arguments(h=h_MTD.data_ptr(), lse=lse_MT.data_ptr(), tokens=T, mixers=M, eps=eps)
    for i, x in enumerate(sources):
        given.sources[i] = x.data_ptr()
    for m, (norm_w, query_w) in enumerate(zip(norm_w_D, query_w_D, strict=True)):
        given.norms[m], given.queries[m] = norm_w.data_ptr(), query_w.data_ptr()
    groups = -(-M // GROUP)
    grid = groups * min(T, _grid(sources[0].device, 1) // groups)
    _launch("completed", _defines(sources, norm_w_D[0], 1, later=False), given, sources[0].device, grid)
    return [Partial(h_MTD[m], lse_MT[m]) for m in range(M)]


def merge_norm(
    partial: Partial,
    live_TD: torch.Tensor,
    norm_w_D: torch.Tensor,
    query_w_D: torch.Tensor,
    eps: float,
    out_w_D: torch.Tensor,
    out_eps: float,
) -> torch.Tensor:
    """`attnres.merge_norm`."""
    x_TD = torch.empty_like(live_TD)
    given = _Arguments(
        norm_w=norm_w_D.data_ptr(),
        query_w=query_w_D.data_ptr(),
        out_w=out_w_D.data_ptr(),
        y=x_TD.data_ptr(),
        h=partial.h_TD.data_ptr(),
        lse=partial.lse_T.data_ptr(),
        tokens=live_TD.shape[0],
        eps=eps,
        out_eps=out_eps,
    )
    given.sources[0] = live_TD.data_ptr()
    defines = _defines([live_TD], norm_w_D, 2, later=False)
    _launch("merge", defines, given, live_TD.device, min(live_TD.shape[0], _grid(live_TD.device, 2)))
    return x_TD


def threads(width: int) -> int:
    """Of a block: consumer warps with two vectors of eight numbers a lane, and the producer."""
    return 32 * (-(-width // 512) + 1)


def _arguments(
    rows: Sequence[torch.Tensor], norm_w: torch.Tensor, query_w: torch.Tensor, out_w: torch.Tensor, *kept: torch.Tensor
) -> _Arguments:
    given = _Arguments()
    for i, x in enumerate(rows):
        given.sources[i] = x.data_ptr()
    names = ("norm_w", "query_w", "out_w", "s", "r", "r_out")
    for name, x in zip(names, (norm_w, query_w, out_w, *kept), strict=True):
        setattr(given, name, x.data_ptr())
    given.tokens = rows[0].shape[0]
    return given


def _defines(rows: Sequence[torch.Tensor], w: torch.Tensor, blocks: int, later: bool) -> tuple[tuple[str, str], ...]:
    """What mix.cu wants to know."""
    numbers = {"N": len(rows), "WIDTH": rows[0].shape[1], "BLOCKS": blocks, "LATER": int(later)}
    return (("W", _TYPES[w.dtype]), *((name, str(n)) for name, n in numbers.items()))


def _grid(device: torch.device, blocks: int) -> int:
    """Blocks that the device has room for."""
    return blocks * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launch(
    name: str, defines: tuple[tuple[str, str], ...], arguments: _Arguments, device: torch.device, grid: int
) -> None:
    if not grid:
        return
    options = dict(defines)
    shared = SHARED_BYTES[int(options["BLOCKS"])]
    with torch.cuda.device(device):
        defines = (*defines, (name.upper(), "1"))
        function = nvrtc.load((SOURCE,), name, defines, shared, torch.cuda.current_device())
        nvrtc.launch(function, (grid, 1), threads(int(options["WIDTH"])), shared, arguments)


__all__ = ["backward", "forward", "merge_norm", "mix_completed", "threads", "why_not"]
