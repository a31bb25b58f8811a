"""The paged runner: slot pools and one call of the model a step; kernels on a GPU, their references on a CPU.

A slot keeps its matrix, window and tail in pools of fixed size beside the arena. The number of tail entries of each
slot is known on the host. Level: tolerance (docs/serve.md); a sequence's numbers depend on how its tokens were cut.

Legend: I KDA layers, T tokens, N sequences of a group, M MLA layers, W table width, S slots, H heads, K dim,
C convolution channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from perilune.model import Stats, Transformer
from perilune.model.fused import fuse_inplace
from perilune.model.paged import Decoding, KdaSlots, PagedBatch, Prefilling, accept_inplace, paged_hidden
from perilune.model.paged_static import Piece
from perilune.ops.kda import decode
from perilune.ops.kda.decode_fill import tail_state
from perilune.ops.sequences import Sequences
from perilune.ops.upload import upload
from perilune.serve.cache.cache import Copy
from perilune.serve.config import EngineConfig
from perilune.serve.few import Beside, few_tokens
from perilune.serve.graphs import DecodeGraphs, Numbers, Recorder, table_width
from perilune.serve.graphs_prefill import Place, PrefillGraphs, bucket
from perilune.serve.pools import Pools
from perilune.serve.tables import Tables
from perilune.serve.work import Chunk

MOST_GRAPHS = 5  # that a step runs one after the other, each reading the weights again


class PagedRunner:
    """A `Device` over slot pools. tails: entries of each slot's tail."""

    on_grid = False

    def __init__(self, model: Transformer, pools: Pools, config: EngineConfig) -> None:
        self._beside = Beside()
        self.model = model.with_parts(few_tokens(model.parts, self._beside))
        self.pools, self.config = pools, config
        self.tails = [0] * config.slots
        longest = -(-model.config.max_position_embeddings // pools.layout.page_tokens)
        wide = table_width(min(longest, pools.pages[0]))  # as wide as the widest graph
        # The last slot is nobody's: graphs of prefill are captured on it.
        self._tables = Tables(pools.layout, config.slots + 1, wide, pools.device)
        self._batch: PagedBatch | None = None
        self._wide: list[list[Chunk]] = []
        self._graphs: DecodeGraphs | None = None
        self._prefills: PrefillGraphs | None = None
        self._replayed: list[PagedBatch] = []  # batches of drafts that graphs computed; else they are in `_batch`
        self._allocate()

    def take(self, weights: bool = False) -> None:
        """Allocate the arenas and the slots; lay projections of one input behind each other."""
        if weights:
            self.model.to_empty(device=self.pools.device)
        self.pools.take()
        self._allocate()

    def _allocate(self) -> None:
        fuse_inplace(self.model)
        layout, device, count = self.pools.layout, self.pools.device, self.config.slots
        matrix, window = (getattr(torch, name) for name in (layout.matrix_dtype, layout.window_dtype))
        heads, dim, layers = layout.heads, layout.dim, layout.kda_layers
        self._matrix_ISHKV = torch.zeros(layers, count + 1, heads, dim, dim, dtype=matrix, device=device)
        self._window_IS3C = torch.zeros(layers, count + 1, 3, layout.channels, dtype=window, device=device)
        self.slots = [
            KdaSlots(*pools, decode.Tail.empty(count + 1, heads, dim, dim, matrix, device))
            for pools in zip(self._matrix_ISHKV, self._window_IS3C, strict=True)
        ]
        if device.type == "cuda" and self.config.graphs:
            self.use_graphs(Recorder(device, self._beside.recording))

    def use_graphs(self, recorder: Recorder) -> None:
        """Run short steps as graphs of fixed shapes."""
        self._graphs = DecodeGraphs(self._compute, self._tables, self._settle, recorder)
        self._prefills = PrefillGraphs(self._compute, self._pack, self._tables, self.config.slots, recorder)

    def release(self, weights: bool = False) -> None:
        """Give the memory back, perhaps the weights' too; no slot is in use."""
        self.pools.release()
        if weights:
            self.model.to_empty(device="meta")
        self._matrix_ISHKV, self._window_IS3C = self._matrix_ISHKV[:, :0].clone(), self._window_IS3C[:, :0].clone()
        self.slots, self._batch, self._wide = [], None, []
        self.forget_graphs()

    def forget_graphs(self) -> None:
        """Give the graphs up. NCCL ends no communicator that one of them still holds."""
        self._graphs, self._prefills = None, None

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
        for chunk in chunks:
            self._tables.keep(chunk.slot, chunk.request.table)
        pieces = self._pieces(groups, filling) if stats is None else None
        if pieces is not None:
            x_TD = self._replay(groups, filling, pieces, tokens_T)
        else:
            self._batch, self._replayed = self._build(groups, filling, tokens_T), []
            x_TD = self._compute(self._batch, stats)
            for i, pages in enumerate(pages for chunk in filling for _, pages in chunk.exports):
                self.pools.scatter(pages, self._pack(self._batch, i))
        for chunk in decoding:
            if len(chunk.tokens) == 1:
                self.tails[chunk.slot] = (self.tails[chunk.slot] + 1) % decode.GRID
        ends, at = {}, 0
        for chunk in [*(chunk for group in groups for chunk in group), *filling]:
            at += len(chunk.tokens)
            ends[id(chunk)] = at
        if stats is not None:
            self._reorder(stats, chunks, ends)
        rows = [t for chunk in chunks for t in range(ends[id(chunk)] - chunk.rows, ends[id(chunk)])]
        if rows and rows == list(range(rows[0], rows[0] + len(rows))):
            return x_TD[rows[0] : rows[-1] + 1]
        return x_TD[upload(rows, torch.int64, x_TD.device)]

    def _pieces(self, groups: Sequence[Sequence[Chunk]], filling: Sequence[Chunk]) -> list[Piece] | None:
        """The prefill chunks for graphs, where all of a step can run as graphs; else None."""
        if self._graphs is None or len(groups) + len(filling) > MOST_GRAPHS:
            return None
        if any(len(group) > self.config.graphs for group in groups):
            return None
        found = []
        for chunk in filling:
            rows = bucket(len(chunk.tokens), chunk.start + len(chunk.tokens))
            if rows is None or len(chunk.exports) > 1 or self.tails[chunk.slot]:
                return None
            export = chunk.exports[0][0] if chunk.exports else None
            found.append(Piece(rows, len(chunk.tokens), chunk.start, export))
        return found

    def _replay(
        self,
        groups: Sequence[Sequence[Chunk]],
        filling: Sequence[Chunk],
        pieces: Sequence[Piece],
        tokens_T: torch.Tensor | None,
    ) -> torch.Tensor:
        """A step as graphs, one after the other; x_TD in the order of groups and prefill chunks."""
        assert self._graphs is not None
        assert self._prefills is not None
        found, self._replayed = [], []
        for group in groups:
            width = len(group[0].tokens)
            batch, x_TD = self._graphs.run(self._numbers(group), width, self._wide_of(group), tokens_T)
            self._replayed += [batch] * (width > 1)
            found.append(x_TD)
        for chunk, piece in zip(filling, pieces, strict=True):
            place = Place(chunk.slot, chunk.tokens, self._rows(chunk).tolist())
            x_TD, state_B = self._prefills.run(piece, place, self._wide_of([chunk]))
            # The next piece overwrites it.
            found.append(x_TD.clone() if len(pieces) > 1 else x_TD)
            for _, pages in chunk.exports:
                self.pools.scatter(pages, state_B)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _settle(self, batch: PagedBatch, accepted_N: torch.Tensor) -> None:
        accept_inplace(batch, self.slots, self.model, [accepted_N])

    def _pack(self, batch: PagedBatch, i: int = 0) -> torch.Tensor:
        """The bytes of an export."""
        return self.pools.layout.pack_state(
            [matrices[i] for matrices, _ in batch.exported], [w[i] for _, w in batch.exported]
        )

    def _compute(self, batch: PagedBatch, stats: Stats | None = None) -> torch.Tensor:
        return paged_hidden(self.model, batch, self.slots, self.pools.rows_PSL, stats=stats).x_TD

    def head(self, x_RD: torch.Tensor) -> torch.Tensor:
        """logits_RV."""
        return self.model.parts.linear(x_RD, self.model.lm_head.weight)

    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def put_weight(self, name: str, value: torch.Tensor) -> None:
        *path, leaf = name.split(".")
        getattr(self.model.get_submodule(".".join(path)), leaf).copy_(value)

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
            table_MNW = self._tables.of(slots_N.long(), self._wide_of(group))
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
            table_MNW = self._tables.of(slots_N, self._wide_of(filling))
            prefilling = Prefilling(first, sequences, slots_N, table_MNW, exports)
            tokens += [token for chunk in filling for token in chunk.tokens]
            rows += map(self._rows, filling)
        if tokens_T is None:
            tokens_T = upload(tokens, torch.int64, self.pools.device)
        return PagedBatch(tokens_T, self._tables.locate(torch.cat(rows).to(self.pools.device)), decoding, prefilling)

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

    def _int32(self, values: object) -> torch.Tensor:
        return upload(values, torch.int32, self.pools.device)

    @staticmethod
    def _reorder(stats: Stats, chunks: Sequence[Chunk], ends: dict[int, int]) -> None:
        """Put the routings into the order of the chunks."""
        rows = [t for chunk in chunks for t in range(ends[id(chunk)] - len(chunk.tokens), ends[id(chunk)])]
        for layer, routing in stats.routing.items():
            stats.routing[layer] = replace(routing, ids_TJ=routing.ids_TJ[rows])

    # --- Device

    def load(self, slot: int, state: Sequence[int], depth: int) -> None:
        self.tails[slot] = 0
        self._tables.forget(slot)
        if not state:
            self._matrix_ISHKV[:, slot] = 0
            self._window_IS3C[:, slot] = 0
            return
        self._matrix_ISHKV[:, slot], self._window_IS3C[:, slot] = self.pools.read_state(state)

    def save(self, slot: int, depth: int, state: Sequence[int]) -> None:
        matrices: torch.Tensor | list[torch.Tensor] = self._matrix_ISHKV[:, slot]
        if self.tails[slot]:
            slot_N, tail_N = self._int32([slot]), self._int32([self.tails[slot]])
            gate = self.model.config.kda.gate
            matrices = [tail_state(pool.matrix_SHKV, pool.tail, tail_N, slot_N, gate)[0] for pool in self.slots]
        self.pools.write_state(matrices, self._window_IS3C[:, slot], state)

    def accept(self, kept: Sequence[tuple[int, int, int]]) -> None:
        stay = {slot: count for slot, _, count in kept}
        if not self._wide:
            return
        # A slot whose request ended with an error is in no list; what it holds does not matter.
        counts = [[stay.get(chunk.slot, 0) for chunk in chunks] for chunks in self._wide]
        if self._replayed:
            assert self._graphs is not None
            for batch, mine in zip(self._replayed, counts, strict=True):
                self._graphs.accept(batch, mine)
        else:
            assert self._batch is not None
            accept_inplace(self._batch, self.slots, self.model, [self._int32(mine) for mine in counts])
        for chunk in (chunk for group in self._wide for chunk in group):
            self.tails[chunk.slot] = (self.tails[chunk.slot] + stay.get(chunk.slot, 0)) % decode.GRID
        self._batch, self._replayed, self._wide = None, [], []

    def free(self, slot: int) -> None:
        self.tails[slot] = 0

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.pools.copy_pages(sources, targets)

    def move(self, copy: Copy) -> None:
        self.pools.move(copy)

    def fetch(self, copies: Sequence[Copy]) -> Callable[[], bool]:
        return self.pools.fetch(copies)

    def settle(self) -> None:
        self.pools.settle()


__all__ = ["PagedRunner"]
