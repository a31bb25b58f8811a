"""The simulator: replays request traces through the engine's own cache and through models of its peers. No torch."""

from __future__ import annotations

from perilune.errors import Error
from perilune.serve.cache import Geometry
from perilune.serve.simulate.align import VllmAlign
from perilune.serve.simulate.ours import Perilune
from perilune.serve.simulate.radix import Marconi, lru, mamba_radix
from perilune.serve.simulate.replay import Infinite, Policy, Result, Served, replay
from perilune.serve.simulate.traces import Request, Trace, read

POLICIES = ("perilune", "vllm-align", "mamba-radix", "marconi", "lru", "infinite")


def policy(name: str, geometry: Geometry, device_bytes: int, host_bytes: int = 0, block: int = 6144) -> Policy:
    """A cache by name. block: tokens of a block of vllm-align, which others do not have.

    Raises Error for an unknown name and for a host tier where the model of a peer has none.
    """
    if name not in POLICIES:
        raise Error(f"policy is {name!r}; allowed: {', '.join(POLICIES)}")
    if host_bytes and name in ("vllm-align", "marconi", "infinite"):
        raise Error(f"host_gb is {host_bytes / 1e9:g}; policy {name!r} has no host tier")
    if name == "vllm-align":
        return VllmAlign(geometry, device_bytes, block)
    if name == "marconi":
        return Marconi(geometry, device_bytes)
    if name == "infinite":
        return Infinite(geometry.match_unit)
    if name == "perilune":
        return Perilune(geometry, device_bytes, host_bytes)
    return (lru if name == "lru" else mamba_radix)(geometry, device_bytes, host_bytes)


__all__ = ["POLICIES", "Infinite", "Policy", "Request", "Result", "Served", "Trace", "policy", "read", "replay"]
