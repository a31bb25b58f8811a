"""The picture of a running engine that the page draws: plain dicts, bounded, of one caller's prefixes only.

Times are seconds of the engine's clock, sizes bytes, depths tokens. Reading walks the tree once, about a microsecond a
node, between two steps of the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from heapq import nlargest
from itertools import count
from typing import TYPE_CHECKING, Any

from perilune.serve.cache.cache import PrefixCache
from perilune.serve.cache.tree import DEVICE, HOST, Node

if TYPE_CHECKING:
    from perilune.serve.request import Request
    from perilune.serve.scheduler import Scheduler

MAX_NODES = 512  # of a picture, the most recently used first
MAX_REQUESTS = 64
MAX_STARTS = 64  # newest starts of requests that are remembered
MAX_OWNERS = 8192  # prefixes, salts and requests that are remembered

Owns = Callable[[str], bool]


def everybody(salt: str) -> bool:
    """`owns` of a server without keys: every prefix may be seen."""
    return True


@dataclass(frozen=True)
class Start:
    """A request began: `cached` of its `prompt` tokens came with node `node` (None: nothing did)."""

    seq: int
    at: float
    node: int | None
    cached: int
    prompt: int
    salt: str


class Watch:
    """Sees every request of a scheduler start, and draws its cache. Call from the engine's thread only."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._numbers = count(1)
        self._starts: deque[Start] = deque(maxlen=MAX_STARTS)
        self._owners: dict[Hashable, str] = {}  # first key of a path -> salt
        self._sums: dict[str, list[int]] = {}  # salt -> requests, prompt tokens, cached tokens
        self._counted: dict[int, None] = {}  # requests in the sums
        scheduler.began = self._began

    def picture(self, owns: Owns = everybody) -> dict[str, Any]:
        """What a caller may see that owns these salts: memory as a whole, prefixes and requests of its own."""
        cache, now = self._scheduler.cache, self._clock()
        nodes, mine = [], []
        for top in cache.tree.root.below():
            path = [top]
            for node in path:  # grows while it is walked
                path.extend(node.below())
            nodes += path
            mine += path if owns(self._owner(top)) else []
        shown = _recent(mine)
        geometry = cache.geometry
        sums = [sums for salt, sums in self._sums.items() if owns(salt)]
        totals = [sum(mine[i] for mine in sums) for i in range(3)]
        return {
            "now": now,
            "page_tokens": geometry.page_tokens,
            "shortest_hit": cache.min_hittable_tokens(),
            "tiers": [_tier(cache, nodes, tier) for tier in (DEVICE, HOST)],
            "sums": dict(zip(("requests", "prompt", "cached"), totals, strict=True)),
            "nodes": [_node(node) for node in shown],
            "more_nodes": len(mine) - len(shown),
            "requests": [_request(r) for r in self._scheduler.requests() if owns(r.salt)][:MAX_REQUESTS],
            "starts": [
                {"seq": s.seq, "at": s.at, "node": s.node, "cached": s.cached, "prompt": s.prompt}
                for s in self._starts
                if owns(s.salt)
            ],
        }

    def _began(self, request: Request) -> None:
        lease, chain, salt = request.lease, request.chain, request.salt
        assert lease is not None
        assert chain is not None
        node = lease.node.number if lease.node is not None else None
        self._starts.append(Start(next(self._numbers), self._clock(), node, lease.depth, request.length, salt))
        if chain.keys:
            _newest(self._owners, chain.keys[0], salt)
        if request.id not in self._counted:  # one that was parked begins again, and is no further request
            _newest(self._counted, request.id, None)
            sums = _newest(self._sums, salt, [0, 0, 0])
            for i, more in enumerate((1, request.prompt, request.cached)):
                sums[i] += more

    def _owner(self, top: Node) -> str:
        """The salt of the requests that made the paths from `top` on; UNKNOWN where that is not known any more."""
        return self._owners.get(top.keys[0], UNKNOWN) if top.keys else UNKNOWN


UNKNOWN = "\0unknown"  # no salt: `owns` of a tenant is False for it


def _newest(table: dict[Any, Any], key: Hashable, value: Any) -> Any:
    """The entry of `key`, made if it is missing and moved to the end; the oldest leaves a full table."""
    value = table.pop(key, value)
    table[key] = value
    if len(table) > MAX_OWNERS:
        del table[next(iter(table))]
    return value


def _recent(nodes: Iterable[Node]) -> list[Node]:
    """At most MAX_NODES nodes, those used last, each with all that is above it; parents first."""
    chosen: dict[Node, None] = {}
    # Each adds at least itself, so that no further candidate can be of the first MAX_NODES.
    for node in nlargest(MAX_NODES, nodes, key=lambda node: node.used):
        path: list[Node] = []
        step: Node | None = node
        while step is not None and step.parent is not None and step not in chosen:
            path.append(step)
            step = step.parent
        if len(chosen) + len(path) > MAX_NODES:
            break
        chosen.update(dict.fromkeys(reversed(path)))
    return [*chosen]


def _node(node: Node) -> dict[str, Any]:
    parent = node.parent
    assert parent is not None
    return {
        "id": node.number,
        "parent": parent.number if parent.parent is not None else None,
        "start": node.start,
        "end": node.end,
        "tier": "host" if node.tier == HOST else "device",
        "checkpoint": (node.kind or "state") if node.state is not None else None,
        "pins": node.pins,
        "used": node.used,
    }


def _request(request: Request) -> dict[str, Any]:
    lease = request.lease
    return {
        "id": request.id,
        "state": request.state.value,
        "prompt": request.prompt,
        "tokens": request.length,
        "computed": request.computed,
        "cached": request.cached,
        "longest": request.longest,
        "node": lease.node.number if lease is not None and lease.node is not None else None,
    }


def _tier(cache: PrefixCache, nodes: Iterable[Node], tier: int) -> dict[str, Any]:
    """Bytes of a tier by class. running: pages that only requests on their way hold."""
    arena, page = cache.arenas[tier], cache.geometry.page_bytes
    states = sum(len(node.state or ()) for node in nodes if node.tier == tier)
    running = 0
    if tier == DEVICE:
        for lease in cache._leases.values():
            running += sum(len(kv) + len(state) for _, kv, state in lease.moving)
            for stage in lease.stages:
                running += sum(map(len, stage.states)) + sum(arena.holders(p) == 1 for p in stage.pages)
    used = arena.capacity - arena.free_pages
    return {
        "name": "host" if tier == HOST else "device",
        "capacity": arena.capacity * page,
        "kv": (used - states - running) * page,
        "checkpoints": states * page,
        "running": running * page,
        "free": arena.free_pages * page,
    }


__all__ = ["Watch", "everybody"]
