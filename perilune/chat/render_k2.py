"""The chat format of the K2 family (Kimi-K2, Kimi-Linear): messages -> segments.

A message is `<|im_ROLE|>` name `<|im_middle|>` body `<|im_end|>`, ROLE being user, assistant or system (which tools use
too). Special tokens are the markers and the think pair; the ordinary text between two of them is one segment, as the
released template makes one string of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.chat.request import Message, Tool, call_arguments, check_request, content_texts, reasoning_text
from perilune.chat.segment import Segment

MIDDLE, END = "<|im_middle|>", "<|im_end|>"
_OF_ROLE = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
_SYSTEM = "<|im_system|>"
# What the released template says when the conversation has no system message.
DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."


def render_k2(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    thinking: bool = False,
    tool_choice: str | Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """Render a conversation for a K2-family model.

    messages: as for `render`; a conversation that does not start with a system message gets the default one.
    thinking: assistant turns carry `<think>reasoning</think>` and the generation prefix opens it; off for instruction
        models (K2-Instruct, Kimi-Linear), whose turns hold the text alone.
    tool_choice: checked; nothing is rendered for it.

    The name of a called tool is part of its id, `functions.NAME:COUNTER`, counted through the conversation. Calls that
    came with other ids (of another model) are given such ids, and their results too.

    `by_model` marks what the assistant wrote after the generation prefix, down to `<|im_end|>`.
    Raises Error naming the field of anything malformed.
    """
    check_request(messages, tools, None, tool_choice, None)
    out: list[Segment] = []
    if tools:
        out += _message(_SYSTEM, "tool_declare", _json(tools))
    if messages[0]["role"] != "system":
        out += _message(_SYSTEM, "system", DEFAULT_SYSTEM)
    ids: dict[str, str] = {}
    calls = 0
    for i, message in enumerate(messages):
        role = message["role"]
        text = "".join(content_texts(message.get("content"), f"messages[{i}].content", optional=True))
        name = message.get("name") or role
        if role == "system" and message.get("tools"):
            out += _message(_SYSTEM, "tool_declare", _json(message["tools"]))
        elif role == "tool":
            id_ = message["tool_call_id"]
            out += _message(_SYSTEM, name, f"## Return of {ids.get(id_, id_)}\n{text}")
        elif role == "assistant":
            out += [*_head(_OF_ROLE[role], name), *_think(message, thinking), *_text(text, True)]
            given = message.get("tool_calls") or ()
            if given:
                out.append(Segment("<|tool_calls_section_begin|>", True, True))
                for call in given:
                    id_ = _call_id(call, calls)
                    ids[call.get("id") or id_] = id_
                    out += _call(call, id_)
                    calls += 1
                out.append(Segment("<|tool_calls_section_end|>", True, True))
            out.append(Segment(END, True, True))
        else:
            out += _message(_OF_ROLE.get(role, _SYSTEM), name, text)
    if add_generation_prompt:
        out += _head(_OF_ROLE["assistant"], "assistant")
        if thinking:
            out.append(Segment("<think>", True))
    return out


def _message(marker: str, name: str, text: str) -> list[Segment]:
    return [*_head(marker, name), *_text(text), Segment(END, True)]


def _text(text: str, by_model: bool = False) -> list[Segment]:
    return [Segment(text, False, by_model)] if text else []


def _head(marker: str, name: str) -> list[Segment]:
    return [Segment(marker, True), Segment(name, False), Segment(MIDDLE, True)]


def _think(message: Message, thinking: bool) -> list[Segment]:
    if not thinking:
        return []
    return [Segment("<think>", True), *_text(reasoning_text(message), True), Segment("</think>", True, True)]


def _call(call: Mapping[str, Any], id_: str) -> list[Segment]:
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str) or not arguments.strip():
        arguments = _json(call_arguments(call))
    return [
        Segment("<|tool_call_begin|>", True, True),
        Segment(id_, False, True),
        Segment("<|tool_call_argument_begin|>", True, True),
        Segment(arguments, False, True),
        Segment("<|tool_call_end|>", True, True),
    ]


def _call_id(call: Mapping[str, Any], counter: int) -> str:
    """The call's own id where it spells the tool's name, else one that does."""
    name = call["function"]["name"]
    id_ = call.get("id") or ""
    head, _, tail = id_.rpartition(":")
    return id_ if head == f"functions.{name}" and tail.isdecimal() else f"functions.{name}:{counter}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


__all__ = ["DEFAULT_SYSTEM", "render_k2"]
