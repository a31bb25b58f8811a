"""Packed sequences: how one flat token axis T is cut into N documents.

Legend: T tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from perilune.errors import Error
from perilune.ops.upload import upload


@dataclass(frozen=True)
class Sequences:
    """The cut of a packed token axis into documents, kept on the host.

    lengths: tokens of each sequence in this call (0 is allowed).
    starts: absolute position, in its document, of each sequence's first token of this call. The chunk grid of
        KDA is absolute in the document, so a prefill continued at token 100 has start 100.
    device: where `cu_seqlens` and the other index tensors live.

    Raises Error for negative lengths or starts, or when the two differ in number.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    device: torch.device

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.starts):
            raise Error(f"Sequences: {len(self.lengths)} lengths but {len(self.starts)} starts; one start per sequence")
        for name, values in (("lengths", self.lengths), ("starts", self.starts)):
            for i, value in enumerate(values):
                if value < 0:
                    raise Error(f"Sequences.{name}[{i}] is {value}; must be >= 0")

    @classmethod
    def from_lengths(
        cls,
        lengths: Iterable[int],
        starts: Iterable[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Sequences:
        """`Sequences.from_lengths([3, 5])`: two packed documents of 3 and 5 tokens, both from their beginning."""
        lengths = tuple(int(n) for n in lengths)
        starts = (0,) * len(lengths) if starts is None else tuple(int(s) for s in starts)
        return cls(lengths, starts, torch.device(device))

    def to(self, device: torch.device | str) -> Sequences:
        """The same cut with its index tensors on `device`."""
        device = torch.device(device)
        return self if device == self.device else Sequences(self.lengths, self.starts, device)

    @property
    def count(self) -> int:
        """N."""
        return len(self.lengths)

    @cached_property
    def total(self) -> int:
        """T, the sum of the lengths."""
        return sum(self.lengths)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Host copy of `cu_seqlens`: N+1 ints, offsets[i]:offsets[i+1] are the tokens of sequence i."""
        return tuple(accumulate(self.lengths, initial=0))

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 [N+1] on `device`."""
        return upload(self.offsets, torch.int32, self.device)

    @cached_property
    def ids_T(self) -> torch.Tensor:
        """int64 [T]: the sequence each token belongs to."""
        counts = upload(self.lengths, torch.int64, self.device)
        return torch.repeat_interleave(torch.arange(self.count, device=self.device), counts, output_size=self.total)

    @cached_property
    def positions_T(self) -> torch.Tensor:
        """int64 [T]: each token's absolute position in its document."""
        shifts = [start - offset for start, offset in zip(self.starts, self.offsets, strict=False)]
        shift = upload(shifts, torch.int64, self.device)
        return torch.arange(self.total, device=self.device) + shift[self.ids_T]

    @cached_property
    def last_T(self) -> torch.Tensor:
        """int64 [N]: index of each sequence's last token; meaningless (the token before) for an empty sequence."""
        return self.cu_seqlens[1:].to(torch.int64) - 1

    def check_total(self, name: str, tokens: int) -> None:
        """Raise Error unless a tensor called `name` has as many tokens as this cut."""
        if tokens != self.total:
            raise Error(f"{name} has {tokens} tokens but sequences add up to {self.total}")


__all__ = ["Sequences"]
