"""A cached prefix as a value: taken out of one engine, put into another of the same layout and weights.

Legend: T tokens (the segment's depth), M MLA layers, L latent row width, B bytes of a state, P pages, S page_tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol

import torch

from perilune.errors import Error
from perilune.serve.cache import Chain, PrefixCache, live
from perilune.serve.cache.cache import Lease
from perilune.serve.cache.geometry import Geometry
from perilune.serve.cache.placement import Mark
from perilune.serve.pools import Layout


@dataclass(frozen=True)
class Segment:
    """KV rows of [0, T) and the KDA state after T tokens, on the host. layout: digest of `Layout`.

    origin: how the state was made, "prefill", "decode" or "exact". checksum: of everything else (`checksum`).
    """

    layout: str
    version: int
    salt: str
    tokens: tuple[int, ...]
    origin: str
    rows_TML: torch.Tensor
    state_B: torch.Tensor
    checksum: str


class Memory(Protocol):
    """What a segment needs of `Pools`, or of the pools of ranks together."""

    @property
    def layout(self) -> Layout: ...

    @property
    def geometry(self) -> Geometry: ...

    def gather(self, pages: Sequence[int]) -> torch.Tensor: ...

    def gather_state(self, pages: Sequence[int]) -> torch.Tensor: ...

    def scatter(self, pages: Sequence[int], bytes_B: torch.Tensor) -> None: ...

    def scatter_state(self, pages: Sequence[int], bytes_B: torch.Tensor) -> None: ...


def export(pools: Memory, cache: PrefixCache, lease: Lease, tokens: Sequence[int], salt: str, version: int) -> Segment:
    """The whole prefix of a lease. Raises Error for a lease of nothing or one whose copies have not arrived."""
    if lease.node is None or lease.node.state is None or not lease.ready:
        raise Error(f"the lease holds {lease.depth} tokens, ready: {lease.ready}; allowed: a prefix on the device")
    layout = pools.layout
    pages = live.table(cache, lease)
    whole = pools.gather(pages).view(getattr(torch, layout.row_dtype))
    rows_PMSL = whole.view(len(pages), layout.mla_layers, layout.page_tokens, layout.row)
    rows_TML = rows_PMSL.transpose(1, 2).flatten(0, 1)[: lease.depth].contiguous().cpu()
    state_B = pools.gather_state(lease.node.state).cpu()
    names = (layout.digest, version, salt, tuple(tokens[: lease.depth]), lease.node.origin)
    value = Segment(*names, rows_TML, state_B, "")
    return replace(value, checksum=checksum(value))


def put(pools: Memory, cache: PrefixCache, segment: Segment, version: int, now: float, exact: bool) -> int:
    """Write a segment into pages and publish it; how many tokens can be matched now (0: there was no room).

    Raises Error for another layout or weight version, wrong sizes, bytes that do not give the checksum, or a state that
    was not made exactly where `exact` ones are promised.
    """
    if exact and segment.origin != "exact":
        raise Error(f"segment.origin is {segment.origin!r}; an exact engine takes 'exact' ones only")
    layout, depth = pools.layout, len(segment.tokens)
    if segment.layout != layout.digest:
        raise Error(f"segment.layout is {segment.layout}; this engine's is {layout.digest}")
    if segment.version != version:
        raise Error(f"segment.version is {segment.version}; this engine's weights are version {version}")
    shape, size = (depth, layout.mla_layers, layout.row), pools.geometry.state_bytes
    if tuple(segment.rows_TML.shape) != shape or segment.state_B.shape != (size,) or not depth:
        raise Error(
            f"segment holds rows {tuple(segment.rows_TML.shape)} and a state of {tuple(segment.state_B.shape)}; "
            f"must be {shape} and {(size,)}"
        )
    if checksum(segment) != segment.checksum:
        raise Error("segment.checksum does not fit its tokens and bytes; they were changed or cut on the way")
    chain = Chain.of(segment.tokens, pools.geometry.match_unit, segment.salt, version)
    lease = cache.acquire(chain, now, limit=0)
    try:
        stage = live.reserve(cache, lease, chain, depth, now)
        state = live.mark(cache, lease, stage, Mark(depth, "mark", segment.origin), now) if stage else None
        if stage is None or state is None:
            return 0
        pools.scatter(stage.pages, _paged(segment.rows_TML, layout.page_tokens))
        pools.scatter_state(state, segment.state_B)
        live.publish(cache, lease, stage, chain, now)
        return depth
    finally:
        cache.release(lease)


def checksum(segment: Segment) -> str:
    """Over what a segment says and its bytes: rows of other tokens are as wrong as other rows."""
    said = (segment.layout, segment.version, segment.salt, [*segment.tokens], segment.origin)
    digest = blake2b(json.dumps(said).encode(), digest_size=16)
    for part in (segment.rows_TML, segment.state_B):
        digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _paged(rows_TML: torch.Tensor, size: int) -> torch.Tensor:
    """Bytes of whole pages [P * M * S * L * itemsize]; rows that are missing are zeros."""
    missing = -rows_TML.shape[0] % size
    bytes_TMB = rows_TML.contiguous().view(torch.uint8)
    bytes_TMB = torch.nn.functional.pad(bytes_TMB, (0, 0, 0, 0, 0, missing))
    paged: torch.Tensor = bytes_TMB.unflatten(0, (-1, size)).transpose(1, 2).flatten()
    return paged


__all__ = ["Segment", "checksum", "export", "put"]
