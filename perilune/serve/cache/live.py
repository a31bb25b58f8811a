"""The cache as a running request uses it: its pages grow while it runs, and a part can be published before its end.

A request's stage holds the pages it writes from its hit to its last token, one holder each. `publish` gives the tree a
holder of its own for the rows before a mark, so the request goes on writing behind them and others can hit at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perilune.serve.cache import insert
from perilune.serve.cache.cache import PrefixCache
from perilune.serve.cache.chain import Chain
from perilune.serve.cache.lease import Lease, Stage
from perilune.serve.cache.placement import Mark
from perilune.serve.cache.room import allocate
from perilune.serve.cache.tiers import remove, tidy
from perilune.serve.cache.tree import DEVICE, Node, path


def reserve(cache: PrefixCache, lease: Lease, chain: Chain, end: int, now: float, turn: int = 0) -> Stage | None:
    """Pages for the rows behind the hit up to token `end`; None if there is no room. `copies` says what to copy."""
    cache._leases.check(lease)
    start = lease.depth - lease.depth % cache.geometry.match_unit
    pages = allocate(cache, DEVICE, cache.geometry.kv_pages(start, end), now)
    if pages is None:
        return None
    stage = Stage(chain, start, [], pages, [], turn)
    lease.stages.append(stage)
    return stage


def grow(cache: PrefixCache, lease: Lease, stage: Stage, end: int, now: float) -> bool:
    """Pages for the rows up to token `end`; False, and nothing changed, if there is no room."""
    cache._leases.check(lease)
    missing = cache.geometry.kv_pages(stage.start, end) - len(stage.pages)
    if missing <= 0:
        return True
    pages = allocate(cache, DEVICE, missing, now)
    if pages is None:
        return False
    stage.pages += pages
    return True


def mark(cache: PrefixCache, lease: Lease, stage: Stage, mark: Mark, now: float) -> list[int] | None:
    """Pages for the state of one more mark, to be written before `publish`; None if there is no room."""
    cache._leases.check(lease)
    state = allocate(cache, DEVICE, cache.geometry.state_pages, now)
    if state is not None:
        stage.marks.append(mark)
        stage.states.append(state)
    return state


def publish(cache: PrefixCache, lease: Lease, stage: Stage, chain: Chain, now: float) -> None:
    """The states of the stage's marks and the rows before them are written: they can be matched from now on.

    chain: the request's tokens so far, at least up to the deepest mark. The stage goes on with the same pages.
    """
    cache._leases.check(lease)
    stage.chain = chain
    insert.publish(cache, lease, stage, set(stage.pages), cache.placement.keep, now)
    stage.marks, stage.states = [], []


def table(cache: PrefixCache, lease: Lease, stage: Stage | None = None) -> list[int]:
    """The page of every page_tokens tokens: those of the hit, then those of the stage from its start on."""
    size = cache.geometry.page_tokens
    pages = _pages(path(lease.node), size)
    if stage is None:
        return pages
    return pages[: stage.start // size] + stage.pages


def copies(cache: PrefixCache, lease: Lease, stage: Stage) -> tuple[list[int], list[int]]:
    """Shared pages and the request's own pages that get their content: rows of the hit in pages it will extend."""
    shared = table(cache, lease)[stage.start // cache.geometry.page_tokens :]
    return shared, stage.pages[: len(shared)]


def held_pages(cache: PrefixCache, more: Iterable[Node | None] = ()) -> int:
    """Device pages that no eviction can free: of stages, of leased paths and states, and of paths to `more`.

    Pages that a stage shares with a leased path count twice: an upper bound.
    """
    nodes: set[Node] = set()
    states: set[Node] = set()
    pages = 0
    for lease in cache._leases.values():
        states.update(lease.nodes)
        pages += sum(len(kv) + len(state) for _, kv, state in lease.moving)
        for stage in lease.stages:
            pages += len(stage.pages) + sum(map(len, stage.states))
    states.update(node for node in more if node is not None)
    for node in states:
        step: Node | None = node
        while step is not None and step.parent is not None and step not in nodes:
            nodes.add(step)
            step = step.parent
    pages += sum(len(node.pages) for node in nodes if node.tier == DEVICE)
    return pages + sum(len(node.state or ()) for node in states if node.tier == DEVICE)


def clear(cache: PrefixCache) -> None:
    """Forget everything that nobody leases, on both tiers."""
    for node in [*cache.tree.nodes()][::-1]:
        if node.parent is None or node.pins:
            continue
        if node.degree == 0:
            remove(cache, node)
        elif node.state is not None:
            cache.arenas[node.tier].free(node.state)
            node.state = None
    for node in [*cache.tree.nodes()]:
        if node.parent is not None:
            tidy(cache, node)
    cache.orders = [None, None]


def _pages(nodes: Sequence[Node], size: int) -> list[int]:
    pages: list[int] = []
    for node in nodes:
        # Below a cut inside a page lies the page with the rows of both sides.
        pages[node.start // size :] = node.pages
    return pages


__all__ = ["clear", "copies", "grow", "held_pages", "mark", "path", "publish", "reserve", "table"]
