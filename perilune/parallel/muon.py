"""Matrices that lie on several ranks, brought together for Muon and sent back: one all-to-all each way.

A unit is one matrix that Muon makes orthogonal: a whole parameter, or the rows of one head. A rank that holds whole
units works on them itself. The others are dealt out by cost; each owner gets the pieces of its units from whoever
holds them, turns them in batches of one shape, and sends each holder its pieces of the result.

Legend: M rows, N columns of a unit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from perilune.errors import Error
from perilune.parallel.layout import Box, Layout


@dataclass(frozen=True)
class Piece:
    """Rows and columns of one unit on one rank. rows, columns: in the unit; at: where they begin in the rank's part."""

    unit: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    at: tuple[int, int]

    @property
    def numel(self) -> int:
        """Numbers."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])

    def of_unit(self, unit_MN: torch.Tensor) -> torch.Tensor:
        """The view of the unit."""
        return unit_MN[slice(*self.rows), slice(*self.columns)]

    def of_part(self, part: torch.Tensor) -> torch.Tensor:
        """The view of the rank's part of the parameter."""
        row, column = self.at
        return part[row : row + self.rows[1] - self.rows[0], column : column + self.columns[1] - self.columns[0]]


@dataclass(frozen=True)
class Matrix:
    """One parameter that is spread. shape (M, N) of its units; owners of the units; pieces of every rank of the block.

    senders: of each rank, the pieces that no rank before it holds as well.
    """

    shape: tuple[int, int]
    owners: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    senders: tuple[tuple[Piece, ...], ...]


class Spread:
    """The parameters of one run that lie on several ranks, by name. All ranks of a block make the same calls."""

    def __init__(
        self,
        layout: Layout,
        shapes: Mapping[str, Sequence[int]],
        heads: Mapping[str, int],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.group, self.ranks = group, len(layout.block())
        self.rank = 0 if group is None else dist.get_rank(group)
        self.matrices: dict[str, Matrix] = {}
        load = [0] * self.ranks
        for name, count in heads.items():
            shape = tuple(shapes[name])
            boxes = [layout.boxes_of(name, shape, places) for places in layout.block()]
            if len(shape) == 3 or all(_holds_units(found, shape, count) for found in boxes):
                if len(shape) == 3 and any(box.size[1:] != shape[1:] for found in boxes for box in found):
                    raise Error(f"Muon: {name} is cut inside its matrices; only 2-D parameters may be")
                continue
            self.matrices[name] = _matrix(boxes, shape, count, load)

    def takes(self, name: str) -> bool:
        """Whether the parameter is spread; the others are turned where they are."""
        return name in self.matrices

    def turn(
        self, updates: Mapping[str, torch.Tensor], turn: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """This rank's parts of updates -> its parts of the turned ones, in the dtype of the updates.

        turn: [B, M, N] -> the same, each matrix made orthogonal.
        """
        if not updates:
            return {}
        like = next(iter(updates.values()))
        send: list[list[torch.Tensor]] = [[] for _ in range(self.ranks)]
        sizes = [0] * self.ranks
        for name, part in updates.items():
            matrix = self.matrices[name]
            for piece in matrix.senders[self.rank]:
                send[matrix.owners[piece.unit]].append(piece.of_part(part).reshape(-1))
            for source in range(self.ranks):
                sizes[source] += sum(p.numel for p in matrix.senders[source] if matrix.owners[p.unit] == self.rank)
        units = self._assemble(updates, self._exchange(send, sizes, like), like)
        turned = _turn_all(units, turn)

        back: list[list[torch.Tensor]] = [[] for _ in range(self.ranks)]
        sizes = [0] * self.ranks
        for name in updates:
            matrix = self.matrices[name]
            for holder in range(self.ranks):
                for piece in matrix.pieces[holder]:
                    if matrix.owners[piece.unit] == self.rank:
                        back[holder].append(piece.of_unit(turned[name, piece.unit]).reshape(-1).to(like.dtype))
            for piece in matrix.pieces[self.rank]:
                sizes[matrix.owners[piece.unit]] += piece.numel
        got = self._exchange(back, sizes, like)
        at = [0] * self.ranks
        result, views, values = {}, [], []
        for name, part in updates.items():
            matrix, out = self.matrices[name], torch.empty_like(part)
            for piece in matrix.pieces[self.rank]:
                owner = matrix.owners[piece.unit]
                views.append(piece.of_part(out))
                values.append(got[owner][at[owner] : at[owner] + piece.numel].view_as(views[-1]))
                at[owner] += piece.numel
            result[name] = out
        _copy(views, values)
        return result

    def _assemble(
        self, updates: Mapping[str, torch.Tensor], got: list[torch.Tensor], like: torch.Tensor
    ) -> dict[tuple[str, int], torch.Tensor]:
        """The units that this rank owns, whole."""
        units: dict[tuple[str, int], torch.Tensor] = {}
        views, values = [], []
        for source in range(self.ranks):
            at = 0
            for name in updates:
                matrix = self.matrices[name]
                for piece in matrix.senders[source]:
                    if matrix.owners[piece.unit] != self.rank:
                        continue
                    unit = units.setdefault((name, piece.unit), like.new_empty(matrix.shape))
                    views.append(piece.of_unit(unit))
                    values.append(got[source][at : at + piece.numel].view_as(views[-1]))
                    at += piece.numel
        _copy(views, values)
        return units

    def _exchange(self, send: list[list[torch.Tensor]], sizes: list[int], like: torch.Tensor) -> list[torch.Tensor]:
        flat = [torch.cat(parts) if parts else like.new_empty(0) for parts in send]
        if self.group is None:
            return flat
        out = like.new_empty(sum(sizes))
        dist.all_to_all_single(out, torch.cat(flat), sizes, [len(part) for part in flat], group=self.group)
        return list(out.split(sizes))


def _copy(views: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """One operation for many small pieces: what one of them costs is the launch."""
    if views:
        torch._foreach_copy_(views, values)


def _turn_all(
    units: Mapping[tuple[str, int], torch.Tensor], turn: Callable[[torch.Tensor], torch.Tensor]
) -> dict[tuple[str, int], torch.Tensor]:
    """All units of one shape as one batch."""
    buckets: dict[torch.Size, list[tuple[str, int]]] = defaultdict(list)
    for key, unit in units.items():
        buckets[unit.shape].append(key)
    turned: dict[tuple[str, int], torch.Tensor] = {}
    for keys in buckets.values():
        # A batch may come back transposed; its pieces are sent from rows that lie together.
        parts = turn(torch.stack([units[key] for key in keys])).contiguous()
        turned |= dict(zip(keys, parts, strict=True))
    return turned


def _holds_units(boxes: Sequence[Box], shape: Sequence[int], count: int) -> bool:
    """Whether the boxes are runs of whole units."""
    rows = shape[0] // count
    return all(
        box.size[1:] == tuple(shape[1:]) and box.begin[0] % rows == 0 and box.size[0] % rows == 0 for box in boxes
    )


def _matrix(boxes: Sequence[Sequence[Box]], shape: Sequence[int], count: int, load: list[int]) -> Matrix:
    rows, columns = shape[0] // count, shape[1]
    owners = []
    for _ in range(count):
        owner = load.index(min(load))
        load[owner] += rows * columns * min(rows, columns)
        owners.append(owner)
    pieces = tuple(tuple(_pieces(found, rows, count)) for found in boxes)
    seen: set[tuple[int, tuple[int, int], tuple[int, int]]] = set()
    senders = []
    for held in pieces:
        first = [p for p in held if (p.unit, p.rows, p.columns) not in seen]
        seen |= {(p.unit, p.rows, p.columns) for p in first}
        senders.append(tuple(first))
    return Matrix((rows, columns), tuple(owners), pieces, tuple(senders))


def _pieces(boxes: Sequence[Box], rows: int, count: int) -> list[Piece]:
    found = []
    for box in boxes:
        (row, column), (height, width), (at_row, at_column) = box.begin, box.size, box.at
        for unit in range(row // rows, min(-(-(row + height) // rows), count)):
            first, last = max(row, unit * rows), min(row + height, (unit + 1) * rows)
            inside, across = (first - unit * rows, last - unit * rows), (column, column + width)
            found.append(Piece(unit, inside, across, (at_row + first - row, at_column)))
    return found


__all__ = ["Spread"]
