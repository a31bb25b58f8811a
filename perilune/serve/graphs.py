"""Steps as CUDA graphs: one capture for each bucket of shapes. Here those of decoding; `graphs_prefill` has the others.

A step's numbers reach the device as one copy; everything else, down to page ids and where rows are appended, is part of
the graph. A bucket's spare rows are padding: slot -1, no cached rows, nowhere to append. Captures run on padding alone,
so they change no state.

Legend: N sequences of the bucket, T tokens, M MLA layers, W table width, S slots, X numbers of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from perilune.model.paged import Decoding, PagedBatch
from perilune.serve.tables import Tables

R = TypeVar("R")
WIDTHS = (64, 256, 1024, 4096)  # pages of the tables; few, since each is another capture


@dataclass
class Captured(Generic[R]):
    """A graph, what it leaves its results in, and the buffers of its numbers."""

    graph: torch.cuda.CUDAGraph
    result: R
    host_2X: torch.Tensor
    device: torch.Tensor
    turn: int = 0
    copied: list[torch.cuda.Event] = field(default_factory=list)

    def run(self, numbers: Sequence[int], tokens: tuple[int, torch.Tensor] | None = None) -> R:
        """The results for int64 numbers. tokens: where among them some go that are on the device already."""
        # Two buffers, since the copy of the step before may not have begun; the one before that has to be over.
        self.turn = 1 - self.turn
        if self.copied:
            self.copied[self.turn].synchronize()
        host = self.host_2X[self.turn]
        host.numpy()[:] = numbers
        self.device.copy_(host, non_blocking=True)
        if self.copied:
            self.copied[self.turn].record()
        if tokens is not None:
            at, values = tokens
            self.device[at : at + len(values)] = values
        self.graph.replay()
        return self.result


class Recorder:
    """Captures work whose inputs are all numbers of one buffer. around: entered for a capture and its warm-ups."""

    def __init__(self, device: torch.device, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._device, self._around = device, around
        self._pools: dict[str, Any] = {}

    def record(self, work: Callable[[torch.Tensor], R], idle: Sequence[int], pool: str) -> Captured[R]:
        """work: numbers on the device -> results. idle: numbers with which it changes nothing that matters.

        pool: graphs of one name share their memory. A replay may overwrite the results of every other graph of its
        pool, also of those that were captured later: they have to be used, or copied, before.
        """
        cuda = self._device.type == "cuda"
        host_2X = torch.tensor([idle, idle], dtype=torch.int64, pin_memory=cuda)
        device = host_2X[0].to(self._device)
        events = [torch.cuda.Event() for _ in range(2 * cuda)]
        with self._around():
            return Captured(*self._capture(lambda: work(device), pool), host_2X, device, copied=events)

    def _capture(self, work: Callable[[], R], pool: str) -> tuple[torch.cuda.CUDAGraph, R]:
        # Kernels are compiled and libraries set up outside the capture.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pools.get(pool)):
            result = work()
        self._pools[pool] = graph.pool()
        return graph, result


@dataclass(frozen=True)
class Numbers:
    """A group of decoding sequences on the host: slots, tails, cached as in `Decoding`; tokens and the arena rows they
    go to, sequence after sequence."""

    slots: Sequence[int]
    tails: Sequence[int]
    cached: Sequence[int]
    tokens: Sequence[int]
    rows: Sequence[int]

    def padded(self, count: int, width: int) -> list[int]:
        """All in one list, for a bucket of `count` sequences of `width` tokens."""
        found = list[int]()
        fields = ((self.slots, -1), (self.tails, 0), (self.cached, 0), (self.tokens, 0), (self.rows, -1))
        for (values, padding), size in zip(fields, _sizes(count, width), strict=True):
            found += [*values, *([padding] * (size - len(values)))]
        return found


Step = tuple[PagedBatch, torch.Tensor]


class DecodeGraphs:
    """compute: a batch -> x_TD, the work that is captured. accept: a batch of drafts and how many of each sequence's
    stay."""

    def __init__(
        self,
        compute: Callable[[PagedBatch], torch.Tensor],
        tables: Tables,
        accept: Callable[[PagedBatch, torch.Tensor], None],
        recorder: Recorder,
    ) -> None:
        self._compute, self._tables, self._accept = compute, tables, accept
        self._recorder = recorder
        self._captured: dict[tuple[int, int, int], Captured[Step]] = {}
        self._accepts: dict[int, Captured[None]] = {}  # by the id of their batch, which a captured step keeps

    def run(
        self, numbers: Numbers, width: int, wide: int, tokens_T: torch.Tensor | None = None
    ) -> tuple[PagedBatch, torch.Tensor]:
        """The graph's batch (for `accept`) and x_TD of the given tokens.

        width: tokens a sequence; wide: pages of the longest sequence. tokens_T: instead of numbers.tokens.
        """
        key = (_bucket(len(numbers.slots)), width, table_width(wide))
        if key not in self._captured:
            self._captured[key] = self._capture(*key)
        given = None if tokens_T is None else (3 * key[0], tokens_T)
        batch, x_TD = self._captured[key].run(numbers.padded(key[0], width), given)
        return batch, x_TD[: len(numbers.tokens)]

    def accept(self, batch: PagedBatch, counts: Sequence[int]) -> None:
        """Settle the drafts of a batch that `run` gave; counts: of each sequence, without padding."""
        (group,) = batch.decoding
        room = group.slots_N.shape[0]
        if id(batch) not in self._accepts:

            def work(counts_N: torch.Tensor) -> None:
                self._accept(batch, counts_N.int())

            # A capture keeps nothing and folds nothing. Its pool is the step's, which no step of another width uses.
            self._accepts[id(batch)] = self._recorder.record(work, [0] * room, f"decode {group.width}")
        self._accepts[id(batch)].run([*counts, *([0] * (room - len(counts)))])

    def _capture(self, count: int, width: int, wide: int) -> Captured[Step]:
        sizes = _sizes(count, width)

        def work(device: torch.Tensor) -> Step:
            slots, tails, cached, tokens_T, rows_T = device.split(sizes)
            slots_N, tail_N, cached_N = (x.to(torch.int32) for x in (slots, tails, cached))
            group = Decoding(0, width, slots_N, tail_N, cached_N, self._tables.of(slots.clamp(min=0), wide))
            batch = PagedBatch(tokens_T, self._tables.locate(rows_T), [group], None)
            return batch, self._compute(batch)

        return self._recorder.record(work, Numbers([], [], [], [], []).padded(count, width), f"decode {width}")


def _sizes(count: int, width: int) -> list[int]:
    return [count, count, count, count * width, count * width]


def _bucket(count: int) -> int:
    """Powers of two up to 32, then multiples of 32."""
    return power(count) if count <= 32 else -(-count // 32) * 32


def table_width(pages: int) -> int:
    """Pages of the table of a graph for so many."""
    return next((width for width in WIDTHS if width >= pages), power(pages))


def power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


__all__ = ["Captured", "DecodeGraphs", "Numbers", "Recorder", "table_width"]
