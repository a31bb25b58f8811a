"""The functions of `messages` as kernels that move 32-bit words, one launch each.

Parts of a message begin at a multiple of 64 bytes, so that rows are read and written 16 bytes at a time.

Legend: T tokens, J choices a token, n arrived choices, P payloads (token, destination rank), N rows of a rank's buffer,
G groups of rows, L width of a row, W words of a message; A, B, C: its parts.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}


def write_messages(parts: Sequence[torch.Tensor], token_P: torch.Tensor) -> torch.Tensor:
    """[P, W] of at most three parts int32 [T, *]."""
    widths = [part.shape[1] for part in parts]
    begins, W = _begins(widths)
    out_PW = parts[0].new_empty(token_P.shape[0], W)
    if out_PW.numel():
        _write_messages[(out_PW.shape[0],)](
            *_three(parts), token_P, out_PW, *_numbers(widths), *_numbers(begins)[1:], W, BL=_block(widths), num_warps=4
        )
    return out_PW


def write_rows(
    message_PW: torch.Tensor,
    row_n: torch.Tensor,
    origin_n: torch.Tensor,
    rows: Sequence[torch.Tensor],
    numbers: Sequence[torch.Tensor],
    top_k: int,
) -> None:
    """Write the parts of a message to the row of each arrived choice, of which it is choice origin_n % J.

    rows: int32 [N, *] for the first parts, at most two; numbers: int32 [N, *] for the last, or none, of which each
    choice has its own.
    """
    own = numbers[0].shape[1] if numbers else 0
    widths = [t.shape[1] for t in rows]
    begins, W = _begins([*widths, *([own * top_k] if numbers else [])])
    assert message_PW.shape[1] == W
    if not row_n.shape[0]:
        return
    # The numbers are the last part, whatever comes before.
    spare = row_n.new_empty(0)
    a, b = (*rows, spare, spare)[:2]
    width_a, width_b = (*widths, 0, 0)[:2]
    begin_b, begin_c = (begins[1] if len(rows) > 1 else 0), (begins[-1] if numbers else 0)
    _write_rows[(row_n.shape[0],)](
        message_PW,
        row_n,
        origin_n,
        a,
        b,
        numbers[0] if numbers else spare,
        width_a,
        width_b,
        own,
        begin_b,
        begin_c,
        W,
        J=top_k,
        BL=_block([*widths, own]),
        BC=triton.next_power_of_2(max(own, 1)),
        num_warps=4,
    )


def clear_padding(buffers: Sequence[torch.Tensor], ends_G: torch.Tensor, rows_G: torch.Tensor) -> None:
    """Zero the rows that belong to a group but to no choice. int32 [N, *]."""
    for buffer in buffers:
        BL = _block([buffer.shape[1]])
        _clear_padding[(ends_G.shape[0],)](buffer, ends_G, rows_G, buffer.shape[1], BL=BL, num_warps=4)


def add_choices(x_nL: torch.Tensor, place_TJ: torch.Tensor) -> torch.Tensor:
    """See `messages.sum_choices`."""
    (T, J), L = place_TJ.shape, x_nL.shape[1]
    y_TL = x_nL.new_empty(T, L)
    if y_TL.numel():
        wide = _WIDE[torch.promote_types(x_nL.dtype, torch.float32)]
        block = min(_block([L]), 1024)
        _add_choices[(T, triton.cdiv(L, block))](x_nL, place_TJ, y_TL, L, J=J, WIDE=wide, BL=block, num_warps=4)
    return y_TL


def _begins(widths: Sequence[int]) -> tuple[list[int], int]:
    """(where each part begins in a message, W)."""
    begins = [0]
    for width in widths:
        begins.append(begins[-1] + -(-width // 16) * 16)
    return begins[:-1], begins[-1]


def _three(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*parts, *[parts[0]] * (3 - len(parts))]


def _numbers(given: Sequence[int]) -> list[int]:
    return [*given, *[0] * (3 - len(given))]


def _block(widths: Sequence[int]) -> int:
    return int(triton.next_power_of_2(max(1, *widths)))


@triton.jit
def _write_messages(
    a_ptr, b_ptr, c_ptr, token_ptr, out_ptr, width_a, width_b, width_c, begin_b, begin_c, W, BL: tl.constexpr
):
    p = tl.program_id(0).to(tl.int64)
    t = tl.load(token_ptr + p).to(tl.int64)
    out_ptr += p * W
    i = tl.arange(0, BL)
    tl.store(out_ptr + i, tl.load(a_ptr + t * width_a + i, mask=i < width_a), mask=i < width_a)
    if width_b > 0:
        tl.store(out_ptr + begin_b + i, tl.load(b_ptr + t * width_b + i, mask=i < width_b), mask=i < width_b)
    if width_c > 0:
        tl.store(out_ptr + begin_c + i, tl.load(c_ptr + t * width_c + i, mask=i < width_c), mask=i < width_c)


@triton.jit
def _write_rows(
    message_ptr,
    row_ptr,
    payload_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    width_a,
    width_b,
    width_c,
    begin_b,
    begin_c,
    W,
    J: tl.constexpr,
    BL: tl.constexpr,
    BC: tl.constexpr,
):
    n = tl.program_id(0)
    payload, row = tl.load(payload_ptr + n), tl.load(row_ptr + n).to(tl.int64)
    message_ptr += (payload // J).to(tl.int64) * W
    i = tl.arange(0, BL)
    if width_a > 0:
        tl.store(a_ptr + row * width_a + i, tl.load(message_ptr + i, mask=i < width_a), mask=i < width_a)
    if width_b > 0:
        tl.store(b_ptr + row * width_b + i, tl.load(message_ptr + begin_b + i, mask=i < width_b), mask=i < width_b)
    if width_c > 0:
        k = tl.arange(0, BC)
        at = message_ptr + begin_c + (payload % J) * width_c + k
        tl.store(c_ptr + row * width_c + k, tl.load(at, mask=k < width_c), mask=k < width_c)


@triton.jit
def _clear_padding(buffer_ptr, ends_ptr, rows_ptr, width, BL: tl.constexpr):
    """Program g: from the last row of a choice in group g to the group's end."""
    g = tl.program_id(0)
    begin = tl.load(ends_ptr + g - 1, mask=g > 0, other=0)
    first = begin.to(tl.int64) + tl.load(rows_ptr + g)
    i = tl.arange(0, BL)
    for k in range(0, (tl.load(ends_ptr + g) - first).to(tl.int32)):
        tl.store(buffer_ptr + (first + k) * width + i, tl.zeros((BL,), tl.int32), mask=i < width)


@triton.jit
def _add_choices(x_ptr, place_ptr, y_ptr, L, J: tl.constexpr, WIDE: tl.constexpr, BL: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BL + tl.arange(0, BL)
    total = tl.zeros((BL,), WIDE)
    for j in range(J):
        place = tl.load(place_ptr + t * J + j).to(tl.int64)
        if place >= 0:
            total += tl.load(x_ptr + place * L + i, mask=i < L, other=0).to(WIDE)
    tl.store(y_ptr + t * L + i, total.to(y_ptr.dtype.element_ty), mask=i < L)


__all__ = ["add_choices", "clear_padding", "write_messages", "write_rows"]
