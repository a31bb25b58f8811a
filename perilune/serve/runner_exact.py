"""The exact runner (CPU): every token by the chunk arithmetic of prefill, so that nothing but its document counts.

The model runs unchanged on `SequenceState`s: KDA states of `model.state` in exact mode, MLA rows in the arena's pages.
Level bitwise-batch: batch mix, chunking, caching, preemption and speculation leave every logit's bits as they are. A
state can be saved on the 64-token grid only, since off it the bits of what follows would depend on the cut.

Legend: T tokens, R rows that need logits, D model width, H heads, K key and value dim, C convolution channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from perilune.model import EXACT, KdaState, SequenceState, Stats, Transformer
from perilune.model.paged_rows import PagedRows
from perilune.model.state import GRID, ROLLBACK, LayerState
from perilune.ops import kda as kda_ops
from perilune.ops.sequences import Sequences
from perilune.serve.cache.cache import Copy
from perilune.serve.pools import Pools
from perilune.serve.work import Chunk


class ExactRunner:
    """A `Device` whose slots hold immutable states. windows: the convolution windows at the last two grid points."""

    on_grid = True

    def __init__(self, model: Transformer, pools: Pools) -> None:
        self.model, self.pools = model.with_parts(EXACT), pools
        self.bound = model.config.kda.gate.lower_bound
        self.slots: dict[int, list[KdaState]] = {}
        self.windows: dict[int, dict[int, list[torch.Tensor]]] = {}

    def forward(
        self, chunks: Sequence[Chunk], stats: Stats | None = None, tokens_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Advance every chunk's slot; the normed hidden states x_RD of the last `rows` positions of each, in order."""
        assert tokens_T is None, "on a CPU nothing is gained by beginning a step early"
        states = [self._state(chunk) for chunk in chunks]
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens], device=self.pools.device)
        cut = Sequences.from_lengths([len(chunk.tokens) for chunk in chunks], [chunk.start for chunk in chunks])
        x_TD = self.model.hidden(tokens, cut, states, stats=stats).x_TD
        for chunk, state in zip(chunks, states, strict=True):
            self.slots[chunk.slot] = [layer for layer in state.layers if isinstance(layer, KdaState)]
            self._keep_window(chunk)
        ends = cut.offsets[1:]
        return x_TD[[t for chunk, end in zip(chunks, ends, strict=True) for t in range(end - chunk.rows, end)]]

    def _state(self, chunk: Chunk) -> SequenceState:
        pages = torch.tensor(chunk.request.table, device=self.pools.device)
        kda = iter(self.slots[chunk.slot])
        mla, count = 0, self.pools.layout.mla_layers
        layers: list[LayerState] = []
        for layer in range(self.model.config.num_layers):
            if self.model.config.is_mla(layer):
                layers.append(PagedRows(self.pools.rows_PSL, pages * count + mla, chunk.start))
                mla += 1
            else:
                layers.append(next(kda))
        return SequenceState(layers, exact=True)

    def _keep_window(self, chunk: Chunk) -> None:
        """Remember the convolution windows at a grid point that the chunk has reached or passed."""
        layers, slot = self.slots[chunk.slot], chunk.slot
        point = layers[0].length // GRID * GRID
        if chunk.start < point:
            # A prefill chunk ends at the point; verified tokens pass it by fewer than a state can forget.
            past = layers[0].length - point
            assert past < ROLLBACK
            rows = [s.conv_WC[s.conv_WC.shape[0] - past - 3 : s.conv_WC.shape[0] - past] for s in layers]
            self.windows[slot] = {p: w for p, w in self.windows[slot].items() if p == point - GRID} | {point: rows}

    def head(self, x_RD: torch.Tensor) -> torch.Tensor:
        """logits_RV."""
        return self.model.parts.linear(x_RD, self.model.lm_head.weight)

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def put_weight(self, name: str, value: torch.Tensor) -> None:
        *path, leaf = name.split(".")
        getattr(self.model.get_submodule(".".join(path)), leaf).copy_(value)

    def take(self, weights: bool = False) -> None:
        """Slots take memory as they are used."""
        if weights:
            self.model.to_empty(device=self.pools.device)
        self.pools.take()

    def release(self, weights: bool = False) -> None:
        """No slot is in use."""
        self.pools.release()
        if weights:
            self.model.to_empty(device="meta")

    # --- Device

    def load(self, slot: int, state: Sequence[int], depth: int) -> None:
        config, dtype = self.model.config, self.model.lm_head.weight.dtype
        empty = SequenceState.empty(config, True, self.pools.device, dtype)
        layers = [layer for layer in empty.layers if isinstance(layer, KdaState)]
        self.windows[slot] = {}
        if state:
            matrices, windows = self.pools.read_state(state)
            layers = [_at(*x, depth) for x in zip(layers, matrices, windows, strict=True)]
            self.windows[slot] = {depth: list(windows)}
        self.slots[slot] = layers

    def save(self, slot: int, depth: int, state: Sequence[int]) -> None:
        matrices = [self._matrix(layer, depth) for layer in self.slots[slot]]
        self.pools.write_state(matrices, self.windows[slot][depth], state)

    def _matrix(self, layer: KdaState, depth: int) -> torch.Tensor:
        """The matrix at a grid point between the layer's boundary and its last token."""
        n = depth - layer.boundary
        assert depth % GRID == 0 <= n <= layer.length - layer.boundary
        if n == 0:
            assert layer.matrix_HKV is not None
            return layer.matrix_HKV
        k, v, g, beta = (x[:n] for x in (layer.k_RHK, layer.v_RHV, layer.g_RHK, layer.beta_RH))
        before = None if layer.matrix_HKV is None else layer.matrix_HKV[None]
        cut = Sequences.from_lengths([n], [layer.boundary])
        return kda_ops.chunk(torch.zeros_like(k), k, v, g, beta, before, cut, self.bound)[1][0]

    def accept(self, kept: Sequence[tuple[int, int, int]]) -> None:
        for slot, fed, stay in kept:
            if stay < fed:
                self.slots[slot] = [layer.rollback(fed - stay) for layer in self.slots[slot]]

    def free(self, slot: int) -> None:
        self.slots.pop(slot, None)
        self.windows.pop(slot, None)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.pools.copy_pages(sources, targets)

    def fetch(self, copies: Sequence[Copy]) -> Callable[[], bool]:
        return self.pools.fetch(copies)

    def settle(self) -> None:
        self.pools.settle()

    def move(self, copy: Copy) -> None:
        self.pools.move(copy)


def _at(empty: KdaState, matrix_HKV: torch.Tensor, window_3C: torch.Tensor, depth: int) -> KdaState:
    """A state with no tail after `depth` tokens."""
    return replace(empty, boundary=depth, matrix_HKV=matrix_HKV, conv_WC=window_3C)


__all__ = ["ExactRunner"]
