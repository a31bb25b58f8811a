"""Where the part of a parameter that a rank holds lies in the whole: boxes, for every rank, without communication.

A parameter is first cut by tp (`tensor`) or, if it stacks experts, by ep; what is left is cut along its first dim by
`fully_shard`. Checkpoints and Muon work on boxes and know nothing else of a layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from perilune.config import ModelConfig
from perilune.parallel.expert.model import is_stacked
from perilune.parallel.mesh import Mesh
from perilune.parallel.tensor import Group, find_cut

# Parameters that stay in float32 in a bfloat16 model; they are small, and FSDP leaves them whole.
KEPT = ("conv_CW", "A_log_H", "dt_bias_HK", "o_norm_K")


def left_whole(name: str, mesh: Mesh) -> bool:
    """Whether FSDP leaves a parameter alone: experts that ep has cut, and those of `KEPT`."""
    return (is_stacked(name) and mesh.shards > 1) or name.endswith(KEPT)


@dataclass(frozen=True)
class Box:
    """`size` numbers of a tensor, from `begin` on in the whole and from `at` on in the rank's part."""

    begin: tuple[int, ...]
    size: tuple[int, ...]
    at: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return prod(self.size)

    def of_part(self, part: torch.Tensor) -> torch.Tensor:
        """The view of the part."""
        for dim, (at, size) in enumerate(zip(self.at, self.size, strict=True)):
            part = part.narrow(dim, at, size)
        return part


@dataclass(frozen=True)
class Layout:
    """How one run holds its parameters. cut: the groups of modules that tp cuts; sharded: names that FSDP cuts."""

    config: ModelConfig
    mesh: Mesh
    cut: tuple[Group, ...] = ()
    sharded: frozenset[str] = frozenset()

    def boxes(self, name: str, shape: Sequence[int]) -> list[Box]:
        """What this rank holds of the parameter `name`, whose whole has `shape`."""
        _, _, shard, cp, tp = self.mesh.places
        return self.boxes_of(name, shape, (shard, cp, tp))

    def boxes_of(self, name: str, shape: Sequence[int], places: tuple[int, int, int]) -> list[Box]:
        """The same of the rank of this block at (shard, cp, tp)."""
        shape = tuple(shape)
        none = (0,) * len(shape)
        if is_stacked(name) and self.mesh.shards > 1:
            run = shape[0] // self.mesh.shards
            expert = self._rank(places) % self.mesh.shards
            found = [Box((expert * run, *none[1:]), (run, *shape[1:]), none)]
        else:
            found = self._cut(name, shape, places[2])
        return list(_rows(found, *self._part(places))) if name in self.sharded else found

    def whole_here(self, name: str) -> bool:
        """Whether every rank of a block has all of it."""
        return name not in self.sharded and not self.is_cut(name) and not (is_stacked(name) and self.mesh.shards > 1)

    def is_cut(self, name: str) -> bool:
        """Whether tp cuts it."""
        cut = find_cut(self.config, name) if self.mesh.sizes[4] > 1 else None
        return cut is not None and cut.group in self.cut

    def copies(self, name: str) -> int:
        """How many ranks of a stage hold each number of it."""
        _, replicate, shard, cp, tp = self.mesh.sizes
        if is_stacked(name) and self.mesh.shards > 1:
            return self._in_stage // self.mesh.shards
        return replicate * (1 if name in self.sharded else shard * cp) * (1 if self.is_cut(name) else tp)

    def gives(self, name: str) -> bool:
        """Whether this rank is the first of those in its stage that hold its boxes of `name`."""
        _, copy, shard, cp, tp = self.mesh.places
        if is_stacked(name) and self.mesh.shards > 1:
            return self._rank((shard, cp, tp)) % self._in_stage < self.mesh.shards
        return not copy and (name in self.sharded or not shard + cp) and (self.is_cut(name) or not tp)

    @property
    def _in_stage(self) -> int:
        """Ranks of a stage."""
        return self.mesh.ranks // self.mesh.sizes[0]

    def block(self) -> list[tuple[int, int, int]]:
        """(shard, cp, tp) of the ranks of a block, in the order of its group."""
        _, _, shard, cp, tp = self.mesh.sizes
        return [(s, c, t) for s in range(shard) for c in range(cp) for t in range(tp)]

    def _cut(self, name: str, shape: tuple[int, ...], rank: int) -> list[Box]:
        cut = find_cut(self.config, name) if self.is_cut(name) else None
        if cut is None:
            return [Box((0,) * len(shape), shape, (0,) * len(shape))]
        block = shape[cut.dim] // cut.blocks
        run = block // self.mesh.sizes[4]
        found = []
        for b in range(cut.blocks):
            begin, size, at = [0] * len(shape), list(shape), [0] * len(shape)
            begin[cut.dim], size[cut.dim], at[cut.dim] = b * block + rank * run, run, b * run
            found.append(Box(tuple(begin), tuple(size), tuple(at)))
        return found

    def _part(self, places: tuple[int, int, int]) -> tuple[int, int]:
        return places[0] * self.mesh.sizes[3] + places[1], self.mesh.sizes[2] * self.mesh.sizes[3]

    def _rank(self, places: tuple[int, int, int]) -> int:
        """Of the whole run."""
        rank = 0
        for place, size in zip((*self.mesh.places[:2], *places), self.mesh.sizes, strict=True):
            rank = rank * size + place
        return rank


def _rows(boxes: list[Box], part: int, parts: int) -> Iterator[Box]:
    """What `fully_shard` leaves of the boxes on rank `part`: rows in chunks of equal size, the last ones shorter."""
    total = max(box.at[0] + box.size[0] for box in boxes)
    chunk = -(-total // parts)
    low, high = min(part * chunk, total), min((part + 1) * chunk, total)
    for box in boxes:
        first, last = max(low, box.at[0]), min(high, box.at[0] + box.size[0])
        if first < last:
            begin = (box.begin[0] + first - box.at[0], *box.begin[1:])
            yield Box(begin, (last - first, *box.size[1:]), (first - low, *box.at[1:]))


__all__ = ["KEPT", "Box", "Layout", "left_whole"]
