"""Runs of tensors that one operation works on together, of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

# Numbers of a run: what is made for all of it at once stays small beside a model.
PIECE = 1 << 26


def pieces(tensors: Iterable[Tensor], most: int = PIECE) -> Iterator[list[Tensor]]:
    """In order, neighbours of one dtype together, of at most so many numbers or one tensor."""
    piece: list[Tensor] = []
    full = 0
    for tensor in tensors:
        size = tensor.numel()
        if piece and (full + size > most or piece[0].dtype != tensor.dtype):
            yield piece
            piece, full = [], 0
        piece.append(tensor)
        full += size
    if piece:
        yield piece


__all__ = ["PIECE", "pieces"]
