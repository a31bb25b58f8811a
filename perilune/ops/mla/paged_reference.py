"""Attention over paged latent rows in plain torch: the specification of `paged_attention` and its companions.

Every sequence is computed by itself, in max(fp32, dtypes), so its numbers do not depend on the batch. Arguments are
checked by paged.py. Lengths and tables are read on the host: not for CUDA graphs.

Legend: T = N * drafts query rows, N sequences, H heads, L latent row width, C value width (the first C of a row),
P pages, S tokens a page, M table width.
"""

from __future__ import annotations

import torch

from perilune.ops.sequences import Sequences


def paged_attention(
    q_THL: torch.Tensor,
    pages_PSL: torch.Tensor,
    table_NM: torch.Tensor,
    lengths_N: torch.Tensor,
    scale: float,
    drafts: int,
    rank: int,
    row_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `paged.paged_attention`."""
    wide = torch.float64 if torch.float64 in (q_THL.dtype, pages_PSL.dtype) else torch.float32
    heads = q_THL.shape[1]
    o_THC = q_THL.new_zeros(q_THL.shape[0], heads, rank)
    lse_TH = torch.full((q_THL.shape[0], heads), float("-inf"), dtype=wide, device=q_THL.device)
    for n, length in enumerate(lengths_N.tolist()):
        if length <= 0:
            continue
        rows = slice(n * drafts, (n + 1) * drafts)
        c_SL = _rows(pages_PSL, table_NM[n], length).to(wide) * row_scale
        s_HIS = torch.einsum("ihl,sl->his", q_THL[rows].to(wide), c_SL) * scale
        last_I = torch.arange(length - drafts, length, device=q_THL.device)
        s_HIS = s_HIS.masked_fill(torch.arange(length, device=q_THL.device) > last_I[:, None], float("-inf"))
        lse_HI = s_HIS.logsumexp(-1)
        # A draft that precedes the first key (lengths < drafts) sees nothing: 0, not NaN.
        p_HIS = (s_HIS - lse_HI.masked_fill(lse_HI == float("-inf"), 0.0)[..., None]).exp()
        o_THC[rows] = torch.einsum("his,sc->ihc", p_HIS, c_SL[:, :rank]).to(o_THC.dtype)
        lse_TH[rows] = lse_HI.t()
    return o_THC, lse_TH


def append_rows_inplace(
    pages_PSL: torch.Tensor, rows_TL: torch.Tensor, slots_T: torch.Tensor, row_scale: float
) -> None:
    """See `paged.append_rows_inplace`."""
    kept_T = slots_T >= 0
    rows_XL = encode(rows_TL[kept_T], pages_PSL.dtype, row_scale)
    # Bytes: fp8 has no index kernels on a CPU.
    flat_XB = pages_PSL.view(torch.uint8).flatten(0, 1)
    flat_XB[slots_T[kept_T].to(torch.int64)] = rows_XL.view(torch.uint8)


def gather_rows(
    pages_PSL: torch.Tensor, table_NM: torch.Tensor, rows: Sequences, dtype: torch.dtype, row_scale: float
) -> torch.Tensor:
    """See `paged.gather_rows`."""
    rows = rows.to(pages_PSL.device)
    place_T = rows.positions_T
    page_T = table_NM[rows.ids_T, place_T // pages_PSL.shape[1]].to(torch.int64)
    held_TB = pages_PSL.view(torch.uint8).flatten(0, 1)[page_T * pages_PSL.shape[1] + place_T % pages_PSL.shape[1]]
    held_TL = held_TB.view(pages_PSL.dtype)
    if row_scale == 1.0:
        return held_TL.to(dtype)
    return (held_TL.to(torch.float64 if dtype == torch.float64 else torch.float32) * row_scale).to(dtype)


def encode(rows_TL: torch.Tensor, dtype: torch.dtype, row_scale: float) -> torch.Tensor:
    """rows / row_scale in `dtype`; e4m3 saturates at 448 instead of turning into NaN (NaN stays NaN)."""
    wide = rows_TL if row_scale == 1.0 else rows_TL.to(torch.promote_types(rows_TL.dtype, torch.float32)) / row_scale
    if dtype == torch.float8_e4m3fn:
        wide = wide.float().clamp(-448.0, 448.0)
    return wide.to(dtype)


def _rows(pages_PSL: torch.Tensor, table_M: torch.Tensor, length: int) -> torch.Tensor:
    """The rows of one sequence, in the pages' dtype."""
    pages = table_M[: -(-length // pages_PSL.shape[1])].to(torch.int64)
    # Bytes: fp8 has no index kernels on a CPU.
    return pages_PSL.view(torch.uint8)[pages].view(pages_PSL.dtype).flatten(0, 1)[:length]


__all__ = ["append_rows_inplace", "encode", "gather_rows", "paged_attention"]
