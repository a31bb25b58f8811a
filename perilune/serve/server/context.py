"""What every endpoint works with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from perilune.chat import Tokenizer
from perilune.errors import Error
from perilune.serve.server.backend import Engine, Source, describe
from perilune.serve.server.config import ServerConfig
from perilune.serve.server.errors import ApiError
from perilune.serve.server.grammar import Grammars
from perilune.serve.server.metrics import Metrics
from perilune.serve.server.tenants import Tenants


@dataclass
class Context:
    """One server. longest: most tokens of prompt and answer together. vocabulary: of the model.

    started: the engines, from the start of the application on. under_way: what they are asked for (`shared`).
    """

    config: ServerConfig
    source: Source
    tokenizer: Tokenizer
    k3: bool
    longest: int
    vocabulary: int
    grammars: Grammars
    metrics: Metrics
    tenants: Tenants
    draining: bool = False
    created: int = 0
    started: Engine | None = None
    under_way: dict[str, asyncio.Future[Any]] = field(default_factory=dict)

    @property
    def llm(self) -> Engine:
        if self.started is None:
            raise ApiError(503, "the server has not started, or has stopped")
        return self.started

    def check_model(self, name: str | None) -> str:
        """The name that the answer gives back. Raises ApiError, 404, for a model that is not here."""
        if name is not None and name not in self.config.model_names:
            shown = ", ".join(self.config.model_names)
            raise ApiError(404, f"model is {name[:80]!r}; this server has: {shown}", "model")
        return name or self.config.model_names[0]


def make(config: ServerConfig, source: Source, created: int) -> Context:
    """Raises Error for a model without a tokenizer, or limits that do not fit it."""
    tokenizer = source.tokenizer
    if tokenizer is None:
        raise Error("the model has no tokenizer; a server needs one (tokenizer.json or tiktoken.model)")
    served = describe(source)
    if tokenizer.vocab_size > served.vocabulary:
        raise Error(f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {served.vocabulary}")
    longest = min(served.positions, served.holds)
    if config.max_model_len is not None:
        if config.max_model_len > longest:
            raise Error(
                f"max_model_len is {config.max_model_len}; allowed: up to {longest} (the model has {served.positions} "
                f"positions, the memory of one request holds {served.holds} tokens)"
            )
        longest = config.max_model_len
    parser = config.tool_call_parser or config.reasoning_parser
    return Context(
        config,
        source,
        tokenizer,
        served.k3 if parser is None else parser == "kimi_k3",
        longest,
        served.vocabulary,
        Grammars(tokenizer, served.vocabulary),
        Metrics(config.model_names[0]),
        Tenants(config),
        created=created,
    )


__all__ = ["Context", "make"]
