"""Few rows through MXFP4 weights: the codes are decoded in registers on their way into the product.

A byte holds elements 2b (low nibble) and 2b + 1 (high nibble), so a tile of bytes is two tiles of weights, one for the
even and one for the odd columns; the rows come split the same way, [2, R, K/2], and two products are added.
Decoding is exact: the three magnitude bits of E2M1 are put at the boundary of exponent and mantissa of a bfloat16
(value 2^-126 times the element, subnormal for 0.5), multiplied by 2^126 and then by the scale.

Legend: R rows sorted by expert, E experts, G output columns, K inner dim, F expert width; BM, BG, BF the tile, BB the
bytes of a step.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.moe.triton_product import locate, places, tile_ends
from perilune.ops.triton_math import INTERPRETED, glu

# Four bytes and the scale byte of each in, four even and four odd weights out, two to a register.
DECODE = tl.constexpr("""{
    .reg .b32 a, b, c, d, t, u, big, none;
    mov.b32 big, 0x7E807E80;
    mov.b32 none, 0x80008000;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    prmt.b32 c, $5, 0, 0x4140;
    prmt.b32 d, $5, 0, 0x4342;
    shl.b32 c, c, 7;
    shl.b32 d, d, 7;
    shl.b32 t, a, 6;   and.b32 t, t, 0x01C001C0;
    shl.b32 u, a, 12;  and.b32 u, u, 0x80008000;   or.b32 t, t, u;
    fma.rn.bf16x2 t, t, big, none;   fma.rn.bf16x2 $0, t, c, none;
    shl.b32 t, b, 6;   and.b32 t, t, 0x01C001C0;
    shl.b32 u, b, 12;  and.b32 u, u, 0x80008000;   or.b32 t, t, u;
    fma.rn.bf16x2 t, t, big, none;   fma.rn.bf16x2 $1, t, d, none;
    shl.b32 t, a, 2;   and.b32 t, t, 0x01C001C0;
    shl.b32 u, a, 8;   and.b32 u, u, 0x80008000;   or.b32 t, t, u;
    fma.rn.bf16x2 t, t, big, none;   fma.rn.bf16x2 $2, t, c, none;
    shl.b32 t, b, 2;   and.b32 t, t, 0x01C001C0;
    shl.b32 u, b, 8;   and.b32 u, u, 0x80008000;   or.b32 t, t, u;
    fma.rn.bf16x2 t, t, big, none;   fma.rn.bf16x2 $3, t, d, none;
}""")


@triton.jit
def element(code):
    """The E2M1 value of a nibble, fp32."""
    magnitude = code & 7
    exponent = magnitude >> 1
    value = tl.where(
        exponent == 0, 0.5 * magnitude, (1.0 + 0.5 * (magnitude & 1)) * tl.exp2((exponent - 1).to(tl.float32))
    )
    return tl.where(code >= 8, -value, value)


@triton.jit
def decode(codes, scales, BG: tl.constexpr, BB: tl.constexpr):
    """(even, odd) weights [BG, BB] of codes [BG, BB] and scales [BG, BB/16], both uint8."""
    each = tl.broadcast_to(scales[:, :, None], (BG, BB // 16, 16)).reshape(BG, BB)
    if INTERPRETED:
        factor = tl.exp2(tl.minimum(each, 254).to(tl.float32) - 127.0)
        factor = tl.where(each == 255, float("nan"), factor)
        code = codes.to(tl.int32)
        return element(code & 15) * factor, element(code >> 4) * factor
    else:
        return tl.inline_asm_elementwise(
            DECODE, "=r,=r,=r,=r,r,r", [codes, each], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )


@triton.jit
def weights_at(codes, scales, row, b, K: tl.constexpr, BG: tl.constexpr, BB: tl.constexpr):
    """The decoded tile of weight rows row..row + BG and bytes b..b + BB."""
    g = tl.arange(0, BG)
    block = tl.arange(0, BB // 16)
    at = scales + (row.to(tl.int64) * (K // 32) + b // 16)
    return decode(codes.load([row, b]), tl.load(at + (g[:, None] * (K // 32) + block[None, :])), BG, BB)


@triton.jit
def packed_product_kernel(
    x, codes, scales, y, offs, R, E,
    G: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BG: tl.constexpr, BB: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """y [R, G]. x: descriptor of [2R, K/2]; codes: of [E G, K/2], scales [E G, K/32]; G a multiple of BG."""
    ends = tile_ends(offs, E, tl.cdiv(G, BG), BE, BM)
    for tile in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        expert, column, row, end = locate(ends, tile, offs, BM)
        acc = tl.zeros([BG, BM], tl.float32)
        first = expert * G + column * BG
        for b in tl.range(0, K // 2, BB, num_stages=STAGES):
            even, odd = weights_at(codes, scales, first, b, K, BG, BB)
            acc = tl.dot(even, x.load([row, b]).T, acc)
            acc = tl.dot(odd, x.load([R + row, b]).T, acc)
        r, g, _, inside = places(row, end, column, G, BM, BG, True)
        tl.store(y + (row.to(tl.int64) * G + column * BG) + (r * G + g), acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def packed_glu_product_kernel(
    x, codes, scales, w, a, offs, R, E, beta, linear_beta,
    F: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr,
    SITU: tl.constexpr, WEIGHTED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """a [R, F] = w glu(x gate_up^T); x: descriptor of [2R, K/2]; F a multiple of BF."""
    ends = tile_ends(offs, E, tl.cdiv(F, BF), BE, BM)
    for tile in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        expert, column, row, end = locate(ends, tile, offs, BM)
        gate = tl.zeros([BF, BM], tl.float32)
        up = tl.zeros([BF, BM], tl.float32)
        first = expert * 2 * F + column * BF
        for b in tl.range(0, K // 2, BB, num_stages=STAGES):
            x_even = x.load([row, b]).T
            x_odd = x.load([R + row, b]).T
            even, odd = weights_at(codes, scales, first, b, K, BF, BB)
            gate = tl.dot(even, x_even, gate)
            gate = tl.dot(odd, x_odd, gate)
            even, odd = weights_at(codes, scales, first + F, b, K, BF, BB)
            up = tl.dot(even, x_even, up)
            up = tl.dot(odd, x_odd, up)
        r, f, rows_exist, inside = places(row, end, column, F, BM, BF, True)
        # Rounded as where h is stored: the backward pass computes it again and reads it so.
        gate = gate.to(a.dtype.element_ty).to(tl.float32)
        up = up.to(a.dtype.element_ty).to(tl.float32)
        out = glu(gate, up, beta, linear_beta, SITU)
        if WEIGHTED:
            out *= tl.load(w + row + r, mask=rows_exist, other=0.0)
        tl.store(a + (row.to(tl.int64) * F + column * BF) + (r * F + f), out.to(a.dtype.element_ty), mask=inside)
