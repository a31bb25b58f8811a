"""MLA over paged latent rows: decode and verify in the absorbed form, writing rows, reading them back.

A cached token is one row [normed latent c (rank) | shared key k_r]; the absorbed query of a head is as wide, and the
values are the first `rank` numbers of the same row. Pages are [P, S, L] in fp32, bf16 or fp8 e4m3 (fp64 in
references); position t of sequence n is row t % S of page table_NM[n, t // S]. A stored row times `row_scale` is the
row itself: one constant a layer, 1.0 unless the caller has calibrated it. e4m3 is a floating format, so the scale
only has to keep rows inside its range (2^-9 .. 448); finer scales would not add precision.

Legend: T = N * drafts query rows, N sequences, H heads, L row width, C = rank value width, P pages, S tokens a page,
M table width.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from types import ModuleType
from typing import Literal

import torch

from perilune.errors import Error
from perilune.ops.checks import FLOATS
from perilune.ops.mla import paged_cuda, paged_reference
from perilune.ops.sequences import Sequences

PAGE_DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float64)
MAX_DRAFTS = 16


def paged_attention(
    q_THL: torch.Tensor,
    pages_PSL: torch.Tensor,
    table_NM: torch.Tensor,
    lengths_N: torch.Tensor,
    scale: float,
    drafts: int = 1,
    *,
    rank: int = 512,
    row_scale: float = 1.0,
    split: int = 4096,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode (drafts = 1) or verify (drafts = 2 .. 16) against cached rows; returns (o_THC, lse_TH).

    q_THL: absorbed queries, rows n * drafts + i for draft i of sequence n. table_NM: int32, -1 = no page; pages
    outside the length are never read. lengths_N: int32, cached tokens of each sequence, the drafts' own rows included
    (append first). Draft i sees positions 0 .. lengths - drafts + i. A sequence of length 0 is padding: o 0, lse -inf
    (so is a draft that lies before position 0).
    o_THC has q's dtype, is softmax-weighted rows (the caller multiplies by the value half of kv_b); lse_TH is the
    natural log-sum-exp of the scaled logits, fp32 (fp64 if q or pages are).
    split: cached tokens that one program of a GPU kernel walks over, a multiple of 64 (see `choose_split`); the parts
    are merged in order. Level: bitwise-batch for one value of split and of drafts; the reference ignores it.
    CUDA graphs: nothing is read on the host and the grid depends on shapes alone, so a table as wide as the longest
    context of the graph serves every step. Raises Error on a shape, dtype or device that is not supported; values of
    the table and of the lengths are on the device and are not checked.
    """
    _check_pages("paged_attention", pages_PSL, rank, row_scale)
    if not 1 <= drafts <= MAX_DRAFTS:
        raise Error(f"paged_attention: drafts is {drafts}; allowed: 1 to {MAX_DRAFTS}")
    count = _check_table("paged_attention", table_NM, pages_PSL)
    _check_shape("paged_attention", "lengths_N", lengths_N, (count,), pages_PSL.device, (torch.int32,))
    if q_THL.ndim != 3 or q_THL.shape[1] < 1:
        raise Error(f"paged_attention: q_THL has shape {tuple(q_THL.shape)}; must be [N * drafts, H >= 1, L]")
    shape = (count * drafts, q_THL.shape[1], pages_PSL.shape[2])
    _check_shape("paged_attention", "q_THL", q_THL, shape, pages_PSL.device, FLOATS)
    if not 64 <= split < 2**31 or split % 64:
        raise Error(f"paged_attention: split is {split}; must be a multiple of 64 below 2^31")
    if scale <= 0:
        raise Error(f"paged_attention: scale is {scale}; must be positive")
    chosen = implementation(q_THL, pages_PSL, rank)
    if chosen != "reference":
        found: tuple[torch.Tensor, torch.Tensor] = _triton().paged_attention(
            q_THL, pages_PSL, table_NM, lengths_N, scale, drafts, rank, row_scale, split, cuda=chosen == "cuda"
        )
        return found
    return paged_reference.paged_attention(q_THL, pages_PSL, table_NM, lengths_N, scale, drafts, rank, row_scale)


@lru_cache(maxsize=4096)
def choose_split(sequences: int, context: int, rows: int, processors: int = 132) -> int:
    """A good `split` for batches of `sequences` with up to `context` cached tokens; rows = drafts * heads.

    Fills the multiprocessors in whole waves (a program of latent.cu holds up to 48 rows, a multiprocessor one program)
    with few parts to merge. Sums depend on the split, so where numbers must not depend on the batch choose it once and
    keep it.
    """
    blocks = paged_cuda.Shape.of(rows).blocks
    best, split = float("inf"), 64
    for parts in range(1, min(processors, -(-context // 128)) + 1):
        tokens = -(-context // (64 * parts)) * 64
        # Reading q, filling the pipeline and writing a part cost about as much as 256 tokens.
        time = -(-sequences * blocks * parts // processors) * (tokens + 256)
        if time < best:
            best, split = time, tokens
    return split


def implementation(
    q_THL: torch.Tensor, pages_PSL: torch.Tensor, rank: int = 512
) -> Literal["cuda", "triton", "reference"]:
    """Which code `paged_attention` runs for such inputs: latent.cu where it can, then Triton, then plain torch."""
    if not q_THL.is_cuda or not importlib.util.find_spec("triton"):
        return "reference"
    if paged_cuda.why_not(q_THL, pages_PSL, rank) is None:
        return "cuda"
    return "triton" if _triton().supports(q_THL, pages_PSL, rank) else "reference"


def _triton() -> ModuleType:
    """Imported late: Triton is an optional dependency."""
    return importlib.import_module("perilune.ops.mla.triton_paged")


def append_rows_inplace(
    pages_PSL: torch.Tensor, rows_TL: torch.Tensor, slots_T: torch.Tensor, *, row_scale: float = 1.0
) -> None:
    """Write rows_TL into pages: row t to page slots_T[t] // S, place slots_T[t] % S; slots_T (int32 or int64) -1 skips.

    Pages in fp8 take rows / row_scale rounded to nearest even and saturated at 448. Slots must differ; they are not
    checked. Raises Error on a shape, dtype or device that is not supported.
    """
    _check_pages("append_rows_inplace", pages_PSL, 1, row_scale)
    if not pages_PSL.is_contiguous():
        raise Error(f"append_rows_inplace: pages_PSL has strides {pages_PSL.stride()}; must be contiguous")
    tokens = rows_TL.shape[0] if rows_TL.ndim else 0
    _check_shape("append_rows_inplace", "rows_TL", rows_TL, (tokens, pages_PSL.shape[2]), pages_PSL.device, FLOATS)
    _check_shape("append_rows_inplace", "slots_T", slots_T, (tokens,), pages_PSL.device, (torch.int32, torch.int64))
    if rows_TL.is_cuda and rows_TL.dtype != torch.float64 and importlib.util.find_spec("triton"):
        _triton().append_rows_inplace(pages_PSL, rows_TL, slots_T, row_scale)
    else:
        paged_reference.append_rows_inplace(pages_PSL, rows_TL, slots_T, row_scale)


def gather_rows(
    pages_PSL: torch.Tensor, table_NM: torch.Tensor, rows: Sequences, dtype: torch.dtype, *, row_scale: float = 1.0
) -> torch.Tensor:
    """Packed rows [rows.total, L] in `dtype`: of sequence n the positions rows.starts[n] .. + rows.lengths[n].

    What a chunked prefill expands to keys and values; ask for a long prefix in pieces (see `prefix_attention`).
    Raises Error on a shape, dtype or device that is not supported, or when positions lie outside the table.
    """
    _check_pages("gather_rows", pages_PSL, 1, row_scale)
    count = _check_table("gather_rows", table_NM, pages_PSL)
    if dtype not in FLOATS:
        raise Error(f"gather_rows: dtype is {dtype}; allowed: {_names(FLOATS)}")
    if rows.count != count:
        raise Error(f"gather_rows: rows has {rows.count} sequences but table_NM {count}")
    room = table_NM.shape[1] * pages_PSL.shape[1]
    for n, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True)):
        if length and start + length > room:
            raise Error(f"gather_rows: rows of sequence {n} end at {start + length}; its table holds {room}")
    return paged_reference.gather_rows(pages_PSL, table_NM, rows, dtype, row_scale)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _check_pages(op: str, pages: torch.Tensor, rank: int, row_scale: float) -> None:
    if pages.ndim != 3 or min(pages.shape[1:]) < 1:
        raise Error(f"{op}: pages_PSL has shape {tuple(pages.shape)}; must be [pages, tokens a page, row width]")
    if pages.shape[0] * pages.shape[1] >= 2**31:
        raise Error(f"{op}: pages_PSL has {pages.shape[0] * pages.shape[1]} rows; must be fewer than 2^31")
    if pages.dtype not in PAGE_DTYPES:
        raise Error(f"{op}: pages_PSL is {pages.dtype}; allowed: {_names(PAGE_DTYPES)}")
    if not 1 <= rank <= pages.shape[2]:
        raise Error(f"{op}: rank is {rank}; must be from 1 to the row width {pages.shape[2]}")
    if not 0.0 < row_scale < float("inf"):
        raise Error(f"{op}: row_scale is {row_scale}; must be positive and finite")


def _check_table(op: str, table: torch.Tensor, pages: torch.Tensor) -> int:
    if table.ndim != 2:
        raise Error(f"{op}: table_NM has shape {tuple(table.shape)}; must be [sequences, pages]")
    _check_shape(op, "table_NM", table, tuple(table.shape), pages.device, (torch.int32,))
    return table.shape[0]


def _check_shape(
    op: str,
    name: str,
    x: torch.Tensor,
    shape: tuple[int, ...],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    if tuple(x.shape) != shape:
        raise Error(f"{op}: {name} has shape {tuple(x.shape)}; must be {shape}")
    if x.dtype not in dtypes:
        raise Error(f"{op}: {name} is {x.dtype}; allowed: {_names(dtypes)}")
    if x.device != device:
        raise Error(f"{op}: {name} is on {x.device}; must be on {device} as pages_PSL is")


__all__ = [
    "MAX_DRAFTS",
    "PAGE_DTYPES",
    "append_rows_inplace",
    "choose_split",
    "gather_rows",
    "implementation",
    "paged_attention",
]
