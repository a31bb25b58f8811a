"""Short pieces of prompts as CUDA graphs: one capture for each bucket of rows and table width.

After a hit few tokens are left to compute, and launching their kernels one by one takes longer than running them.

Legend: T rows of the bucket, G groups of sixteen rows, M MLA layers, W table width, B bytes of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from perilune.model.paged import Decoding, PagedBatch, Prefilling
from perilune.model.paged_static import ROWS, Piece, Static, size
from perilune.serve.graphs import Captured, Recorder, table_width
from perilune.serve.tables import Tables

BUCKETS = (64, 128, 256, 512, 1024)
# Rows times cached tokens up to which the absorbed form costs less than the launches that the graph saves.
WORK = 1 << 26

# What is captured gives hidden states, and the bytes of the exported state.
Result = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Place:
    """Where a piece's rows go: the slot, and the arena row of each token."""

    slot: int
    tokens: Sequence[int]
    rows: Sequence[int]


def bucket(tokens: int, cached: int) -> int | None:
    """Rows of the graph for so many tokens after so many cached ones; None where there is none."""
    rows = next((rows for rows in BUCKETS if rows >= tokens), None)
    return None if rows is None or rows * cached > WORK else rows


class PrefillGraphs:
    """compute: a batch -> x_TD, the work that is captured; pack: the batch's export -> bytes. idle: a slot that no
    request has."""

    def __init__(
        self,
        compute: Callable[[PagedBatch], torch.Tensor],
        pack: Callable[[PagedBatch], torch.Tensor],
        tables: Tables,
        idle: int,
        recorder: Recorder,
    ) -> None:
        self._compute, self._pack, self._tables = compute, pack, tables
        self._idle, self._recorder = idle, recorder
        self._captured: dict[tuple[int, int], Captured[Result]] = {}

    def run(self, piece: Piece, place: Place, wide: int) -> Result:
        """x_TD of the piece's tokens, and the bytes of its export, until the next run. wide: pages of the table."""
        key = (piece.rows, table_width(wide))
        if key not in self._captured:
            self._captured[key] = self._capture(*key)
        padding = piece.padding
        numbers = [place.slot, *([0] * padding), *place.tokens, *([-1] * padding), *place.rows]
        x_TD, bytes_B = self._captured[key].run([*numbers, *piece.lengths(), *piece.numbers()])
        return x_TD[padding:], bytes_B

    def _capture(self, rows: int, wide: int) -> Captured[Result]:
        sizes = [1, rows, rows, rows // ROWS, size(rows)]

        def work(device: torch.Tensor) -> Result:
            slot_1, tokens_T, rows_T, lengths_G, numbers = device.split(sizes)
            static = Static.of(rows, numbers)
            table_MGW = self._tables.of(slot_1.expand(rows // ROWS), wide)
            filling = Prefilling(0, static.documents, slot_1, table_MGW, static=static)
            none = slot_1.int().expand(rows // ROWS)
            absorbed = [Decoding(0, ROWS, none, none, lengths_G.int(), table_MGW)]
            batch = PagedBatch(tokens_T, self._tables.locate(rows_T), [], filling, absorbed=absorbed)
            x_TD = self._compute(batch)
            return x_TD, self._pack(batch)

        idle = [self._idle, *([0] * rows), *([-1] * rows), *([0] * (rows // ROWS)), *Piece(rows, 1, 0).numbers()]
        return self._recorder.record(work, idle, "prefill")


__all__ = ["BUCKETS", "Place", "PrefillGraphs", "bucket"]
