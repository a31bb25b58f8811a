"""A request of Anthropic's Messages API as a chat request of OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from perilune.errors import Error
from perilune.serve.server.schema import Chat, Strict, Texts

Object = dict[str, Any]
# Anthropic's names of how much to think -> those of the chat format.
_EFFORTS = {"low": "low", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}

_FIELDS = {
    "tool_choice.function": "tool_choice",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}


class CountTokens(Strict):
    """/v1/messages/count_tokens."""

    model: str
    messages: Any
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None
    output_config: Any = None


class Messages(CountTokens):
    """/v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool = False
    stop_sequences: Texts | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None


@dataclass
class Translated:
    """chat: the request. renamed: its fields -> Anthropic's, for errors. marks: after how many of its messages the
    client set `cache_control`; 0 is after the tools."""

    chat: Chat
    renamed: dict[str, str] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)


def translate(body: CountTokens) -> Translated:
    """Raises Error that names the field."""
    out: list[Object] = []
    renamed: dict[str, str] = {}
    marks: list[int] = []
    if body.system is not None:
        out.append({"role": "system", "content": _texts(body.system, "system")})
        renamed["messages[0].content"] = "system"
        if _marked(body.system):
            marks.append(1)
    if not isinstance(body.messages, list) or not body.messages:
        raise Error("messages must be a list with at least one message")
    for i, message in enumerate(body.messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
            role = message.get("role") if isinstance(message, Mapping) else message
            raise Error(f"{where}.role is {str(role)[:60]!r}; allowed: user, assistant")
        turn = _assistant if message["role"] == "assistant" else _user
        for made in turn(message.get("content"), f"{where}.content"):
            renamed[f"messages[{len(out)}]"] = where
            out.append(made)
        if _marked(message.get("content")):
            marks.append(len(out))
    if body.messages[-1]["role"] == "assistant":
        raise Error(f"messages[{len(body.messages) - 1}].role is 'assistant'; the last message must be the user's")
    fields: Object = {"model": body.model, "messages": out, "thinking": _thinking(body.thinking)}
    if body.tools is not None:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(_list(body.tools, "tools"))]
        for i in range(len(body.tools)):
            renamed[f"tools[{i}].function.parameters"] = f"tools[{i}].input_schema"
            renamed[f"tools[{i}].function"] = f"tools[{i}]"
        if any(tool.get("cache_control") for tool in body.tools):
            marks.append(0)
    fields |= _choice(body.tool_choice) | _output(body.output_config)
    if isinstance(body, Messages):
        fields |= {"max_tokens": body.max_tokens, "stream": body.stream, "stop": body.stop_sequences}
        fields |= {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
        renamed["stop"] = "stop_sequences"
    renamed |= _FIELDS
    return Translated(Chat(**fields), renamed, marks)


def _user(content: Any, where: str) -> list[Object]:
    """Results of tools, each a message of its own, then what the user says."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    out: list[Object] = []
    said: list[Object] = []
    for i, block in enumerate(_blocks(content, where)):
        here = f"{where}[{i}]"
        if block.get("type") == "tool_result":
            _need_text(block, "tool_use_id", here)
            answer = block.get("content")
            text = [] if answer is None else _texts(answer, f"{here}.content")
            out.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            said.append(_text(block, here))
    if said or not out:
        out.append({"role": "user", "content": said})
    return out


def _assistant(content: Any, where: str) -> list[Object]:
    if isinstance(content, str):
        return [{"role": "assistant", "content": content}]
    said: list[Object] = []
    thought: list[str] = []
    calls: list[Object] = []
    for i, block in enumerate(_blocks(content, where)):
        here = f"{where}[{i}]"
        if block.get("type") == "thinking":
            if not isinstance(block.get("thinking"), str):
                raise Error(f"{here}.thinking must be a text")
            thought.append(block["thinking"])
        elif block.get("type") == "tool_use":
            _need_text(block, "id", here)
            _need_text(block, "name", here)
            if not isinstance(block.get("input"), Mapping):
                raise Error(f"{here}.input must be an object")
            function = {"name": block.get("name"), "arguments": block["input"]}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif block.get("type") != "redacted_thinking":
            said.append(_text(block, here))
    message: Object = {"role": "assistant", "content": said, "reasoning_content": "".join(thought)}
    return [{**message, "tool_calls": calls} if calls else message]


def _need_text(block: Mapping[str, Any], field: str, where: str) -> None:
    if not isinstance(block.get(field), str) or not block[field]:
        raise Error(f"{where}.{field} is {str(block.get(field))[:60]!r}; must be a text that is not empty")


def _texts(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    return [_text(block, f"{where}[{i}]") for i, block in enumerate(_blocks(content, where))]


def _text(block: Mapping[str, Any], where: str) -> Object:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise Error(f"{where}.type is {str(block.get('type'))[:60]!r}; allowed here: 'text' with a text")
    return {"type": "text", "text": block["text"]}


def _blocks(content: Any, where: str) -> list[Mapping[str, Any]]:
    for i, block in enumerate(_list(content, where)):
        if not isinstance(block, Mapping):
            raise Error(f"{where}[{i}] must be an object")
    return list(content)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise Error(f"{where} is of type {type(value).__name__}; must be a list")
    return value


def _marked(content: Any) -> bool:
    return isinstance(content, list) and any(
        isinstance(block, Mapping) and block.get("cache_control") for block in content
    )


def _tool(tool: Any, where: str) -> Object:
    if not isinstance(tool, Mapping):
        raise Error(f"{where} must be an object")
    if tool.get("type") not in (None, "custom"):
        raise Error(f"{where}.type is {str(tool['type'])[:60]!r}; allowed: 'custom' (this server runs no tools itself)")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Object:
    if choice is None:
        return {}
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    kinds = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in (*kinds, "tool"):
        raise Error(f"tool_choice.type is {str(kind)[:60]!r}; allowed: auto, any, tool, none")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    parallel = choice.get("disable_parallel_tool_use")
    if parallel not in (None, True, False):
        raise Error("tool_choice.disable_parallel_tool_use must be true or false")
    return {"tool_choice": kinds.get(kind, named), "parallel_tool_calls": not parallel}


def _thinking(thinking: Any) -> bool:
    """As Anthropic: the model thinks where it is asked to."""
    if thinking is None:
        return False
    kind = thinking.get("type") if isinstance(thinking, Mapping) else None
    if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
        raise Error(f"thinking.type is {str(kind)[:60]!r}; allowed: enabled, adaptive, between_tools, disabled")
    return bool(kind != "disabled")


def _output(config: Any) -> Object:
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise Error("output_config must be an object")
    out: Object = {}
    effort, format = config.get("effort"), config.get("format")
    if effort is not None:
        if not isinstance(effort, str) or effort not in _EFFORTS:
            raise Error(f"output_config.effort is {str(effort)[:60]!r}; allowed: {', '.join(_EFFORTS)}")
        out["reasoning_effort"] = _EFFORTS[effort]
    if format is not None:
        if not isinstance(format, Mapping) or format.get("type") != "json_schema":
            raise Error("output_config.format must be an object of type json_schema")
        spec = {"name": "output", "schema": format.get("schema")}
        out["response_format"] = {"type": "json_schema", "json_schema": spec}
    return out


__all__ = ["CountTokens", "Messages", "Translated", "translate"]
