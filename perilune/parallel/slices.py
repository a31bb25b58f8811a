"""How a packed stream of documents is cut over the ranks of a context-parallel group, and what a rank has of it.

The stream is cut into spans. With "contiguous" rank r has span r; with "zigzag" there are two spans a rank and rank r
has spans r and 2 R - 1 - r, so that every rank has tokens with short and with long pasts. A document that a cut goes
through leaves one fragment in each span that it touches; a span has at most one fragment that continues a document
(its first) and at most one whose document goes on (its last), which may be the same.

Legend: T tokens, N fragments of a rank, R ranks, P spans of all ranks, W taps of the convolution.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import torch
import torch.distributed as dist

from perilune.errors import Error
from perilune.ops.conv import WIDTH
from perilune.ops.sequences import Sequences
from perilune.ops.upload import upload
from perilune.parallel.collectives import rank_in, ranks_of

Order = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class Fragment:
    """Tokens begin .. end of the stream, all of one document; span: the one they lie in.

    continues: the document has earlier tokens in another span. goes_on: it has later ones.
    """

    document: int
    span: int
    begin: int
    end: int
    continues: bool
    goes_on: bool

    @property
    def length(self) -> int:
        """Tokens."""
        return self.end - self.begin


@dataclass(frozen=True)
class Spans:
    """The cut of a whole stream, the same on all ranks. cuts: P + 1 offsets, the first 0, the last T."""

    whole: Sequences
    ranks: int
    cuts: tuple[int, ...]
    order: Order

    def __post_init__(self) -> None:
        count = self.ranks * (2 if self.order == "zigzag" else 1)
        ends = (self.cuts[0], self.cuts[-1]) if self.cuts else ()
        if len(self.cuts) != count + 1 or ends != (0, self.whole.total) or list(self.cuts) != sorted(self.cuts):
            raise Error(f"cuts is {self.cuts}; must be {count + 1} ascending offsets from 0 to {self.whole.total}")

    @property
    def count(self) -> int:
        """P."""
        return len(self.cuts) - 1

    def owner(self, span: int) -> int:
        """The rank that has a span."""
        return min(span, 2 * self.ranks - 1 - span) if self.order == "zigzag" else span

    def of(self, rank: int) -> tuple[int, ...]:
        """The spans of a rank, ascending."""
        return (rank, 2 * self.ranks - 1 - rank) if self.order == "zigzag" else (rank,)

    @cached_property
    def fragments(self) -> tuple[tuple[Fragment, ...], ...]:
        """Of each span, in the order of the stream; empty ones where a document or a span inside a document is."""
        found: list[list[Fragment]] = [[] for _ in range(self.count)]
        span = 0
        for document, (first, last) in enumerate(pairwise(self.whole.offsets)):
            while span + 1 < self.count and self.cuts[span + 1] <= first:
                span += 1
            begin, at = first, span
            while begin < last or first == last:
                end = min(last, self.cuts[at + 1])
                found[at].append(Fragment(document, at, begin, end, begin > first, end < last))
                begin, at = end, at + 1
                if first == last:
                    break
        return tuple(tuple(fragments) for fragments in found)

    @cached_property
    def links(self) -> tuple[Literal["none", "start", "middle"], ...]:
        """What each span hands to the next: nothing, a state that began in it, or one that passed through it."""
        ends = [fragments[-1] if fragments else None for fragments in self.fragments]
        return tuple(
            "none" if end is None or not end.goes_on else "middle" if end.continues else "start" for end in ends
        )

    @cached_property
    def most_rows(self) -> int:
        """The largest number of tokens that a rank has."""
        return max(sum(self.cuts[s + 1] - self.cuts[s] for s in self.of(rank)) for rank in range(self.ranks))

    @cached_property
    def place_T(self) -> torch.Tensor:
        """int64 [T] on the host: where a token of the stream is among the rows of all ranks, `most_rows` each."""
        place_T = torch.empty(self.whole.total, dtype=torch.int64)
        for rank in range(self.ranks):
            row = rank * self.most_rows
            for span in self.of(rank):
                begin, end = self.cuts[span], self.cuts[span + 1]
                place_T[begin:end] = torch.arange(row, row + end - begin)
                row += end - begin
        return place_T


@dataclass(frozen=True)
class Slice(Sequences):
    """What one process has of `spans`: the fragments of the ranks in `held`, as sequences with their starts.

    held: one rank, or all of them (their spans then lie here in the order of the stream; nothing is communicated).
    """

    spans: Spans
    held: tuple[int, ...]

    @cached_property
    def mine(self) -> tuple[int, ...]:
        """The spans of this process, ascending."""
        return tuple(sorted(span for rank in self.held for span in self.spans.of(rank)))

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """In the order of the sequences."""
        return tuple(fragment for span in self.mine for fragment in self.spans.fragments[span])

    @cached_property
    def entering(self) -> tuple[int, ...]:
        """Which of the fragments continue a document, at most one a span."""
        return tuple(i for i, fragment in enumerate(self.fragments) if fragment.continues)

    @cached_property
    def leaving(self) -> tuple[int, ...]:
        """Which of the fragments belong to documents that go on, at most one a span."""
        return tuple(i for i, fragment in enumerate(self.fragments) if fragment.goes_on)

    def spans_of(self, fragments: Sequence[int]) -> tuple[int, ...]:
        """Where the spans of some fragments are in `mine`."""
        return tuple(self.mine.index(self.fragments[i].span) for i in fragments)

    @cached_property
    def rows_T(self) -> torch.Tensor:
        """int64 [local T] on the host: which tokens of the stream are here."""
        parts = [torch.arange(self.spans.cuts[span], self.spans.cuts[span + 1]) for span in self.mine]
        return torch.cat(parts)

    @cached_property
    def halo_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For the convolution, with h inputs before each token. int64 [L * h]: the last rows of each span here, to be
        sent, -1 where it is shorter; int64 [N * h]: for each fragment the rows before its first token among those sent
        by all ranks, -1 before its document."""
        halo, spans, tails, windows = WIDTH - 1, self.spans, [], []
        first = 0
        for span in self.mine:
            length = spans.cuts[span + 1] - spans.cuts[span]
            tails += [first + length - back if back <= length else -1 for back in range(halo, 0, -1)]
            first += length
        slot = {span: at for at, span in enumerate(s for spans_there in self._groups for s in spans_there)}
        for fragment in self.fragments:
            for row in range(fragment.begin - halo, fragment.begin):
                at = bisect_right(spans.cuts, row) - 1
                inside = fragment.continues and row >= spans.whole.offsets[fragment.document]
                windows.append(slot[at] * halo + halo - (spans.cuts[at + 1] - row) if inside else -1)
        tails_R, windows_R = (upload(x, torch.int64, self.device) for x in (tails, windows))
        return tails_R, windows_R

    @property
    def _groups(self) -> list[tuple[int, ...]]:
        """The spans of each process, in the order in which their rows are gathered."""
        if len(self.held) == self.spans.ranks:
            return [self.mine]
        return [self.spans.of(rank) for rank in range(self.spans.ranks)]

    @cached_property
    def keys(self) -> tuple[torch.Tensor, Sequences]:
        """int64 [S]: for each fragment the rows of its document up to its end, among the rows of all ranks."""
        offsets = self.spans.whole.offsets
        ranges = [(offsets[f.document], f.end) for f in self.fragments]
        rows_S = torch.cat([torch.arange(a, b) for a, b in ranges]) if ranges else torch.arange(0)
        if len(self.held) == 1:
            rows_S = self.spans.place_T[rows_S]
        return rows_S.to(self.device), Sequences.from_lengths([b - a for a, b in ranges], device=self.device)

    def to(self, device: torch.device | str) -> Slice:
        """The same slice with its index tensors on `device`."""
        device = torch.device(device)
        return self if device == self.device else Slice(self.lengths, self.starts, device, self.spans, self.held)


@lru_cache(maxsize=256)
def indices(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64 on `device`, kept for the next layer: the host waits for a GPU's work before it copies numbers there."""
    return torch.tensor(values, dtype=torch.int64, device=device)


def even_cuts(total: int, count: int, unit: int = 1) -> tuple[int, ...]:
    """count + 1 offsets whose spans differ by at most one `unit` of tokens (and the last unit may be short)."""
    units = -(-total // unit)
    sizes = [units // count + (i < units % count) for i in range(count)]
    return tuple(min(at * unit, total) for at in accumulate(sizes, initial=0))


def cut_stream(
    whole: Sequences,
    ranks: int,
    order: Order = "contiguous",
    cuts: Sequence[int] | None = None,
) -> Spans:
    """Cut a stream over `ranks`; evenly, unless `cuts` says where. Raises Error for cuts that do not fit."""
    if ranks < 1 or order not in ("contiguous", "zigzag"):
        raise Error(f"cut_stream: ranks is {ranks}, order {order!r}; ranks >= 1 and 'contiguous' or 'zigzag'")
    count = ranks * (2 if order == "zigzag" else 1)
    plain = Sequences(whole.lengths, whole.starts, whole.device)
    return Spans(plain, ranks, even_cuts(whole.total, count) if cuts is None else tuple(cuts), order)


def take_slice(spans: Spans, held: Iterable[int], device: torch.device | str = "cpu") -> Slice:
    """What the process that stands for the ranks `held` (one of them, or all) has of the stream."""
    held = tuple(sorted(held))
    if len(held) != 1 and held != tuple(range(spans.ranks)):
        raise Error(f"held is {held}; a process stands for one rank or for all {spans.ranks}")
    mine = sorted(span for rank in held for span in spans.of(rank))
    fragments = [fragment for span in mine for fragment in spans.fragments[span]]
    starts = [spans.whole.starts[f.document] + f.begin - spans.whole.offsets[f.document] for f in fragments]
    return Slice(tuple(f.length for f in fragments), tuple(starts), torch.device(device), spans, held)


def as_slice(sequences: Sequences, group: dist.ProcessGroup | None) -> Slice:
    """`sequences`, which must be the slice of one rank of the group, or hold all spans where there is no group."""
    if not isinstance(sequences, Slice):
        raise Error(f"context: sequences is {type(sequences).__name__}; must be a Slice (perilune.parallel.slices)")
    held = sequences.held
    fits = held == (rank_in(group),) and sequences.spans.ranks == ranks_of(group) if group is not None else True
    if not fits or (group is None and len(held) != sequences.spans.ranks):
        raise Error(f"context: a slice of ranks {held} of {sequences.spans.ranks}; the group has {ranks_of(group)}")
    return sequences


__all__ = ["Fragment", "Order", "Slice", "Spans", "as_slice", "cut_stream", "even_cuts", "indices", "take_slice"]
