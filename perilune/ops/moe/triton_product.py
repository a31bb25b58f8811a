"""Grouped matrix products on the GPU, scheduled by the rows that the experts really have.

    y_r = W_e x_r for the rows r of expert e, with the gated activation as its epilogue where asked; and the weights'
    gradient dW_e = sum_r d_r x_r^T.
A fixed number of programs walk the tiles of all experts; which expert a tile belongs to is found from offs on the
device, so an expert without rows costs nothing and the host reads nothing. Tiles of an expert lie together, row tiles
fastest: its weights are read into the L2 cache once, by all row tiles at the same time.
SWAP makes the weights the left operand, [BG, BK] x [BK, BM]: the tile of rows may then be as low as 16, which is what
a handful of tokens needs, and the product is a stream of weights.

Legend: R rows sorted by expert, E experts, G output columns, K inner dim, F expert width; BM, BG, BF, BK the tile.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.triton_math import glu


@triton.jit
def tile_ends(offs, E, columns, BE: tl.constexpr, BM: tl.constexpr):
    """[BE]: how many tiles the experts up to each one have, with `columns` column tiles for each row tile."""
    e = tl.arange(0, BE)
    end = tl.load(offs + e, mask=e < E, other=0)
    begin = tl.load(offs + e - 1, mask=(e > 0) & (e < E), other=0)
    return tl.cumsum((end - begin + BM - 1) // BM * columns, 0)


@triton.jit
def locate(ends, tile, offs, BM: tl.constexpr):
    """(expert, column tile, first row, end row) of a tile."""
    past = ends <= tile
    expert = tl.sum(past.to(tl.int32), 0)
    within = tile - tl.max(tl.where(past, ends, 0), 0)
    begin = tl.load(offs + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs + expert)
    height = (end - begin + BM - 1) // BM
    return expert, within // height, begin + (within % height) * BM, end


@triton.jit
def banded(ends, tile, offs, columns, BM: tl.constexpr, BAND: tl.constexpr):
    """`locate` in bands of BAND row tiles, column by column, so that the rows of tiles that run together stay in L2."""
    past = ends <= tile
    expert = tl.sum(past.to(tl.int32), 0)
    within = tile - tl.max(tl.where(past, ends, 0), 0)
    begin = tl.load(offs + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs + expert)
    first = within // (BAND * columns) * BAND
    height = tl.minimum((end - begin + BM - 1) // BM - first, BAND)
    within -= first * columns
    return expert, within // height, begin + (first + within % height) * BM, end


@triton.jit
def multiply(x_tile, w_tile, acc, SWAP: tl.constexpr):
    """acc + x w^T of [BM, BK] and [BG, BK], or its transpose."""
    if SWAP:
        return tl.dot(w_tile, x_tile.T, acc)
    else:
        return tl.dot(x_tile, w_tile.T, acc)


@triton.jit
def places(row, end, column, width, BM: tl.constexpr, BG: tl.constexpr, SWAP: tl.constexpr):
    """Rows and columns within an output tile and which of them exist, in the orientation of its accumulator."""
    r = tl.arange(0, BM)
    g = tl.arange(0, BG)
    rows_exist = r < end - row
    columns_exist = g < width - column * BG
    if SWAP:
        return r[None, :], g[:, None], rows_exist[None, :], rows_exist[None, :] & columns_exist[:, None]
    else:
        return r[:, None], g[None, :], rows_exist[:, None], rows_exist[:, None] & columns_exist[None, :]


@triton.jit
def product_kernel(
    x, weight, out, y, offs, E,
    G: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr,
    TURNED: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """y [R, G]. x: descriptor of [R, K]; weight: of [E G, K], or turned of [E K, G], K then a multiple of BK."""
    columns: tl.constexpr = (G + BG - 1) // BG
    ends = tile_ends(offs, E, columns, BE, BM)
    for tile in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        expert, column, row, end = banded(ends, tile, offs, columns, BM, BAND)
        if SWAP:
            acc = tl.zeros([BG, BM], tl.float32)
        else:
            acc = tl.zeros([BM, BG], tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            if TURNED:
                w_tile = weight.load([expert * K + k, column * BG]).T
            else:
                w_tile = weight.load([expert * G + column * BG, k])
            acc = multiply(x.load([row, k]), w_tile, acc, SWAP)
        low = acc.to(y.dtype.element_ty)
        if out is not None and row + BM <= end:
            out.store([row, column * BG], low)
        else:
            r, g, _, inside = places(row, end, column, G, BM, BG, SWAP)
            tl.store(y + (row.to(tl.int64) * G + column * BG) + (r * G + g), low, mask=inside)


@triton.jit
def glu_product_kernel(
    x, weight, w, h, a, offs, E, beta, linear_beta,
    F: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr,
    SITU: tl.constexpr, WEIGHTED: tl.constexpr, KEEP: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """a [R, F] = w glu(h) of h = x gate_up^T, and with KEEP h [R, 2F] too; weight: descriptor of [E 2F, K]."""
    ends = tile_ends(offs, E, tl.cdiv(F, BF), BE, BM)
    for tile in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        expert, column, row, end = locate(ends, tile, offs, BM)
        if SWAP:
            gate = tl.zeros([BF, BM], tl.float32)
            up = tl.zeros([BF, BM], tl.float32)
        else:
            gate = tl.zeros([BM, BF], tl.float32)
            up = tl.zeros([BM, BF], tl.float32)
        first = expert * 2 * F + column * BF
        for k in tl.range(0, K, BK, num_stages=STAGES):
            x_tile = x.load([row, k])
            gate = multiply(x_tile, weight.load([first, k]), gate, SWAP)
            up = multiply(x_tile, weight.load([first + F, k]), up, SWAP)
        r, f, rows_exist, inside = places(row, end, column, F, BM, BF, SWAP)
        corner = row.to(tl.int64) * F + column * BF
        # Rounded as where h is stored, so that what is kept changes no bit of the result.
        gate_low = gate.to(a.dtype.element_ty)
        up_low = up.to(a.dtype.element_ty)
        if KEEP:
            h_tile = h + (corner + row.to(tl.int64) * F)
            tl.store(h_tile + (r * 2 * F + f), gate_low, mask=inside)
            tl.store(h_tile + (r * 2 * F + F + f), up_low, mask=inside)
        out = glu(gate_low.to(tl.float32), up_low.to(tl.float32), beta, linear_beta, SITU)
        if WEIGHTED:
            out *= tl.load(w + row + r, mask=rows_exist, other=0.0)
        tl.store(a + corner + (r * F + f), out.to(a.dtype.element_ty), mask=inside)


@triton.jit
def weight_gradient_kernel(
    d, x, dw, offs, E,
    G: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    SKIP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dw [E, G, K] = sum over an expert's rows of d x^T. d: descriptor of [R, G]; x: of [R, K].

    The last step's rows that belong to others, or must not be read, are selected away in both operands. With SKIP
    experts without rows are left alone instead of zeroed.
    """
    columns_of: tl.constexpr = (K + BK - 1) // BK
    tiles: tl.constexpr = (G + BG - 1) // BG * columns_of
    e = tl.arange(0, BE)
    counts = tl.load(offs + e, mask=e < E, other=0) - tl.load(offs + e - 1, mask=(e > 0) & (e < E), other=0)
    if SKIP:
        ends = tl.cumsum(tl.where((e < E) & (counts > 0), tiles, 0), 0)
    else:
        ends = tl.cumsum(tl.where(e < E, tiles, 0), 0)
    for tile in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        expert = tl.sum((ends <= tile).to(tl.int32), 0)
        within = tile % tiles
        g0 = within // columns_of * BG
        k0 = within % columns_of * BK
        begin = tl.load(offs + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offs + expert)
        whole = begin + (end - begin) // BR * BR
        acc = tl.zeros([BG, BK], tl.float32)
        for row in tl.range(begin, whole, BR, num_stages=STAGES):
            acc = tl.dot(d.load([row, g0]).T, x.load([row, k0]), acc)
        if whole < end:
            exist = (tl.arange(0, BR) < end - whole)[:, None]
            d_tile = tl.where(exist, d.load([whole, g0]), 0.0)
            x_tile = tl.where(exist, x.load([whole, k0]), 0.0)
            acc = tl.dot(d_tile.T, x_tile, acc)
        g = tl.arange(0, BG)
        k = tl.arange(0, BK)
        corner = (expert.to(tl.int64) * G + g0) * K + k0
        out = dw + corner + (g[:, None] * K + k[None, :])
        tl.store(out, acc.to(dw.dtype.element_ty), mask=(g < G - g0)[:, None] & (k < K - k0)[None, :])
