"""What a service is told at its start."""

from __future__ import annotations

from dataclasses import dataclass

# E2B's number, and AgentENV's: the SDK's own limit is larger, but one request should not stand for so long.
FORKS_PER_CALL = 16


@dataclass(frozen=True)
class ServiceConfig:
    """api_keys: any of them opens everything; without one nobody is asked. domain: guest ports are also reached as
    `{port}-{id}.{domain}`. max_body: bytes of a JSON body. max_file: bytes of a file that is read or written.
    max_output: bytes kept of a program's output where it is not streamed. drain_s: time that requests have after a
    stop was asked for. on_stop: what becomes of sandboxes that run then, "pause" or "kill".
    """

    api_keys: tuple[str, ...] = ()
    domain: str = "localhost"
    max_body: int = 1 << 20
    max_file: int = 64 << 20
    max_output: int = 16 << 20
    drain_s: float = 10.0
    on_stop: str = "pause"

    def __post_init__(self) -> None:
        if self.on_stop not in ("pause", "kill"):
            raise ValueError(f"on_stop is {self.on_stop!r}; it must be 'pause' or 'kill'")
        if any(not key for key in self.api_keys):
            raise ValueError("api_keys has an empty key; keys must have at least one character")
        for name in ("max_body", "max_file", "max_output"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 byte or more")
        if self.drain_s < 0:
            raise ValueError(f"drain_s is {self.drain_s}; it must be 0 or more seconds")


__all__ = ["FORKS_PER_CALL", "ServiceConfig"]
