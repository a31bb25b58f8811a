"""A chat request -> a job: checked, rendered, tokenized, with the grammar that its answer must follow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from perilune.chat import Options, Segment, declared, render, render_k2
from perilune.chat.parse import call_name
from perilune.chat.request import check_request
from perilune.errors import Error
from perilune.serve.server.arguments import Format
from perilune.serve.server.context import Context
from perilune.serve.server.grammar import Grammar
from perilune.serve.server.job import Job
from perilune.serve.server.params import answer_params, check_policy, stops
from perilune.serve.server.schema import Chat
from perilune.serve.server.schemas import check_size
from perilune.serve.server.structure import Tools, answer_k2, answer_k3, body_format
from perilune.serve.server.tenants import Tenant

# The tag that opens the next channel is "pending": a prompt is counted without it.
PENDING = 3
_LARGE = 20_000  # bytes of a body from which work on it is done beside the event loop
SLOW = _LARGE + 1  # as many are counted for a schema: a small one may take a second
T = TypeVar("T")


@dataclass(frozen=True)
class Talk:
    """What is rendered. effort None says nothing to the model; choice: of tools, as in the request."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    thinking: bool
    effort: str | None
    choice: Any
    response_format: Mapping[str, Any] | None

    def declared(self) -> list[Mapping[str, Any]]:
        """Tools of the request, and those that its messages declare."""
        return [*(self.tools or ()), *(tool for message in self.messages for tool in message.get("tools") or ())]


async def chat_job(context: Context, body: Chat, tenant: Tenant, size: int = 0, marks: Sequence[int] = ()) -> Job:
    """Raises Error, naming the field, for whatever is wrong with the request. size: of its body, in bytes.

    marks: after how many of the request's messages a checkpoint is wanted; 0 is after the tools.
    """
    context.check_model(body.model)
    check_policy(context.config.request_policy, body)
    talk = conversation(context, body)
    stop = stops(context, body)
    schemas = talk.declared() or body.response_format or body.structured_outputs
    format, why = await beside(SLOW if schemas else size, _format, context, body, talk)
    prompt = await beside(size, tokenize, context, talk)
    params = answer_params(context, body, len(prompt), constrained=format is not None)
    grammar = await compiled(context, format, why)
    tools = talk.declared()
    before = sum(len(message.get("tool_calls") or ()) for message in talk.messages)
    options = Options(
        thinking=talk.thinking,
        calls=talk.choice != "none",
        tools=declared(tools),
        call_id=lambda name, index: call_name(name, before + index),
    )
    ends = [i + 1 for i, token in enumerate(prompt) if token == context.tokenizer.eos_id] if marks else []
    places = [_before(context, talk) + mark if mark else 1 for mark in marks]
    return Job(
        prompt,
        counted(context, prompt),
        params,
        stop,
        options,
        grammar,
        why,
        tuple(ends[place - 1] for place in places if place <= len(ends)),
        tenant.salted(body.cache_salt),
        priority(context, body.priority),
    )


def conversation(context: Context, body: Any) -> Talk:
    """The chat part of a request (`Chat` or `Tokenize`), checked. Raises Error that names the field."""
    thinking, effort = _thinking(context, body)
    response_format = getattr(body, "response_format", None)
    if isinstance(response_format, dict) and response_format.get("type") == "structural_tag":
        response_format = None  # the grammar holds it; the format has no sentence for it
    choice = getattr(body, "tool_choice", None)
    check_request(body.messages, body.tools, effort, choice, response_format)
    return Talk(body.messages, body.tools or None, thinking, effort, choice, response_format)


def rendered(context: Context, talk: Talk) -> list[Segment]:
    """The conversation in the format of the model's family."""
    if context.k3:
        return render(talk.messages, talk.tools, talk.thinking, talk.effort, talk.choice, talk.response_format)
    return render_k2(talk.messages, talk.tools, talk.thinking, talk.choice)


def tokenize(context: Context, talk: Talk) -> list[int]:
    """The conversation's tokens, generation prefix included."""
    return context.tokenizer.encode_segments(rendered(context, talk))[0]


def _before(context: Context, talk: Talk) -> int:
    """Messages of the rendering that come before those of the request."""
    own = talk.effort is not None if context.k3 else talk.messages[0]["role"] != "system"
    return bool(talk.tools) + own


def counted(context: Context, prompt: Sequence[int]) -> int:
    """Prompt tokens as usage gives them."""
    return len(prompt) - PENDING if context.k3 else len(prompt)


def priority(context: Context, asked: int | None) -> int:
    """The engine's priority, higher first, of vLLM's, lower first. Raises Error where the server has none."""
    if asked and not context.config.priorities:
        raise Error(f"priority is {asked}; allowed: 0, unless the server runs with --scheduling-policy priority")
    return -(asked or 0)


async def compiled(context: Context, format: Format | None, why: str) -> Grammar | None:
    """The grammar of a format that comes from the field `why`. Raises Error that names it."""
    if format is None:
        return None
    try:
        return await context.grammars.compile(format)
    except Error as error:
        raise Error(f"{why}: {error}") from None


async def beside(size: int, work: Callable[..., T], *arguments: Any) -> T:
    """work(*arguments), in another thread for a large request: others would wait for this one."""
    return await asyncio.to_thread(work, *arguments) if size > _LARGE else work(*arguments)


def _thinking(context: Context, body: Any) -> tuple[bool, str | None]:
    """Whether the model thinks, and how much. What `thinking` says wins over `reasoning_effort`."""
    given, effort = body.thinking, getattr(body, "reasoning_effort", None)
    template = getattr(body, "chat_template_kwargs", None) or {}
    where, on = "reasoning_effort", context.k3
    for key in ("thinking", "enable_thinking"):
        if given is None and key in template:
            given = template[key]
            if not isinstance(given, bool):
                raise Error(f"chat_template_kwargs.{key} is {given!r}; must be true or false")
    if "thinking_effort" in template:
        effort, where = template["thinking_effort"], "chat_template_kwargs.thinking_effort"
    if effort == "none" and where == "reasoning_effort":
        on, effort = False, None
    if isinstance(given, bool):
        on = given
    elif isinstance(given, Mapping):
        if given.get("type") not in ("enabled", "disabled"):
            raise Error(f"thinking.type is {given.get('type')!r}; allowed: 'enabled', 'disabled'")
        if given.get("keep") not in (None, "all"):
            raise Error(f"thinking.keep is {given['keep']!r}; allowed: 'all'")
        on = given["type"] == "enabled"
        if given.get("effort") is not None:
            effort, where = given["effort"], "thinking.effort"
    elif given is not None:
        raise Error(f"thinking is {given!r}; must be true, false or an object with a type")
    if body.thinking_effort is not None:
        effort, where = body.thinking_effort, "thinking_effort"
    if effort is not None and effort not in ("low", "high", "max"):
        raise Error(f"{where} is {effort!r}; allowed: low, high, max")
    return on, (effort or context.config.default_thinking_effort) if on and context.k3 else None


def _format(context: Context, body: Chat, talk: Talk) -> tuple[Format | None, str]:
    """The format of the answer and the field that asks for it; None where any text will do."""
    limit = context.config.max_schema_bytes
    tools = talk.declared()
    for where, value in (("tools", tools), ("response_format", body.response_format)):
        if value and len(json.dumps(value)) > limit:
            raise Error(f"{where} is larger than {limit} bytes")
    wanted = body_format(body.response_format, body.structured_outputs)
    where = "structured_outputs" if body.structured_outputs is not None else "response_format"
    choice, parallel = talk.choice, body.parallel_tool_calls is not False
    use: Tools = "none" if choice == "none" or not tools else "optional"
    if isinstance(choice, Mapping):
        tools = [tool for tool in tools if tool["function"]["name"] == choice["function"]["name"]]
        use, parallel = "required", False
    elif choice == "required":
        use = "required"
    strict = any(tool["function"].get("strict") for tool in tools)
    if wanted is None and use != "required" and not (strict and use == "optional"):
        return None, ""
    if use == "required" or (strict and use == "optional" and wanted is None):
        where = "tool_choice" if use == "required" else "tools"
    if use != "none":
        try:
            check_size(tools)
        except Error as error:
            raise Error(f"tools: {error}") from None
    family = answer_k3 if context.k3 else answer_k2
    return family(talk.thinking, wanted, tools if use != "none" else [], use, parallel), where


__all__ = [
    *("SLOW", "Talk", "beside", "chat_job", "compiled", "conversation", "counted", "priority", "rendered"),
    "tokenize",
]
