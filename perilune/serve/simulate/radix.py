"""Peers that keep whole KDA states in a radix tree; they run in the engine's own tree with other policies.

`lru`: a state at the end of every prompt and turn and at forks, all kept, least recently used segment first.

`mamba-radix`: SGLang 0.5.23's unified radix cache with one memory pool (--enable-unified-memory): a state after every
8,192-token prefill chunk, at the prompt's end, at the end of the request and at a fork (mamba_branching_seqlen, on
its second sighting); a hit renews only the state it consumed; a leaf leaves with its state, an inner state leaves
alone. Left out: the fixed split into two pools, the default there, which is worse; int8 states; the host tier's own
rules; the tracking of decode every 256 tokens, of which only the last state is donated.

`marconi` (arXiv 2411.19379): a state after the last decoded token and at branch points found by inserting the prompt
before its prefill; among nodes with at most one child the lowest normalised recency + alpha x normalised saved
computation a byte leaves. alpha is the best of a grid over a first window of requests, here by serving that window
with every alpha. Computation is counted in tokens, bytes are those that leave. Where a trace does not say what an
answer hashes to, the state lies at the prompt's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from perilune.serve.cache import Eviction, Geometry, Node, Placement
from perilune.serve.cache.eviction import Victims, tokens_saved
from perilune.serve.simulate.ours import Perilune
from perilune.serve.simulate.replay import Served
from perilune.serve.simulate.traces import Request

CHUNK = 8192
ALPHAS = (0.0, 0.25, 0.5, 1.0, 2.0)
WINDOW = 2000  # requests


def lru(geometry: Geometry, device_bytes: int, host_bytes: int = 0) -> Perilune:
    return Perilune(geometry, device_bytes, host_bytes, Placement(low_fork=False, min_turn=1, keep=0), "lru", "lru")


def mamba_radix(geometry: Geometry, device_bytes: int, host_bytes: int = 0) -> Perilune:
    return Perilune(
        geometry,
        device_bytes,
        host_bytes,
        Placement(low_fork=False, min_turn=1, keep=0, every=CHUNK),
        "lru",
        "mamba-radix",
    )


class MarconiOrder(Eviction):
    """Recency and saved tokens a page, each normalised over the candidates."""

    def __init__(self, alpha: float) -> None:
        super().__init__("gain")
        self._alpha = alpha
        self._oldest, self._most = 0.0, 1.0

    def order(
        self, nodes: Iterable[Node], now: float, pages: Callable[[Node], int], valid: Callable[[Node], bool]
    ) -> Victims:
        few = [node for node in nodes if node.degree <= 1]
        self._oldest = min((node.used for node in few), default=now)
        self._most = max((tokens_saved(node) / max(1, pages(node)) for node in few), default=0.0) or 1.0
        return super().order(few, now, pages, lambda node: valid(node) and node.degree <= 1)

    def scores(self, node: Node, now: float, pages: Callable[[Node], int]) -> tuple[float, float]:
        recency = (node.used - self._oldest) / max(1e-9, now - self._oldest)
        score = recency + self._alpha * tokens_saved(node) / max(1, pages(node)) / self._most
        return score, score


class Marconi:
    """One cache for every alpha until the window has passed, then the best of them."""

    name = "marconi"

    def __init__(self, geometry: Geometry, device_bytes: int, window: int = WINDOW) -> None:
        place = Placement(low_fork=False, min_turn=1, keep=0, prompt_end=False)
        self._caches = [Perilune(geometry, device_bytes, 0, place, MarconiOrder(alpha)) for alpha in ALPHAS]
        self._hits = [0] * len(ALPHAS)
        self._left = window
        self._window = window

    @property
    def cached_bytes(self) -> int:
        return self._caches[0].cached_bytes

    def serve(self, request: Request) -> Served:
        served = [cache.serve(request) for cache in self._caches]
        if len(served) > 1:
            self._hits = [hits + one.device for hits, one in zip(self._hits, served, strict=True)]
            self._left -= 1
            if not self._left:
                best = max(range(len(ALPHAS)), key=lambda i: self._hits[i])
                self._caches = [self._caches[best]]
        # Until alpha is known, recency alone decides: the first of the grid.
        return served[0]


__all__ = ["ALPHAS", "CHUNK", "Marconi", "MarconiOrder", "lru", "mamba_radix"]
