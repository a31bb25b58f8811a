"""What is asked for when a sandbox is made or a service opened, and what is told when something has happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from perilune.sandbox.driver import Network
from perilune.sandbox.store import Record


@dataclass(frozen=True)
class Limits:
    """What a service may use. memory: bytes of all machines together. disk: bytes of layers and images.

    boxes: sandboxes that exist. pool_low, pool_high: booted machines kept ready for each template that is in use.
    """

    memory: int | None = None
    disk: int = 64 << 30
    boxes: int = 10_000
    pool_low: int = 0
    pool_high: int = 0


@dataclass(frozen=True)
class Event:
    """Something that happened, for metrics and logs. seconds: how long it took. error: empty if it went well."""

    name: str
    box: str
    seconds: float
    error: str = ""
    detail: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """What a new sandbox is. timeout_s: time to live, renewed by `keep_alive`; None for no end.

    on_timeout: "pause" or "kill". idle_s: paused after that long without use and without programs. owner, metadata:
    the caller's, for listing. snapshot: start from it instead of the template. env: for every program.
    """

    template: str = "busybox"
    memory_mib: int | None = None
    disk_mib: int | None = None
    snapshot: str | None = None
    timeout_s: float | None = 3600.0
    on_timeout: str = "pause"
    idle_s: float | None = None
    owner: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        if self.on_timeout not in ("pause", "kill"):
            raise ValueError(f"on_timeout is {self.on_timeout!r}; it must be 'pause' or 'kill'")
        for name in ("timeout_s", "idle_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ValueError(f"{name} is {value}; it must be more than 0 seconds, or None")


def lifetime(options: Options) -> dict[str, Any]:
    """The part of a sandbox's specification that is not its machine."""
    return {
        "timeout_s": options.timeout_s,
        "on_timeout": options.on_timeout,
        "idle_s": options.idle_s,
        "env": dict(options.env),
        "network": asdict(options.network),
    }


def network_of(record: Record) -> Network:
    """What a stored sandbox may reach."""
    given = record.spec.get("network") or {}
    return Network(tuple(given.get("allow", ())), tuple(given.get("deny", ())), bool(given.get("private", False)))


__all__ = ["Event", "Limits", "Options", "lifetime", "network_of"]
