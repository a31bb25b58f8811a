"""Kimi-K3's chat format ("XTML"): messages -> segments.

An element is `<|open|>tag key="value"<|sep|>` body `<|close|>tag<|sep|>`. Only the markers are special tokens; tag and
attribute text is ordinary text, cut into segments exactly as the released renderer cuts it, because token counts
depend on the cut. Bodies are raw: what cannot be a special token needs no escaping.

Order: tools, thinking effort, messages, tool choice, response format, generation prefix.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perilune.chat.request import (
    Message,
    Tool,
    call_arguments,
    check_request,
    content_texts,
    reasoning_text,
)
from perilune.chat.segment import Segment
from perilune.errors import Error

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"

# Sentences of the protocol: the model was trained on exactly these.
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
    "```json\n{}\n```"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


def render(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """Render a conversation for Kimi-K3.

    messages: OpenAI-shaped; roles system, user, assistant, tool. A system message with `tools` declares more tools
        from there on. Results of tools are put into the order of their calls.
    thinking: every assistant turn has a think pair (empty without `reasoning_content`), and the generation prefix
        opens one; when off, earlier reasoning is left out and the prefix opens the response.
    thinking_effort: low, high or max; None renders nothing, and so does thinking off.
    tool_choice: auto and a named function render nothing (the latter is the grammar's work).
    response_format: text renders nothing.

    `by_model` is set on what the assistant wrote after the generation prefix, down to `<|end_of_msg|>`; not on a call
    whose arguments are not JSON, a form that only ever appears in inputs.

    Raises Error naming the field of anything malformed, an unknown role included.
    """
    check_request(messages, tools, thinking_effort, tool_choice, response_format)
    out: list[Segment] = []
    if tools:
        out += _declare(tools, _TOOLS)
    if thinking and thinking_effort is not None:
        out += _notice("thinking-effort", _EFFORT.format(thinking_effort))
    for message in order_results(messages):
        out += _message(message, thinking)
    if isinstance(tool_choice, str) and tool_choice in _CHOICE:
        out += _notice("tool-choice", _CHOICE[tool_choice])
    kind = (response_format or {}).get("type")
    if response_format is not None and kind in ("json_object", "json_schema"):
        text = _FORMAT.format(kind)
        if kind == "json_schema":
            text += _SCHEMA.format(compact(response_format["json_schema"]["schema"]))
        out += _notice("response-format", text)
    if add_generation_prompt:
        out += _open("message", role="assistant") + _open("think" if thinking else "response")
    return out


def order_results(messages: Sequence[Message]) -> list[Message]:
    """Sort each run of tool results into the order of the calls it answers, and give each its `tool` and `index`.

    A run in which any result names no call of the last assistant turn keeps its order; there the tool's name is the
    message's own, else that of the call at the same place. Raises Error when neither exists.
    """
    ordered: list[Message] = []
    calls: list[tuple[str | None, str]] = []
    answered = 0
    run: list[tuple[int, Message]] = []

    def flush() -> None:
        nonlocal answered
        first = {id_: (place, name) for place, (id_, name) in reversed(list(enumerate(calls)))}
        resolved = all(message["tool_call_id"] in first for _, message in run)
        if resolved:
            run.sort(key=lambda item: first[item[1]["tool_call_id"]][0])
        for i, message in run:
            if resolved:
                name: str | None = first[message["tool_call_id"]][1]
            else:
                name = message.get("name") or (calls[answered][1] if answered < len(calls) else None)
            if name is None:
                id_ = message["tool_call_id"]
                raise Error(f"messages[{i}].tool_call_id is {id_!r}, which no call of the last assistant turn has")
            answered += 1
            ordered.append({**message, "tool": name, "index": answered})
        run.clear()

    for i, message in enumerate(messages):
        if message["role"] == "tool":
            run.append((i, message))
            continue
        flush()
        if message["role"] == "assistant":
            calls = [(call.get("id"), call["function"]["name"]) for call in message.get("tool_calls") or ()]
            answered = 0
        ordered.append(message)
    flush()
    return ordered


def compact(value: Any) -> str:
    """JSON without spaces, keys sorted at every level, as tools and schemas are shown to the model."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def json_type(value: Any) -> str:
    """The `type` attribute of an argument: string, number, boolean, null, object or array."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _message(message: Message, thinking: bool) -> list[Segment]:
    role = message["role"]
    if role == "system" and message.get("tools"):
        return _declare(message["tools"], _MORE_TOOLS)
    if role == "assistant":
        return _assistant(message, thinking)
    if role == "tool":
        start = _open("message", role="tool", tool=message["tool"], index=str(message["index"]))
    else:
        start = _open("message", role=role, **_name(message))
    return start + _texts(content_texts(message.get("content"), "content", optional=True)) + _end()


def _assistant(message: Message, thinking: bool) -> list[Segment]:
    head = _open("message", role="assistant", **_name(message))
    response = _texts(content_texts(message.get("content"), "content", optional=True)) + _close("response")
    if thinking:
        head += _open("think")
        reasoning = reasoning_text(message)
        body = _texts([reasoning] if reasoning else []) + _close("think") + _open("response") + response
    else:
        head += _open("response")
        body = response
    tail: list[Segment] = []
    calls = message.get("tool_calls") or ()
    if calls:
        tail += _by_model(_open("tools"))
        for index, call in enumerate(calls, start=1):
            tail += _call(call, index)
        tail += _by_model(_close("tools"))
    return head + _by_model(body) + tail + _by_model(_end())


def _call(call: Mapping[str, Any], index: int) -> list[Segment]:
    arguments = call_arguments(call)
    start = _by_model(_open("call", tool=call["function"]["name"], index=str(index)))
    if isinstance(arguments, str):
        body = [*_open("json", type="object"), Segment(arguments, False), *_close("json")]
    else:
        body = []
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            body += _open("argument", key=key, type=json_type(value))
            body += _texts([text] if text else []) + _close("argument")
        body = _by_model(body)
    return start + body + _by_model(_close("call"))


def _declare(tools: Sequence[Tool], sentence: str) -> list[Segment]:
    return _notice("tool-declare", sentence.format(compact(tools)))


def _notice(kind: str, text: str) -> list[Segment]:
    return [*_open("message", role="system", type=kind), Segment(text, False), *_end()]


def _name(message: Message) -> dict[str, str]:
    return {"name": message["name"]} if message.get("name") else {}


def _open(tag: str, **attributes: str) -> list[Segment]:
    out = [Segment(OPEN, True), Segment(tag, False)]
    for key, value in attributes.items():
        out += [Segment(f" {key}", False), Segment('="', False)]
        # An empty value has no segment of its own.
        out += _texts([value.replace("&", "&amp;").replace('"', "&quot;")] if value else [])
        out.append(Segment('"', False))
    out.append(Segment(SEP, True))
    return out


def _close(tag: str) -> list[Segment]:
    return [Segment(CLOSE, True), Segment(tag, False), Segment(SEP, True)]


def _end() -> list[Segment]:
    return [*_close("message"), Segment(END, True)]


def _texts(texts: Iterable[str]) -> list[Segment]:
    return [Segment(text, False) for text in texts]


def _by_model(segments: Iterable[Segment]) -> list[Segment]:
    return [Segment(text, special, True) for text, special, _ in segments]


__all__ = ["CLOSE", "END", "OPEN", "SEP", "compact", "json_type", "order_results", "render"]
