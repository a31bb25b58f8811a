"""One engine or several behind the server, and what is asked of either.

Replicas run in processes of their own: what is called there has to be a function of a module, and what it leaves
behind (`_HERE`) stays in that process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from perilune.serve.async_llm import AsyncLLM
from perilune.serve.llm import LLM
from perilune.serve.replicas import Replicas
from perilune.serve.server import grammar
from perilune.serve.server.tenants import Tenant
from perilune.serve.ui import Watch

T = TypeVar("T")
Source = LLM | Replicas
Engine = AsyncLLM | Replicas


@dataclass(frozen=True)
class Served:
    """A model as an engine serves it. holds: most tokens of one request that its memory holds."""

    vocabulary: int
    positions: int
    k3: bool
    holds: int


_HERE: dict[int, Watch] = {}  # of each LLM of this process


def describe(source: Source) -> Served:
    """Look at the engines before they serve; from here on they are watched."""
    if isinstance(source, LLM):
        return _look(source, replica=False)
    with ThreadPoolExecutor(1) as other:  # a loop may run in this thread
        found = other.submit(asyncio.run, source.call(partial(_look, replica=True))).result()
    served: Served = found[0]
    return served


def start(source: Source) -> Engine:
    """The engines in their threads or processes."""
    return AsyncLLM(source) if isinstance(source, LLM) else source


async def ask(engine: Engine, function: Callable[[LLM], T]) -> list[T]:
    """function(llm) of every engine, between two of its steps."""
    if isinstance(engine, AsyncLLM):
        return [await engine.call(function)]
    return await engine.call(function)


async def shared(under_way: dict[str, asyncio.Future[Any]], name: str, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, which all who ask for `name` before it is there wait for together.

    However many ask, the engine is held up once between two steps.
    """
    if name not in under_way:
        under_way[name] = asyncio.ensure_future(work())
        under_way[name].add_done_callback(lambda _: under_way.pop(name))
    result: T = await asyncio.shield(under_way[name])
    return result


async def picture(engine: Engine, tenant: Tenant) -> dict[str, Any]:
    """The cache as a tenant may see it; of several engines that of the first."""
    return (await ask(engine, partial(_picture, tenant=tenant)))[0]


def _look(llm: LLM, replica: bool) -> Served:
    _HERE[id(llm)] = Watch(llm.engine.scheduler, llm.engine.clock)
    model = llm.engine.model.config
    if replica and llm.tokenizer is not None:
        grammar.keep(grammar.Grammars(llm.tokenizer, model.vocab_size))
    return Served(model.vocab_size, model.max_position_embeddings, model.family == "kimi_k3", _capacity(llm))


def _picture(llm: LLM, tenant: Tenant) -> dict[str, Any]:
    return _HERE[id(llm)].picture(tenant.owns)


def _capacity(llm: LLM) -> int:
    """By the rule of admission."""
    config, usable = llm.engine.config, llm.engine.scheduler.admission.usable
    as_long = int(usable * config.long_share) * config.page_tokens
    return as_long if as_long >= config.long_tokens else min(usable * config.page_tokens, config.long_tokens - 1)


__all__ = ["Engine", "Served", "Source", "ask", "describe", "picture", "shared", "start"]
