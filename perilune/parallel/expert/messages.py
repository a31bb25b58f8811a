"""Tensors of a token as one message to each rank that computes any of its choices, and what is made of it there.

On CUDA kernels write both (`messages_triton`); what is here in torch specifies them.

Legend: T tokens, J choices a token, n arrived choices, P payloads (token, destination rank), N rows of a rank's buffer,
L width of a row, W words of a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perilune.ops.precision import widen
from perilune.parallel.expert.ids import by_kernels
from perilune.parallel.expert.plan import Plan
from perilune.parallel.expert.routes import Route


@dataclass(frozen=True)
class Room:
    """Where a rank's arrivals go: buffers [N, L] of inputs, [N] of weights or None; all of rank `rank` of `plan`.

    end: how many rows belong to its experts, padding included.
    """

    rows: Sequence[torch.Tensor]
    weights: torch.Tensor | None
    plan: Plan
    rank: int
    end: int


def pack(rows: Sequence[torch.Tensor], weights_TJ: torch.Tensor | None, token_P: torch.Tensor) -> torch.Tensor:
    """[P, W]: inputs [T, L] and weights of each payload's token, as words."""
    parts = [*rows, *([] if weights_TJ is None else [weights_TJ])]
    word = _word(parts)
    words = [_words(part, word) for part in parts]
    if by_kernels(token_P) and word == torch.int32:
        from perilune.parallel.expert.messages_triton import write_messages

        return write_messages(words, token_P)
    return (words[0] if len(words) == 1 else torch.cat(words, 1)).index_select(0, token_P)


def unpack(message_PW: torch.Tensor, route: Route, room: Room, top_k: int) -> None:
    """Write inputs to the buffer row of each arrived choice, and its weight; padding becomes zero, the tail stays."""
    padded = room.end > route.row_n.shape[0]
    if by_kernels(message_PW) and message_PW.dtype == torch.int32:
        from perilune.parallel.expert.messages_triton import clear_padding, write_rows

        written = [t.view(torch.int32) for t in room.rows]
        of_weights = [] if room.weights is None else [room.weights.unsqueeze(1).view(torch.int32)]
        write_rows(message_PW, route.row_n, route.origin_n, written, of_weights, top_k)
        if padded:
            clear_padding([*written, *of_weights], room.plan.ends_RG[room.rank], room.plan.rows_RG[room.rank])
        return
    row_n, begin = route.row_n.long(), 0
    source_N = None
    for buffer_NL in room.rows:
        payload_PL, begin = _part(message_PW, begin, buffer_NL.shape[1], buffer_NL.dtype)
        if source_N is None:
            source_N = row_n.new_zeros(room.end).scatter_(0, row_n, route.origin_n.long() // top_k)
        torch.index_select(payload_PL, 0, source_N, out=buffer_NL[: room.end])
    if room.weights is not None:
        weights_PJ, _ = _part(message_PW, begin, top_k, room.weights.dtype)
        room.weights.index_copy_(0, row_n, weights_PJ.reshape(-1).index_select(0, route.origin_n))
    if padded:
        padding_n = padding(room.plan, room.rank, room.end)
        for buffer in (*room.rows, *(() if room.weights is None else (room.weights,))):
            buffer.index_fill_(0, padding_n, 0)


def sum_choices(x_nL: torch.Tensor, route: Route, top_k: int) -> torch.Tensor:
    """y_TL of what came back: choices added in order j = 0, 1, ... in max(fp32, dtype), cast once."""
    place_TJ = route.place_n.view(route.tokens, top_k)
    if by_kernels(x_nL):
        from perilune.parallel.expert.messages_triton import add_choices

        return add_choices(x_nL, place_TJ)
    y_TL = widen(x_nL[:0]).new_zeros(route.tokens, x_nL.shape[1])
    for place_T in place_TJ.unbind(1) if x_nL.shape[0] else ():
        y_TL += _at(x_nL, place_T, route.complete)
    return y_TL.to(x_nL.dtype)


def by_choice(x_nL: torch.Tensor, route: Route, top_k: int) -> torch.Tensor:
    """[T, J, L]: what came back for each choice; zero where nothing was routed."""
    shape = (route.tokens, top_k, x_nL.shape[1])
    return _at(x_nL, route.place_n, route.complete).view(shape) if x_nL.shape[0] else x_nL.new_zeros(shape)


def _at(x_nL: torch.Tensor, place_n: torch.Tensor, complete: bool) -> torch.Tensor:
    if complete:
        return x_nL.index_select(0, place_n)
    return x_nL.index_select(0, place_n.clamp(min=0)).masked_fill_(place_n.unsqueeze(1) < 0, 0)


def padding(plan: Plan, rank: int, end: int) -> torch.Tensor:
    """Rows of a rank's buffer that belong to a group but to no choice."""
    ends_G, rows_G = plan.ends_RG[rank].long(), plan.rows_RG[rank]
    starts_G = torch.cat([ends_G.new_zeros(1), ends_G[:-1]])
    row_N = torch.arange(end, device=ends_G.device)
    group_N = torch.searchsorted(ends_G, row_N, right=True)
    return row_N[row_N - starts_G[group_N] >= rows_G[group_N]]


def _word(parts: Sequence[torch.Tensor]) -> torch.dtype:
    """Not every backend knows every dtype, and rows are only moved."""
    return torch.uint8 if any(part.shape[1] * part.element_size() % 4 for part in parts) else torch.int32


def _words(part: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """Its rows as words. One row, or none, is contiguous with any stride, and memory may begin between two words."""
    begin = part.storage_offset() * part.element_size()
    if part.stride() != (part.shape[1], 1) or begin % word.itemsize:
        part = part.new_empty(part.shape).copy_(part)
    return part.view(word)


def _part(message_PW: torch.Tensor, begin: int, numbers: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """(`numbers` of each message from word `begin` on, the word after them)."""
    end = begin + numbers * dtype.itemsize // message_PW.element_size()
    return message_PW[:, begin:end].contiguous().view(dtype), end


__all__ = ["Room", "by_choice", "pack", "padding", "sum_choices", "unpack"]
