"""The paged runner: slot pools and one call of the model a step; kernels on a GPU, their references on a CPU.

A slot keeps its matrix, window and tail in pools of fixed size beside the arena. The number of tail entries of each
slot is known on the host. Level: tolerance (docs/serve.md); a sequence's numbers depend on how its tokens were cut.

Legend: T tokens, N sequences of a group, M MLA layers, W table width, S slots, H heads, K dim, C convolution channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from perilune.model import Stats, Transformer
from perilune.model.fused import fuse_inplace
from perilune.model.paged import Decoding, KdaSlots, PagedBatch, Prefilling, accept_inplace, paged_hidden
from perilune.ops.kda import decode
from perilune.ops.kda.decode_fill import tail_state
from perilune.ops.sequences import Sequences
from perilune.serve.cache.cache import Copy
from perilune.serve.config import EngineConfig
from perilune.serve.graphs import NARROW, DecodeGraphs, Numbers
from perilune.serve.pools import Pools
from perilune.serve.work import Chunk


class PagedRunner:
    """A `Device` over slot pools. tails: entries of each slot's tail."""

    on_grid = False

    def __init__(self, model: Transformer, pools: Pools, config: EngineConfig) -> None:
        self.model, self.pools, self.config = model, pools, config
        self.tails = [0] * config.slots
        longest = -(-model.config.max_position_embeddings // pools.layout.page_tokens)
        wide = max(NARROW, min(longest, pools.pages[0]))
        wide = 1 << (wide - 1).bit_length()  # as wide as the widest graph
        self._table_SW = torch.zeros(config.slots, wide, dtype=torch.int32, device=pools.device)
        self._table_length = [0] * config.slots
        self._batch: PagedBatch | None = None
        self._wide: list[list[Chunk]] = []
        self._graphs: DecodeGraphs | None = None
        self.take()

    def take(self) -> None:
        """Allocate the slots; lay projections of one input behind each other."""
        fuse_inplace(self.model)
        layout, device, count = self.pools.layout, self.pools.device, self.config.slots
        matrix, window = (getattr(torch, name) for name in (layout.matrix_dtype, layout.window_dtype))
        heads, dim = layout.heads, layout.dim
        self.slots = [
            KdaSlots(
                torch.zeros(count, heads, dim, dim, dtype=matrix, device=device),
                torch.zeros(count, 3, layout.channels, dtype=window, device=device),
                decode.Tail.empty(count, heads, dim, dim, matrix, device),
            )
            for _ in range(layout.kda_layers)
        ]
        if device.type == "cuda" and self.config.graphs:
            self._graphs = DecodeGraphs(self._compute, self._locate, self._tables, device)

    def release(self) -> None:
        """Give the slots' memory back; no slot is in use."""
        self.slots, self._batch, self._wide, self._graphs = [], None, [], None

    def forward(
        self, chunks: Sequence[Chunk], stats: Stats | None = None, tokens_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Advance every chunk's slot; the normed hidden states x_RD of the last `rows` positions of each, in order.

        tokens_T: int64, the chunks' tokens where they are on the device only; each chunk has one then.
        """
        decoding = [chunk for chunk in chunks if chunk.decodes]
        widths = sorted({len(chunk.tokens) for chunk in decoding})
        groups = [[chunk for chunk in decoding if len(chunk.tokens) == width] for width in widths]
        filling = [chunk for chunk in chunks if not chunk.decodes]
        self._wide = [group for group in groups if len(group[0].tokens) > 1]
        order = [chunk for group in groups for chunk in group] + filling
        for chunk in chunks:
            self._keep_table(chunk.slot, chunk.request.table)
        if self._graphs and not filling and len(groups) == 1 and len(order) <= self.config.graphs and stats is None:
            wide = self._wide_of(order)
            self._batch, x_TD = self._graphs.run(self._numbers(order), widths[0], wide, tokens_T)
        else:
            self._batch = batch = self._build(groups, filling, tokens_T)
            x_TD = self._compute(batch, stats)
            for i, pages in enumerate(pages for chunk in filling for _, pages in chunk.exports):
                matrices, windows = ([layer[part][i] for layer in batch.exported] for part in (0, 1))
                self.pools.write_state(matrices, windows, pages)
        for chunk in decoding:
            if len(chunk.tokens) == 1:
                self.tails[chunk.slot] = (self.tails[chunk.slot] + 1) % decode.GRID
        ends, at = {}, 0
        for chunk in order:
            at += len(chunk.tokens)
            ends[id(chunk)] = at
        if stats is not None:
            self._reorder(stats, chunks, ends)
        rows = [t for chunk in chunks for t in range(ends[id(chunk)] - chunk.rows, ends[id(chunk)])]
        return x_TD if rows == list(range(x_TD.shape[0])) else x_TD[rows]

    def _compute(self, batch: PagedBatch, stats: Stats | None = None) -> torch.Tensor:
        return paged_hidden(self.model, batch, self.slots, self.pools.rows_PSL, stats=stats).x_TD

    def head(self, x_RD: torch.Tensor) -> torch.Tensor:
        """logits_RV."""
        return self.model.parts.linear(x_RD, self.model.lm_head.weight)

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def _numbers(self, group: Sequence[Chunk]) -> Numbers:
        size, rows = self.pools.layout.page_tokens, list[int]()
        for chunk in group:
            table = chunk.request.table
            rows += [table[t // size] * size + t % size for t in range(chunk.start, chunk.start + len(chunk.tokens))]
        slots = [chunk.slot for chunk in group]
        return Numbers(
            slots,
            [self.tails[slot] for slot in slots],
            [chunk.start + len(chunk.tokens) for chunk in group],
            [token for chunk in group for token in chunk.tokens],
            rows,
        )

    def _build(
        self, groups: Sequence[Sequence[Chunk]], filling: Sequence[Chunk], tokens_T: torch.Tensor | None
    ) -> PagedBatch:
        decoding, first = [], 0
        tokens, rows = list[int](), list[torch.Tensor]()
        for group in groups:
            numbers, width = self._numbers(group), len(group[0].tokens)
            slots_N, tail_N, cached_N = (self._int32(x) for x in (numbers.slots, numbers.tails, numbers.cached))
            table_MNW = self._tables(slots_N.long(), self._wide_of(group))
            decoding.append(Decoding(first, width, slots_N, tail_N, cached_N, table_MNW))
            tokens += numbers.tokens
            rows.append(torch.tensor(numbers.rows))
            first += width * len(group)
        prefilling = None
        if filling:
            assert all(self.tails[chunk.slot] == 0 for chunk in filling), "a prompt goes on behind decoded tokens"
            lengths, starts = [len(chunk.tokens) for chunk in filling], [chunk.start for chunk in filling]
            sequences = Sequences.from_lengths(lengths, starts, self.pools.device)
            slots_N = self._int32([chunk.slot for chunk in filling]).long()
            exports = tuple(tuple(depth for depth, _ in chunk.exports) for chunk in filling)
            table_MNW = self._tables(slots_N, self._wide_of(filling))
            prefilling = Prefilling(first, sequences, slots_N, table_MNW, exports)
            tokens += [token for chunk in filling for token in chunk.tokens]
            rows += map(self._rows, filling)
        if tokens_T is None:
            tokens_T = torch.tensor(tokens, device=self.pools.device)
        return PagedBatch(tokens_T, self._locate(torch.cat(rows).to(self.pools.device)), decoding, prefilling)

    def _rows(self, chunk: Chunk) -> torch.Tensor:
        """int64 [T]: the arena row of each token, page * page_tokens + place."""
        size, end = self.pools.layout.page_tokens, chunk.start + len(chunk.tokens)
        first = chunk.start // size
        page_W = torch.tensor(chunk.request.table[first : -(-end // size)])
        position_T = torch.arange(chunk.start, end)
        return page_W[position_T // size - first] * size + position_T % size

    def _wide_of(self, chunks: Sequence[Chunk]) -> int:
        """Pages of the longest sequence."""
        return max(-(-(chunk.start + len(chunk.tokens)) // self.pools.layout.page_tokens) for chunk in chunks)

    def _tables(self, slots_N: torch.Tensor, wide: int) -> torch.Tensor:
        """int32 [M, N, W]: page ids of each MLA layer, anything beyond a sequence's own."""
        return self._layers(self._table_SW[slots_N, :wide])

    def _locate(self, rows_T: torch.Tensor) -> torch.Tensor:
        """int64 [M, T]: rows of the arena -> rows of each MLA layer; -1 stays."""
        size = self.pools.layout.page_tokens
        return torch.where(rows_T < 0, -1, self._layers(rows_T // size) * size + rows_T % size)

    def _keep_table(self, slot: int, pages: Sequence[int]) -> None:
        """Bring a slot's row of the table up to date: pages are only ever added behind the others."""
        known = self._table_length[slot]
        if len(pages) > known:
            self._table_SW[slot, known : len(pages)] = self._int32(pages[known:])
            self._table_length[slot] = len(pages)

    def _layers(self, pages: torch.Tensor) -> torch.Tensor:
        """Page ids of the arena -> [M, ...] of single layers."""
        count = self.pools.layout.mla_layers
        layer = torch.arange(count, dtype=pages.dtype, device=pages.device)
        return (pages * count + layer.view(-1, *[1] * pages.dim())).contiguous()

    def _int32(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.pools.device)

    @staticmethod
    def _reorder(stats: Stats, chunks: Sequence[Chunk], ends: dict[int, int]) -> None:
        """Put the routings into the order of the chunks."""
        rows = [t for chunk in chunks for t in range(ends[id(chunk)] - len(chunk.tokens), ends[id(chunk)])]
        for layer, routing in stats.routing.items():
            stats.routing[layer] = replace(routing, ids_TJ=routing.ids_TJ[rows])

    # --- Device

    def load(self, slot: int, state: Sequence[int], depth: int) -> None:
        self.tails[slot], self._table_length[slot] = 0, 0
        if not state:
            for pool in self.slots:
                pool.matrix_SHKV[slot] = 0
                pool.window_S3C[slot] = 0
            return
        for pool, matrix_HKV, window_3C in zip(self.slots, *self.pools.read_state(state), strict=True):
            pool.matrix_SHKV[slot], pool.window_S3C[slot] = matrix_HKV, window_3C

    def save(self, slot: int, depth: int, state: Sequence[int]) -> None:
        slot_N, tail_N = self._int32([slot]), self._int32([self.tails[slot]])
        gate = self.model.config.kda.gate
        matrices = [tail_state(pool.matrix_SHKV, pool.tail, tail_N, slot_N, gate)[0] for pool in self.slots]
        self.pools.write_state(matrices, [pool.window_S3C[slot] for pool in self.slots], state)

    def accept(self, kept: Sequence[tuple[int, int, int]]) -> None:
        stay = {slot: count for slot, _, count in kept}
        if not self._wide:
            return
        assert self._batch is not None
        counts = []
        for group, chunks in zip((g for g in self._batch.decoding if g.width > 1), self._wide, strict=True):
            # A slot whose request ended with an error is in no list; what it holds does not matter. A graph's group
            # has padding behind its chunks.
            mine = [stay.get(chunk.slot, 0) for chunk in chunks]
            counts.append(self._int32(mine + [0] * (group.slots_N.shape[0] - len(mine))))
        accept_inplace(self._batch, self.slots, self.model, counts)
        for chunk in (chunk for group in self._wide for chunk in group):
            self.tails[chunk.slot] = (self.tails[chunk.slot] + stay.get(chunk.slot, 0)) % decode.GRID
        self._batch, self._wide = None, []

    def free(self, slot: int) -> None:
        self.tails[slot] = 0

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.pools.copy_pages(sources, targets)

    def fetch(self, copies: Sequence[Copy]) -> Callable[[], bool]:
        return self.pools.fetch(copies)

    def settle(self) -> None:
        self.pools.settle()


__all__ = ["PagedRunner"]
