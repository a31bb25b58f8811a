"""Launches latent.cu: decode and verify on Hopper for rows of 512 + 64 numbers in bf16 or fp8 e4m3.

Never required: `why_not` says what is missing, and the Triton kernels of triton_paged.py do the same work.

Legend: T = N * drafts query rows, N sequences, H heads, L row width, C value width, P pages, S tokens a page, X splits.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perilune.ops import nvrtc
from perilune.ops.mla.tensor_map import tensor_map

RANK, WIDTH, TILE = 512, 576, 64
MAX_ROWS = 48
THREADS = 384
SHARED_BYTES = 232_448
SOURCES = tuple(Path(__file__).parent / name for name in ("wgmma.cuh", "cluster.cuh", "latent.cu"))
_POINTERS = ("q", "table", "lengths", "o", "lse", "part", "part_lse")
_NUMBERS = ("table_width", "heads", "drafts", "blocks", "splits", "size", "page")


_FIELDS: list[Any] = [
    ("rows", c_uint64 * 16),
    *((name, c_void_p) for name in _POINTERS),
    *((name, c_int) for name in _NUMBERS),
    ("scale", c_float),
    ("row_scale", c_float),
    ("padding", c_int * 11),  # the tensor map gives the structure its alignment
]


class _Arguments(ctypes.Structure):
    """`struct Arguments` of latent.cu, field by field."""

    _fields_ = _FIELDS


@dataclass(frozen=True)
class Shape:
    """How the query rows of a sequence are divided: `blocks` of `rows`, of which `cluster` share what they read."""

    rows: int
    blocks: int
    cluster: int

    @classmethod
    def of(cls, shared: int) -> Shape:
        blocks = -(-shared // MAX_ROWS)
        blocks += blocks > 1 and blocks % 2
        return cls(-(-shared // (16 * blocks)) * 16, blocks, min(blocks, 2))

    def defines(self, eight: bool) -> tuple[tuple[str, str], ...]:
        """The macros of latent.cu; the ring of chunks takes what queries, weights and barriers leave free."""
        raw = 4 if eight else 0
        ring = min((SHARED_BYTES - (11 * 128 + 12) * self.rows - raw * (4096 + 16) - 48) // (8192 + 16), 24)
        values = {"ROWS": self.rows, "CLUSTER": self.cluster, "RING": ring, "EIGHT": int(eight), "RAW": raw}
        return tuple((name, str(value)) for name, value in values.items())


def why_not(q_THL: torch.Tensor, pages_PSL: torch.Tensor, rank: int) -> str | None:
    """None where latent.cu does these tensors; otherwise what stands against it, in a few words."""
    if not q_THL.is_cuda or torch.cuda.get_device_capability(q_THL.device) != (9, 0):
        return f"{q_THL.device} is not a Hopper GPU"
    if (rank, pages_PSL.shape[2]) != (RANK, WIDTH) or pages_PSL.shape[1] % TILE:
        return (
            f"rows of {rank} + {pages_PSL.shape[2] - rank} or pages of {pages_PSL.shape[1]} tokens are not 512 + 64, 64"
        )
    if q_THL.dtype != torch.bfloat16 or pages_PSL.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        return f"q is {q_THL.dtype} and the pages are {pages_PSL.dtype}, not bf16 and bf16 or fp8 e4m3"
    if not pages_PSL.is_contiguous() or pages_PSL.data_ptr() % 16:
        return "the pages are not contiguous or not aligned to 16 bytes"
    return nvrtc.missing()


def split_parts(
    q_THL: torch.Tensor,
    pages_PSL: torch.Tensor,
    table_NM: torch.Tensor,
    lengths_N: torch.Tensor,
    scale: float,
    drafts: int,
    row_scale: float,
    split: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Fill out = o_THC, lse_TH (sequences of one split), part [N, X, drafts * H, C], part_lse (the others)."""
    o_THC, lse_TH, part, part_lse = out
    count, heads = table_NM.shape[0], q_THL.shape[1]
    eight = pages_PSL.element_size() == 1
    shape = Shape.of(drafts * heads)
    splits = max(1, part.shape[1])
    rows = pages_PSL.shape[0] * pages_PSL.shape[1]
    arguments = _Arguments(tensor_map(pages_PSL, rows, WIDTH, WIDTH, TILE // shape.cluster))
    for name, x in zip(_POINTERS, (q_THL, table_NM, lengths_N, o_THC, lse_TH, part, part_lse), strict=True):
        setattr(arguments, name, x.data_ptr())
    numbers = (table_NM.shape[1], heads, drafts, shape.blocks, splits, split, pages_PSL.shape[1])
    for name, number in zip(_NUMBERS, numbers, strict=True):
        setattr(arguments, name, number)
    arguments.scale, arguments.row_scale = scale, row_scale
    with torch.cuda.device_of(q_THL):
        _launch(shape.defines(eight), (shape.blocks * splits, count), arguments)


def _launch(defines: tuple[tuple[str, str], ...], grid: tuple[int, int], arguments: _Arguments) -> None:
    kernel = nvrtc.load(SOURCES, "latent", defines, SHARED_BYTES, torch.cuda.current_device())
    nvrtc.launch(kernel, grid, THREADS, SHARED_BYTES, arguments)


__all__ = ["split_parts", "why_not"]
