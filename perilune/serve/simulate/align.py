"""Peer `vllm-align`: the prefix cache of vLLM 0.33 for hybrid models (mamba cache mode "align", retention interval 0).

Modelled, from its source (v1/core: kv_cache_coordinator, single_type_kv_cache_manager, block_pool, scheduler):
- one pool of equal blocks; a state takes one block in each KDA group, here as many blocks as hold its bytes;
- KV matches by whole blocks of `block` tokens from the left; behind them only the partly filled last block of an
  earlier prompt, registered under the prompt's last whole hash unit, matches;
- states stay at the end of a prompt (last hash unit below its last token) and at junctions: where a request finds KV
  but no state, the whole blocks of what it found get a state, so that the third request hits;
- the states of decoding are not kept;
- blocks are evicted alone, least recently used first; a request returns its states before its KV, KV last block first.
Left out: blocks of running requests, the one-step delay of blocks just written, speculative drafts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from perilune.errors import Error
from perilune.serve.cache import Geometry
from perilune.serve.simulate.replay import Served
from perilune.serve.simulate.traces import Request

Name = tuple[str, int]


class Prefixes:
    """Numbers prefixes: equal chains of keys get equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def path(self, keys: Sequence[Hashable]) -> list[int]:
        """The number of every prefix of `keys`, shortest first."""
        numbers, known, node = [], self._numbers, 0
        for key in keys:
            node = known.setdefault((node, key), len(known) + 1)
            numbers.append(node)
        return numbers


class VllmAlign:
    """Blocks of `block` tokens in one pool of `device_bytes`. Raises Error if a block is not whole hash units."""

    def __init__(self, geometry: Geometry, device_bytes: int, block: int = 6144) -> None:
        if block < 1 or block % geometry.match_unit:
            raise Error(f"block is {block}; must be a multiple of the match unit, {geometry.match_unit} tokens")
        self.name = f"vllm-align-{block}"
        self._unit, self._block = geometry.match_unit, block
        self._block_bytes = block * geometry.token_bytes
        self._state = -(-geometry.state_bytes // self._block_bytes)
        self._capacity = device_bytes // self._block_bytes
        self._pool: OrderedDict[Name, int] = OrderedDict()  # least recently used first; value: blocks
        self._used = 0
        self._prefixes = Prefixes()

    @property
    def cached_bytes(self) -> int:
        return self._used * self._block_bytes

    def serve(self, request: Request) -> Served:
        path = self._prefixes.path(request.keys)
        per = self._block // self._unit
        last = (request.prompt - 1) // self._unit  # units that may hit, and where the prompt leaves its state
        whole, kv, hit = self._match(path, last, per)
        states = {min(last, len(path))}
        if kv > hit and whole * per > hit:
            states.add(whole * per)
        self._return(path, hit, states, per)
        return Served(hit * self._unit, stateless=(kv - hit) * self._unit)

    def _match(self, path: list[int], last: int, per: int) -> tuple[int, int, int]:
        """Whole blocks found, and in units: the KV found, and the deepest state within it."""
        pool, whole = self._pool, 0
        while (whole + 1) * per <= min(last, len(path)) and ("kv", path[(whole + 1) * per - 1]) in pool:
            whole += 1
        kv = whole * per
        for end in range(min(last, len(path), kv + per - 1), kv, -1):
            if ("tail", path[end - 1]) in pool:
                kv = end
                break
        for end in range(kv, 0, -1):
            # A tail's state is of use together with its block only; a junction lies between blocks.
            if ("state", path[end - 1]) in pool and (end % per == 0 or end == kv or ("tail", path[end - 1]) in pool):
                return whole, kv, end
        return whole, kv, 0

    def _return(self, path: list[int], hit: int, states: set[int], per: int) -> None:
        """Put what the request used and made at the recent end, in the order in which it may go again."""
        blocks: list[tuple[Name, int]] = []
        for end in sorted({*states, hit} - {0}):
            blocks.append((("state", path[end - 1]), self._state))
        for end in sorted({*states, hit} - {0}, reverse=True):
            if end % per:
                blocks.append((("tail", path[end - 1]), 1))
        for end in range(len(path) // per * per, 0, -per):
            blocks.append((("kv", path[end - 1]), 1))
        for name, size in blocks:
            if name in self._pool:
                self._pool.move_to_end(name)
            else:
                self._pool[name] = size
                self._used += size
        while self._used > self._capacity:
            self._used -= self._pool.popitem(last=False)[1]


__all__ = ["Prefixes", "VllmAlign"]
