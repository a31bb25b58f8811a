"""What a server is told: names, keys, limits. What the engine may use is `EngineConfig`'s."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from perilune.chat.request import EFFORTS
from perilune.errors import Error

PARSERS = ("kimi_k3", "kimi_k2")


@dataclass(frozen=True)
class ServerConfig:
    """model_names: the names clients may ask for. api_keys: one tenant each; without keys everybody is one tenant.

    max_model_len: most tokens of prompt and answer (None: what model and memory allow). default_max_tokens: of a chat
        answer where the request says nothing, as far as there is room.
    tool_call_parser, reasoning_parser: of the model's output, both the same one (None: that of the model's family).
    default_thinking_effort: low, high or max, where the request says nothing (None: nothing is said to the model).
    request_policy: "kimi" refuses what Moonshot's own service refuses (n, temperature, top_p, penalties).
    priorities: whether `priority` of a request counts (vLLM's order: lower first).
    max_body_bytes, max_n, max_stops, max_schema_bytes: of one request. max_running: requests on their way at once, all
    tenants; max_running_per_key: of one key. Beyond them a request is refused (429), never queued without end.
    body_seconds: to send a body in. drain_seconds: that answers have to end after SIGTERM.
    otlp_traces_endpoint: where OpenTelemetry spans go (None: to whatever the process has set up, if anything).
    Raises Error for a value out of range.
    """

    model_names: tuple[str, ...] = ("perilune",)
    api_keys: tuple[str, ...] = ()
    max_model_len: int | None = None
    default_max_tokens: int = 16_384
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    default_thinking_effort: str | None = None
    request_policy: str | None = None
    priorities: bool = False
    max_body_bytes: int = 8_000_000
    max_n: int = 16
    max_stops: int = 16
    max_schema_bytes: int = 1_000_000
    max_running: int = 1024
    max_running_per_key: int = 512
    body_seconds: float = 60.0
    drain_seconds: float = 30.0
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise Error(f"server.model_names is {self.model_names!r}; needs at least one name, none empty")
        if not all(self.api_keys):
            raise Error("server.api_keys holds an empty key; a key has at least one character")
        for name in ("tool_call_parser", "reasoning_parser"):
            if getattr(self, name) not in (None, *PARSERS):
                raise Error(f"server.{name} is {getattr(self, name)!r}; allowed: {', '.join(PARSERS)}")
        if None not in (both := (self.tool_call_parser, self.reasoning_parser)) and both[0] != both[1]:
            raise Error(f"server.reasoning_parser is {both[1]!r}; must be that of tool calls, {both[0]!r}")
        if self.default_thinking_effort not in (None, *EFFORTS):
            given, allowed = self.default_thinking_effort, ", ".join(EFFORTS)
            raise Error(f"server.default_thinking_effort is {given!r}; allowed: {allowed}, or none")
        if self.request_policy not in (None, "kimi"):
            raise Error(f"server.request_policy is {self.request_policy!r}; allowed: 'kimi' or none")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise Error(f"server.max_model_len is {self.max_model_len}; must be >= 2")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise Error(f"server.{name} is {getattr(self, name)}; must be >= 1")
        for name in ("body_seconds", "drain_seconds"):
            if not 0 < getattr(self, name) < inf:
                raise Error(f"server.{name} is {getattr(self, name)}; must be > 0 and finite")


_COUNTS = (
    *("default_max_tokens", "max_body_bytes", "max_n", "max_stops", "max_schema_bytes"),
    *("max_running", "max_running_per_key"),
)

__all__ = ["PARSERS", "ServerConfig"]
