"""What a chat request may hold: every check here raises Error with the field's path, before anything is rendered.

Rules: the released chat format of Kimi-K3 and the public vendor conformance tests for it (tools declared in the
middle of a conversation, tool names, tool_choice, thinking effort, response_format).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.errors import Error

ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("low", "high", "max")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,255}")
# Fields of an OpenAI message whose content the format has no place for: refused when they hold something.
UNSUPPORTED = ("function_call", "audio", "refusal", "partial", "prefix")

Message = Mapping[str, Any]
Tool = Mapping[str, Any]


def check_request(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    thinking_effort: str | None,
    tool_choice: str | Mapping[str, Any] | None,
    response_format: Mapping[str, Any] | None,
) -> None:
    """Raise Error, naming the field, unless the whole request can be rendered."""
    declared = check_messages(messages, tools)
    check_effort(thinking_effort)
    check_tool_choice(tool_choice, declared)
    check_response_format(response_format)


def check_messages(messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> frozenset[str]:
    """Check every message and tool declaration; return the names of all declared tools."""
    declared = check_tools(tools, "tools", frozenset())
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise Error(f"messages is {_kind(messages)}; must be a list of messages")
    if not messages:
        raise Error("messages is empty; must hold at least one message")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise Error(f"{where} is {_kind(message)}; must be an object")
        role = message.get("role")
        if role not in ROLES:
            raise Error(f"{where}.role is {role!r}; allowed: {', '.join(ROLES)}")
        for field in UNSUPPORTED:
            if message.get(field):
                raise Error(f"{where}.{field} is set; the chat format has no place for it")
        _check_text_field(message, "name", where)
        if message.get("tools") is not None:
            if role != "system":
                raise Error(f"{where}.tools: only a system message may declare tools, this role is {role!r}")
            declared |= check_tools(message["tools"], f"{where}.tools", declared)
            if message["tools"] and content_texts(message.get("content"), f"{where}.content", optional=True):
                raise Error(f"{where}.content must be empty in a message that declares tools")
        if role == "assistant":
            _check_assistant(message, where)
        else:
            if message.get("tool_calls"):
                raise Error(f"{where}.tool_calls: only an assistant message may call tools, this role is {role!r}")
            content_texts(message.get("content"), f"{where}.content", optional=bool(message.get("tools")))
        if role == "tool" and not (isinstance(message.get("tool_call_id"), str) and message["tool_call_id"]):
            raise Error(f"{where}.tool_call_id is {message.get('tool_call_id')!r}; a tool message must name its call")
    return declared


def check_tools(tools: Any, where: str, taken: frozenset[str]) -> frozenset[str]:
    """Check a list of tool declarations whose names must differ from each other and from `taken`; return the names."""
    if tools is None:
        return frozenset()
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise Error(f"{where} is {_kind(tools)}; must be a list of tools")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        here = f"{where}[{i}]"
        if not isinstance(tool, Mapping):
            raise Error(f"{here} is {_kind(tool)}; must be an object")
        if tool.get("type") != "function":
            raise Error(f"{here}.type is {tool.get('type')!r}; allowed: 'function'")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise Error(f"{here}.function is {_kind(function)}; must be an object")
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Error(
                f"{here}.function.name is {_short(name)}; must be 1 to 256 letters, digits, '_' or '-', "
                "not starting with a digit or '-'"
            )
        if name in names or name in taken:
            raise Error(f"{here}.function.name is {name!r}, which is declared twice; names must differ")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise Error(f"{here}.function.parameters is {_kind(parameters)}; must be a JSON schema object")
        _check_text_field(function, "description", f"{here}.function")
        _check_flag(function, "strict", f"{here}.function")
        _check_jsonable(tool, here)
        names.add(name)
    return frozenset(names)


def check_effort(thinking_effort: str | None) -> None:
    """Raise Error unless None, low, high or max."""
    if thinking_effort is not None and thinking_effort not in EFFORTS:
        raise Error(f"thinking_effort is {thinking_effort!r}; allowed: {', '.join(EFFORTS)}, or none given")


def check_tool_choice(tool_choice: Any, declared: frozenset[str]) -> None:
    """Raise Error unless None, auto, none, required (with tools declared) or a named, declared function."""
    if tool_choice in (None, "auto", "none"):
        return
    if tool_choice == "required":
        if not declared:
            raise Error("tool_choice is 'required' but no tools are declared")
        return
    if not isinstance(tool_choice, Mapping):
        raise Error(f"tool_choice is {tool_choice!r}; allowed: 'auto', 'none', 'required' or a named function")
    if tool_choice.get("type") != "function":
        raise Error(f"tool_choice.type is {tool_choice.get('type')!r}; allowed: 'function'")
    function = tool_choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in declared:
        raise Error(f"tool_choice.function.name is {name!r}; declared tools: {', '.join(sorted(declared)) or 'none'}")


def check_response_format(response_format: Any) -> None:
    """Raise Error unless None, text, json_object, or json_schema with a name and an object schema."""
    if response_format is None:
        return
    if not isinstance(response_format, Mapping):
        raise Error(f"response_format is {_kind(response_format)}; must be an object")
    kind = response_format.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise Error(f"response_format.type is {kind!r}; allowed: 'text', 'json_object', 'json_schema'")
    if kind != "json_schema":
        return
    spec = response_format.get("json_schema")
    if not isinstance(spec, Mapping):
        raise Error(f"response_format.json_schema is {_kind(spec)}; must be an object")
    name = spec.get("name")
    if not isinstance(name, str) or not name:
        raise Error(f"response_format.json_schema.name is {name!r}; must be a non-empty string")
    if not isinstance(spec.get("schema"), Mapping):
        raise Error(f"response_format.json_schema.schema is {_kind(spec.get('schema'))}; must be a JSON schema object")
    _check_flag(spec, "strict", "response_format.json_schema")
    _check_jsonable(spec["schema"], "response_format.json_schema.schema")


def content_texts(content: Any, where: str, optional: bool = False) -> list[str]:
    """The non-empty texts of a message's content: a string, or a list of text parts (each one its own segment)."""
    if content is None:
        if optional:
            return []
        raise Error(f"{where} is missing; must be a string or a list of text parts")
    if isinstance(content, str):
        return [content] if content else []
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise Error(f"{where} is {_kind(content)}; must be a string or a list of text parts")
    texts: list[str] = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise Error(f"{where}[{i}] is {_kind(part)}; must be an object")
        if part.get("type") != "text":
            raise Error(f"{where}[{i}].type is {part.get('type')!r}; allowed: 'text' (there is no vision tower here)")
        if not isinstance(part.get("text"), str):
            raise Error(f"{where}[{i}].text is {_kind(part.get('text'))}; must be a string")
        texts.append(part["text"])
    return [text for text in texts if text]


def reasoning_text(message: Message, where: str = "message") -> str:
    """The assistant's earlier thinking (`reasoning_content`, or its alias `reasoning`); "" when there is none."""
    for field in ("reasoning_content", "reasoning"):
        value = message.get(field)
        if value is not None and not isinstance(value, str):
            raise Error(f"{where}.{field} is {_kind(value)}; must be a string")
        if value and value.strip():
            return str(value)
    return ""


def call_arguments(call: Mapping[str, Any], where: str = "tool_calls") -> Mapping[str, Any] | str:
    """A call's arguments as an object, or the raw string when it is not JSON at all.

    Raises Error for JSON that is not an object: the format has no place for it.
    """
    arguments = call["function"].get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return str(arguments)
    if not isinstance(arguments, Mapping):
        raise Error(f"{where}.function.arguments is {_kind(arguments)}; must be a JSON object")
    return arguments


def _check_assistant(message: Message, where: str) -> None:
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, Sequence) or isinstance(calls, str | bytes)):
        raise Error(f"{where}.tool_calls is {_kind(calls)}; must be a list of calls")
    for i, call in enumerate(calls or ()):
        here = f"{where}.tool_calls[{i}]"
        if not isinstance(call, Mapping):
            raise Error(f"{here} is {_kind(call)}; must be an object")
        if call.get("type", "function") != "function":
            raise Error(f"{here}.type is {call.get('type')!r}; allowed: 'function'")
        function = call.get("function")
        if not isinstance(function, Mapping):
            raise Error(f"{here}.function is {_kind(function)}; must be an object")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise Error(f"{here}.function.name is {function.get('name')!r}; must be a non-empty string")
        _check_text_field(call, "id", here)
        arguments = call_arguments(call, here)
        if isinstance(arguments, Mapping):
            _check_jsonable(arguments, f"{here}.function.arguments")
    has_reasoning = bool(reasoning_text(message, where))
    content_texts(message.get("content"), f"{where}.content", optional=bool(calls) or has_reasoning)


def _check_text_field(holder: Mapping[str, Any], field: str, where: str) -> None:
    value = holder.get(field)
    if value is not None and not isinstance(value, str):
        raise Error(f"{where}.{field} is {_kind(value)}; must be a string")


def _check_flag(holder: Mapping[str, Any], field: str, where: str) -> None:
    value = holder.get(field)
    if value is not None and not isinstance(value, bool):
        raise Error(f"{where}.{field} is {value!r}; must be true or false")


def _check_jsonable(value: Any, where: str) -> None:
    try:
        json.dumps(value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as problem:
        raise Error(f"{where} cannot be written as JSON: {problem}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:56]}...{shown[-1]}"


__all__ = [
    "EFFORTS",
    "NAME",
    "ROLES",
    "Message",
    "Tool",
    "call_arguments",
    "check_effort",
    "check_messages",
    "check_request",
    "check_response_format",
    "check_tool_choice",
    "check_tools",
    "content_texts",
    "reasoning_text",
]
