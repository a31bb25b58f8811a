"""Replay a trace through a cache and count what it saves.

Requests are served one at a time, at the moment of their arrival: no request waits, and what a running request holds
is not charged. Time is that of the trace.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from perilune.serve.simulate.traces import Request, Trace


@dataclass(frozen=True)
class Served:
    """Of one request: tokens whose KV and state came from the device and from the host tier; tokens whose KV was
    there without a state; bytes written back to the host and fetched from it."""

    device: int
    host: int = 0
    stateless: int = 0
    written: int = 0
    fetched: int = 0


class Policy(Protocol):
    """A cache under test."""

    name: str

    def serve(self, request: Request) -> Served: ...

    @property
    def cached_bytes(self) -> int: ...


@dataclass(frozen=True)
class Result:
    """Totals of a replay. token_hit_rate: tokens found / prompt tokens. hit_tokens_per_cached_mb: tokens found, a
    request, for a million (10^6) cached bytes, both averaged over requests."""

    policy: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    prefill_tokens: int
    stateless_tokens: int
    token_hit_rate: float
    device_hit_rate: float
    host_hit_rate: float
    mean_cached_bytes: int
    hit_tokens_per_cached_mb: float
    bytes_written_back: int
    bytes_fetched: int


def replay(trace: Trace, policy: Policy) -> Result:
    """Serve every request in order."""
    prompt = device = host = stateless = written = fetched = cached = 0
    for request in trace.requests:
        served = policy.serve(request)
        prompt += request.prompt
        device, host, stateless = device + served.device, host + served.host, stateless + served.stateless
        written, fetched = written + served.written, fetched + served.fetched
        cached += policy.cached_bytes
    count = max(1, len(trace.requests))
    hit = device + host
    return Result(
        policy=policy.name,
        requests=len(trace.requests),
        prompt_tokens=prompt,
        hit_tokens=hit,
        device_hit_tokens=device,
        host_hit_tokens=host,
        prefill_tokens=prompt - hit,
        stateless_tokens=stateless,
        token_hit_rate=round(hit / max(1, prompt), 6),
        device_hit_rate=round(device / max(1, prompt), 6),
        host_hit_rate=round(host / max(1, prompt), 6),
        mean_cached_bytes=cached // count,
        hit_tokens_per_cached_mb=round(hit / count / max(1e-6, cached / count / 1e6), 6),
        bytes_written_back=written,
        bytes_fetched=fetched,
    )


class Infinite:
    """The bound: everything seen is kept, and a state lies at every unit."""

    name = "infinite"
    cached_bytes = 0

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._ids: dict[tuple[int, Hashable], int] = {}

    def serve(self, request: Request) -> Served:
        hit, node, known = 0, 0, True
        whole = (request.prompt - 1) // self._unit
        for i, key in enumerate(request.keys):
            found = self._ids.setdefault((node, key), len(self._ids) + 1)
            known = known and found <= self._seen
            hit += known and i < whole
            node = found
        self._seen = len(self._ids)
        return Served(hit * self._unit)

    _seen = 0


def units(keys: Sequence[Hashable], prompt: int, unit: int) -> int:
    """Keys of a request that belong to its prompt."""
    return min(len(keys), prompt // unit)


__all__ = ["Infinite", "Policy", "Result", "Served", "replay", "units"]
