"""Paged latent attention by Triton kernels: flash-decoding over fixed splits of the context, then a merge.

All heads of a sequence share its cached rows, so a program holds a block of query rows (drafts x heads) and walks over
one split of the context; a tile of rows is both keys and values. Splits are counted from position 0 and have the size
that the caller gives, so a sequence's sums do not depend on what else is in the batch. A sequence of one split is
finished at once; otherwise each split leaves its normalised part and log-sum-exp for the merge.

Legend: T = N * drafts query rows, N sequences, H heads, L row width, A + B = L (A = value width), P pages,
S tokens a page, M table width, R query rows of a program, C cached rows of a tile, X splits.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from perilune.ops.aligned import on_16_bytes
from perilune.ops.mla import paged_cuda

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tile(
    acc, z, m, q1, q2, rows1_desc, rows2_desc, table_M, first, length, last, base2,
    S: tl.constexpr, C: tl.constexpr, B: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    A: tl.constexpr = q1.shape[1]
    page = tl.load(table_M + first // S)
    row = page * S + first % S
    c1 = rows1_desc.load([row, 0]).to(q1.dtype)
    if MASKED:
        places = first + tl.arange(0, C)
        c1 = tl.where((places < length)[:, None], c1, 0.0)
    s = tl.dot(q1, c1.T, input_precision=PRECISION)
    if B > 0:
        c2 = rows2_desc.load([row, A]).to(q1.dtype)
        s = tl.dot(q2, c2.T, s, input_precision=PRECISION)
    if MASKED:
        s = tl.where(places[None, :] <= last[:, None], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new * base2)
    p = tl.exp2(s * base2 - shift[:, None])
    shrink = tl.exp2(m * base2 - shift)
    z = z * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(c1.dtype), c1, acc * shrink[:, None], input_precision=PRECISION)
    return acc, z, m_new


@triton.jit(do_not_specialize=("table_width", "heads", "drafts", "splits", "size"))
def split_kernel(
    q_THL, rows1_desc, rows2_desc, table_NM, lengths_N, o_THC, lse_TH, part_NXR, part_lse_NXR,
    table_width, heads, drafts, splits, size, scale, row_scale,
    S: tl.constexpr, R: tl.constexpr, C: tl.constexpr, A: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """size: tokens of a split, a multiple of C. part_NXR: [N, X, drafts * H, A], part_lse_NXR without A."""
    block = tl.program_id(0)
    x = tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_N + n)
    start = x * size
    if (start >= length) & (x > 0):
        return
    count = drafts * heads
    r = block * R + tl.arange(0, R)
    inside = r < count
    end = tl.minimum(start + size, length)
    # The last position that a row sees.
    last = tl.minimum(length - drafts + r // heads, end - 1)
    at = q_THL + (n * count + r)[:, None] * (A + B)
    q1 = tl.load(at + tl.arange(0, A)[None, :], mask=inside[:, None], other=0.0)
    q2 = q1
    if B > 0:
        q2 = tl.load(at + A + tl.arange(0, B)[None, :], mask=inside[:, None], other=0.0)
    base2 = scale * row_scale * LOG2E
    table_M = table_NM + n * table_width
    m = tl.full([R], float("-inf"), tl.float32)
    z = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, A], tl.float32)
    whole = start + tl.maximum(tl.minimum(end, length - drafts + 1) - start, 0) // C * C
    for first in tl.range(start, whole, C, num_stages=STAGES):
        acc, z, m = _tile(
            acc, z, m, q1, q2, rows1_desc, rows2_desc, table_M, first, length, last, base2, S, C, B, False, PRECISION
        )
    for first in tl.range(whole, end, C, num_stages=1):
        acc, z, m = _tile(
            acc, z, m, q1, q2, rows1_desc, rows2_desc, table_M, first, length, last, base2, S, C, B, True, PRECISION
        )
    acc = tl.where((z > 0.0)[:, None], acc / z[:, None], 0.0)
    lse = tl.where(z > 0.0, m * (base2 * LN2) + tl.log2(z) * LN2, float("-inf"))
    columns = tl.arange(0, A)[None, :]
    if length <= size:
        out = n * count + r
        tl.store(lse_TH + out, lse, mask=inside)
        tl.store(o_THC + out[:, None] * A + columns, (acc * row_scale).to(o_THC.dtype.element_ty), mask=inside[:, None])
    else:
        out = (n * splits + x) * count + r
        tl.store(part_lse_NXR + out, lse, mask=inside)
        tl.store(part_NXR + out[:, None] * A + columns, acc, mask=inside[:, None])


@triton.jit(do_not_specialize=("count", "splits", "size"))
def merge_kernel(
    lengths_N, o_THC, lse_TH, part_NXR, part_lse_NXR, count, splits, size, row_scale,
    A: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """One query row a program; does nothing where the sequence had one split."""
    r = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_N + n)
    if length <= size:
        return
    used = (length + size - 1) // size
    first = n * splits * count + r
    x = tl.arange(0, X)
    lse_X = tl.load(part_lse_NXR + first + x.to(tl.int64) * count, mask=x < used, other=float("-inf"))
    top = tl.max(lse_X, 0)
    lse = top + tl.log2(tl.sum(tl.exp2((lse_X - top) * LOG2E), 0)) * LN2
    acc = tl.zeros([A], tl.float32)
    # Eight parts at a time, so that their loads are under way together.
    for i in range(0, used, 8):
        part = i + tl.arange(0, 8)
        at = first + part.to(tl.int64) * count
        share = tl.exp2((tl.load(part_lse_NXR + at, mask=part < used, other=float("-inf")) - lse) * LOG2E)
        o = tl.load(part_NXR + at[:, None] * A + tl.arange(0, A)[None, :], mask=(part < used)[:, None], other=0.0)
        acc += tl.sum(o * share[:, None], 0)
    out = n * count + r
    tl.store(lse_TH + out, lse)
    tl.store(o_THC + out * A + tl.arange(0, A), (acc * row_scale).to(o_THC.dtype.element_ty))


@triton.jit
def append_kernel(
    pages_PSL, rows_TL, slots_T, row_stride, row_scale, L,
    BLOCK: tl.constexpr, EIGHT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_T + t).to(tl.int64)
    if slot < 0:
        return
    c = tl.arange(0, BLOCK)
    x = tl.load(rows_TL + t * row_stride + c, mask=c < L, other=0.0)
    if SCALED:
        x = x.to(tl.float32) / row_scale
    if EIGHT:
        x = x.to(tl.float32)
        # Comparisons with NaN are false, so NaN stays.
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    tl.store(pages_PSL + slot * L + c, x.to(pages_PSL.dtype.element_ty), mask=c < L)


def supports(q_THL: torch.Tensor, pages_PSL: torch.Tensor, rank: int) -> bool:
    """Whether `paged_attention` does these dtypes and widths."""
    width, tokens = pages_PSL.shape[2], pages_PSL.shape[1]
    powers = all(x & (x - 1) == 0 for x in (rank, width - rank, tokens))
    sizes = 16 <= rank <= 512 and (width == rank or 16 <= width - rank <= rank) and tokens >= 16
    half = q_THL.dtype in (torch.bfloat16, torch.float16) and pages_PSL.dtype in (torch.bfloat16, torch.float8_e4m3fn)
    single = q_THL.dtype == pages_PSL.dtype == torch.float32
    return powers and sizes and (half or single) and pages_PSL.is_contiguous()


def paged_attention(
    q_THL: torch.Tensor,
    pages_PSL: torch.Tensor,
    table_NM: torch.Tensor,
    lengths_N: torch.Tensor,
    scale: float,
    drafts: int,
    rank: int,
    row_scale: float,
    split: int,
    cuda: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `paged.paged_attention`; arguments are checked. cuda: take latent.cu for the splits."""
    q_THL, table_NM, lengths_N = on_16_bytes(q_THL), table_NM.contiguous(), lengths_N.contiguous()
    (rows, heads, width), count, device = q_THL.shape, table_NM.shape[0], q_THL.device
    S = pages_PSL.shape[1]
    o_THC = q_THL.new_empty(rows, heads, rank)
    lse_TH = torch.empty(rows, heads, dtype=torch.float32, device=device)
    if not rows:
        return o_THC, lse_TH
    single = q_THL.dtype == torch.float32
    C = min(S, 16 if single else 64)
    R = 16 if single else 64
    splits = max(1, triton.cdiv(table_NM.shape[1] * S, split))
    shared = drafts * heads
    part_NXR = torch.empty(count, splits if splits > 1 else 0, shared, rank, dtype=torch.float32, device=device)
    part_lse_NXR = torch.empty(part_NXR.shape[:3], dtype=torch.float32, device=device)
    if cuda:
        out = o_THC, lse_TH, part_NXR, part_lse_NXR
        paged_cuda.split_parts(q_THL, pages_PSL, table_NM, lengths_N, scale, drafts, row_scale, split, out)
    else:
        flat_XL = pages_PSL.view(-1, width)
        split_kernel[(triton.cdiv(shared, R), splits, count)](
            q_THL,
            TensorDescriptor(flat_XL, list(flat_XL.shape), [width, 1], [C, rank]),
            TensorDescriptor(flat_XL, list(flat_XL.shape), [width, 1], [C, width - rank or 16]),
            table_NM,
            lengths_N,
            o_THC,
            lse_TH,
            part_NXR,
            part_lse_NXR,
            table_NM.shape[1],
            heads,
            drafts,
            splits,
            split,
            scale,
            row_scale,
            S=S,
            R=R,
            C=C,
            A=rank,
            B=width - rank,
            PRECISION="ieee" if single else "tf32",
            STAGES=1 if single else 2,
            num_warps=8,
        )
    if splits > 1:
        merge_kernel[(shared, count)](
            lengths_N,
            o_THC,
            lse_TH,
            part_NXR,
            part_lse_NXR,
            shared,
            splits,
            split,
            row_scale,
            A=rank,
            X=triton.next_power_of_2(splits),
            num_warps=4,
        )
    return o_THC, lse_TH


def append_rows_inplace(
    pages_PSL: torch.Tensor, rows_TL: torch.Tensor, slots_T: torch.Tensor, row_scale: float
) -> None:
    """See `paged.append_rows_inplace`."""
    tokens, width = rows_TL.shape
    if not tokens:
        return
    if rows_TL.stride(1) != 1:
        rows_TL = rows_TL.contiguous()
    append_kernel[(tokens,)](
        pages_PSL,
        rows_TL,
        slots_T.contiguous(),
        rows_TL.stride(0),
        row_scale,
        width,
        BLOCK=triton.next_power_of_2(width),
        EIGHT=pages_PSL.dtype == torch.float8_e4m3fn,
        SCALED=row_scale != 1.0,
        num_warps=4,
    )
