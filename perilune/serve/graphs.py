"""Decode steps as CUDA graphs: one capture for each bucket of sequences, tokens a sequence, and table width.

A step's numbers reach the device as one copy; everything else, down to page ids and where rows are appended, is part of
the graph. A bucket's spare rows are padding: slot -1, no cached rows, nowhere to append. Captures run on padding alone,
so they change no state.

Legend: N sequences of the bucket, T tokens, M MLA layers, W table width, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from perilune.model.paged import Decoding, PagedBatch

Step = tuple[PagedBatch, torch.Tensor]
NARROW = 16  # pages of the narrowest table


@dataclass(frozen=True)
class Numbers:
    """A group of decoding sequences on the host: slots, tails, cached as in `Decoding`; tokens and the arena rows they
    go to, sequence after sequence."""

    slots: Sequence[int]
    tails: Sequence[int]
    cached: Sequence[int]
    tokens: Sequence[int]
    rows: Sequence[int]

    def fields(self) -> tuple[tuple[Sequence[int], int], ...]:
        """The numbers with what pads each."""
        return (self.slots, -1), (self.tails, 0), (self.cached, 0), (self.tokens, 0), (self.rows, -1)


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: PagedBatch
    x_TD: torch.Tensor
    host_2X: torch.Tensor
    device: torch.Tensor
    turn: int = 0


class DecodeGraphs:
    """compute: a batch -> x_TD, the work that is captured. locate: arena rows [T] -> append_MT; tables: slots, W ->
    table_MNW; both from tensors that never move."""

    def __init__(
        self,
        compute: Callable[[PagedBatch], torch.Tensor],
        locate: Callable[[torch.Tensor], torch.Tensor],
        tables: Callable[[torch.Tensor, int], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._compute, self._locate, self._tables, self._device = compute, locate, tables, device
        self._captured: dict[tuple[int, int, int], _Captured] = {}
        self._pool: Any = None

    def run(
        self, numbers: Numbers, width: int, wide: int, tokens_T: torch.Tensor | None = None
    ) -> tuple[PagedBatch, torch.Tensor]:
        """The graph's batch (with what `accept_inplace` needs) and x_TD of the given tokens.

        width: tokens a sequence; wide: pages of the longest sequence. tokens_T: instead of numbers.tokens.
        """
        key = (_bucket(len(numbers.slots)), width, max(NARROW, _power(wide)))
        if key not in self._captured:
            self._captured[key] = self._capture(*key)
        found = self._captured[key]
        # Two buffers: the copy of the step before may not have begun.
        found.turn = 1 - found.turn
        host = found.host_2X[found.turn]
        array, at = host.numpy(), 0
        for (values, padding), size in zip(numbers.fields(), _sizes(key[0], width), strict=True):
            array[at : at + len(values)] = values
            array[at + len(values) : at + size] = padding
            at += size
        found.device.copy_(host, non_blocking=True)
        if tokens_T is not None:
            found.device[3 * key[0] :][: tokens_T.shape[0]] = tokens_T
        found.graph.replay()
        return found.batch, found.x_TD[: len(numbers.tokens)]

    def _capture(self, count: int, width: int, wide: int) -> _Captured:
        sizes = _sizes(count, width)
        host_2X = torch.zeros(2, sum(sizes), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        host_2X[:, :count] = host_2X[:, -sizes[-1] :] = -1
        device = host_2X[0].to(self._device)

        def work() -> Step:
            slots, tails, cached, tokens_T, rows_T = device.split(sizes)
            slots_N, tail_N, cached_N = (x.to(torch.int32) for x in (slots, tails, cached))
            group = Decoding(0, width, slots_N, tail_N, cached_N, self._tables(slots.clamp(min=0), wide))
            batch = PagedBatch(tokens_T, self._locate(rows_T), [group], None)
            return batch, self._compute(batch)

        return _Captured(*self._record(work), host_2X, device)

    def _record(self, work: Callable[[], Step]) -> tuple[torch.cuda.CUDAGraph, PagedBatch, torch.Tensor]:
        # Kernels are compiled and libraries set up outside the capture.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            batch, x_TD = work()
        self._pool = graph.pool()
        return graph, batch, x_TD


def _sizes(count: int, width: int) -> list[int]:
    return [count, count, count, count * width, count * width]


def _bucket(count: int) -> int:
    """Powers of two up to 32, then multiples of 32."""
    return _power(count) if count <= 32 else -(-count // 32) * 32


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


__all__ = ["NARROW", "DecodeGraphs", "Numbers"]
