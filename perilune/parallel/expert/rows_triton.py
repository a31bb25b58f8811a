"""Where each choice goes, on the device: a stable counting sort by expert, and one search over the plan.

`count_choices` runs before counts are gathered, `destination_rows` after the plan is made. Nothing is read back, and
the grid depends on shapes only. An id outside -1 .. E - 1 is left out like -1 and raises a flag that is read late.

Legend: R ranks, E experts, T tokens, J choices a token, n = T J flattened choices, C chunks of choices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from perilune.parallel.expert.plan import Plan

CHUNK = 256


def count_choices(
    ids_TJ: torch.Tensor, experts: int, flag: torch.Tensor, out_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(counts_E int64, in out_E if given; earlier_CE int32: choices of each expert in the chunks before) of ids int64.

    flag, an integer [1], is set to 1 when an id is out of range.
    """
    n = ids_TJ.numel()
    chunks = triton.cdiv(n, CHUNK)
    counts_E = torch.empty(experts, dtype=torch.int64, device=ids_TJ.device) if out_E is None else out_E
    earlier_CE = torch.zeros(chunks, experts, dtype=torch.int32, device=ids_TJ.device)
    if chunks:
        _histogram[(chunks,)](ids_TJ.contiguous(), earlier_CE, flag, n, experts, BLOCK=CHUNK, num_warps=4)
    _earlier[(triton.cdiv(experts, 8),)](earlier_CE, counts_E, chunks, experts, BC=256, BE=8, num_warps=8)
    return counts_E, earlier_CE


def destination_rows(plan: Plan, ids_TJ: torch.Tensor, earlier_CE: torch.Tensor, rank: int, rows: int) -> torch.Tensor:
    """int32 [T, J]: destination rank times `rows` plus buffer row of each choice of source `rank`; -1 for none.

    `perilune.parallel.expert.destinations` gives the same as two tensors. R times rows must be below 2^31.
    """
    ranks, experts = plan.counts_RE.shape
    out_TJ = torch.empty(ids_TJ.shape, dtype=torch.int32, device=ids_TJ.device)
    n = ids_TJ.numel()
    if n == 0:
        return out_TJ
    source_E3 = torch.empty(experts, 3, dtype=torch.int32, device=ids_TJ.device)
    ends_ER2 = torch.empty(experts, ranks, 2, dtype=torch.int32, device=ids_TJ.device)
    _number_lines[(triton.cdiv(experts, 8),)](
        plan.counts_RE,
        plan.alloc_RE,
        plan.starts_RE,
        source_E3,
        ends_ER2,
        rank,
        rows,
        ranks,
        experts,
        RP=triton.next_power_of_2(ranks),
        BE=8,
        num_warps=4,
    )
    _destinations[(triton.cdiv(n, CHUNK),)](
        ids_TJ.contiguous(),
        earlier_CE,
        source_E3,
        ends_ER2,
        out_TJ,
        n,
        ranks,
        experts,
        STEPS=max(ranks - 1, 0).bit_length(),
        BLOCK=CHUNK,
        PIECE=32,
        num_warps=4,
    )
    return out_TJ


@triton.jit
def _histogram(ids_ptr, out_ptr, flag_ptr, n, experts, BLOCK: tl.constexpr):
    """Program c: add up chunk c's choices of each expert."""
    chunk = tl.program_id(0)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    id_n = tl.load(ids_ptr + i, mask=i < n, other=-1)
    if tl.max(((id_n < -1) | (id_n >= experts)).to(tl.int32), 0) > 0:
        tl.store(flag_ptr, 1)
    routed = (id_n >= 0) & (id_n < experts)
    tl.atomic_add(out_ptr + chunk.to(tl.int64) * experts + id_n, 1, mask=routed, sem="relaxed")


@triton.jit
def _earlier(counts_ptr, total_ptr, chunks, experts, BC: tl.constexpr, BE: tl.constexpr):
    """Counts of each chunk -> counts of the chunks before it, in place."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    total = tl.zeros((BE,), tl.int32)
    for start in range(0, chunks, BC):
        c = start + tl.arange(0, BC)
        inside = (c < chunks)[:, None] & (e < experts)[None, :]
        at = counts_ptr + c[:, None].to(tl.int64) * experts + e[None, :]
        counts = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=inside)
        total += tl.sum(counts, 0)
    tl.store(total_ptr + e, total.to(tl.int64), mask=e < experts)


@triton.jit
def _number_lines(
    counts_ptr,
    alloc_ptr,
    starts_ptr,
    source_ptr,
    ends_ptr,
    rank,
    rows,
    ranks,
    experts,
    RP: tl.constexpr,
    BE: tl.constexpr,
):
    """For each expert, the line of its choices that do not stay at their source, in order of source.

    source: how many of this rank's stay, the destination of the first of those, where the others begin on the line.
    ends: where each rank's stretch of the line ends, and what to add to a place on it to get the destination.
    """
    r = tl.arange(0, RP)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    inside = (r < ranks)[:, None] & (e < experts)[None, :]
    at = r[:, None] * experts + e[None, :]
    counts = tl.load(counts_ptr + at, mask=inside, other=0).to(tl.int32)
    alloc = tl.load(alloc_ptr + at, mask=inside, other=0).to(tl.int32)
    start = tl.load(starts_ptr + at, mask=inside, other=0).to(tl.int32)
    local = tl.minimum(counts, alloc)
    rest = alloc - local
    ends = tl.cumsum(rest, 0)
    first = r[:, None] * rows + start
    mine = r[:, None] == rank
    known = e < experts
    tl.store(source_ptr + e * 3, tl.sum(tl.where(mine, local, 0), 0), mask=known)
    tl.store(source_ptr + e * 3 + 1, tl.sum(tl.where(mine, first, 0), 0), mask=known)
    tl.store(source_ptr + e * 3 + 2, tl.sum(tl.where(r[:, None] < rank, counts - local, 0), 0), mask=known)
    line = ends_ptr + (e[None, :] * ranks + r[:, None]) * 2
    tl.store(line, ends, mask=inside)
    tl.store(line + 1, first + local - (ends - rest), mask=inside)


@triton.jit
def _destinations(
    ids_ptr,
    earlier_ptr,
    source_ptr,
    ends_ptr,
    out_ptr,
    n,
    ranks,
    experts,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):
    chunk = tl.program_id(0)
    here = tl.arange(0, BLOCK)
    i = chunk * BLOCK + here
    id_n = tl.load(ids_ptr + i, mask=i < n, other=-1).to(tl.int32)
    routed = (id_n >= 0) & (id_n < experts)
    index = tl.load(earlier_ptr + chunk.to(tl.int64) * experts + id_n, mask=routed, other=0)
    for start in range(0, BLOCK, PIECE):
        there = start + tl.arange(0, PIECE)
        j = chunk * BLOCK + there
        other = tl.load(ids_ptr + j, mask=j < n, other=-1).to(tl.int32)
        # Earlier choices along the first axis: each thread adds up its own columns.
        same = (other[:, None] == id_n[None, :]) & (there[:, None] < here[None, :])
        index += tl.sum(same.to(tl.int32), 0)
    stays = tl.load(source_ptr + id_n * 3, mask=routed, other=0)
    first = tl.load(source_ptr + id_n * 3 + 1, mask=routed, other=0)
    begin = tl.load(source_ptr + id_n * 3 + 2, mask=routed, other=0)
    place = begin + index - stays
    moved = routed & (index >= stays)
    # The first rank whose stretch ends after the place.
    low, high = tl.zeros_like(id_n), tl.zeros_like(id_n) + ranks - 1
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        end = tl.load(ends_ptr + (id_n * ranks + middle) * 2, mask=moved, other=0)
        low, high = tl.where(end > place, low, middle + 1), tl.where(end > place, middle, high)
        low, high = tl.minimum(low, ranks - 1), tl.maximum(high, 0)
    add = tl.load(ends_ptr + (id_n * ranks + low) * 2 + 1, mask=moved, other=0)
    out = tl.where(moved, add + place, first + index)
    tl.store(out_ptr + i, tl.where(routed, out, -1), mask=i < n)


__all__ = ["count_choices", "destination_rows"]
