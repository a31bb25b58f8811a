"""What an answer may look like, as one grammar: thinking, response, tool calls, in the format of the model's family.

The grammar begins where the generation prefix ends. Formats are xgrammar's structural tags.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from perilune.errors import Error
from perilune.serve.server.arguments import PLAIN, Format, arguments, constant, json_value, one_of, sequence
from perilune.serve.server.marks import CLOSE, K2, OPEN, SEP, check_plain, without_marks
from perilune.serve.server.schemas import check_size

Tools = Literal["none", "optional", "required"]


def answer_k3(
    thinking: bool, body: Format | None, tools: Sequence[Mapping[str, Any]], use: Tools, parallel: bool
) -> Format:
    """An answer of Kimi-K3. body: of the response (None: any text). use: whether calls may, or must, come."""
    response = sequence(PLAIN if body is None else body, constant(f"{CLOSE}response{SEP}"))
    calls = sequence(
        constant(f"{OPEN}tools{SEP}"),
        _some([_call_k3(tool) for tool in tools], parallel),
        constant(f"{CLOSE}tools{SEP}"),
    )
    if use == "none":
        rest = response
    elif body is None or use == "required":
        free = sequence(PLAIN, constant(f"{CLOSE}response{SEP}"))
        rest = sequence(free, calls if use == "required" else {"type": "optional", "content": calls})
    else:
        rest = one_of([response, sequence(constant(f"{CLOSE}response{SEP}"), calls)])
    end = constant(f"{CLOSE}message{SEP}")
    if not thinking:
        return sequence(rest, end)
    return sequence(PLAIN, constant(f"{CLOSE}think{SEP}{OPEN}response{SEP}"), rest, end)


def answer_k2(
    thinking: bool, body: Format | None, tools: Sequence[Mapping[str, Any]], use: Tools, parallel: bool
) -> Format:
    """An answer of the K2 family, as `answer_k3`."""
    response = PLAIN if body is None else body
    calls = sequence(
        constant(K2["<|tool_calls_section_begin|>"]),
        _some([_call_k2(tool) for tool in tools], parallel),
        constant(K2["<|tool_calls_section_end|>"]),
    )
    if use == "none":
        rest = response
    elif body is None or use == "required":
        rest = sequence(PLAIN, calls if use == "required" else {"type": "optional", "content": calls})
    else:
        rest = one_of([response, calls])
    return sequence(PLAIN, constant(K2["</think>"]), rest) if thinking else rest


def body_format(response_format: Mapping[str, Any] | None, structured: Any) -> Format | None:
    """The response's format of `response_format` or `structured_outputs`; None for any text.

    Raises Error, naming the field, for what cannot be followed.
    """
    kind = (response_format or {}).get("type", "text")
    if kind not in ("text", None) and structured is not None:
        raise Error("structured_outputs and response_format are both given; allowed: one of the two")
    if structured is not None:
        return _structured(structured)
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return json_value({"type": "object"})
    if kind == "json_schema":
        with _named("response_format.json_schema.schema"):
            check_size(response_format["json_schema"]["schema"])
            return json_value(response_format["json_schema"]["schema"])
    if not isinstance(response_format.get("format"), dict):
        raise Error(f"response_format.format is {type(response_format.get('format')).__name__}; must be an object")
    return dict(response_format["format"])


def _structured(value: Any) -> Format:
    if not isinstance(value, Mapping) or len(value) != 1 or not set(value) <= {"json", "regex", "choice", "grammar"}:
        raise Error(
            f"structured_outputs is {str(value)[:60]}; must be an object with one of json, regex, choice, grammar"
        )
    (kind, what), *_ = value.items()
    where = f"structured_outputs.{kind}"
    if kind == "json" and isinstance(what, Mapping | bool):
        with _named(where):
            check_size(what)
            return json_value(what)
    if kind == "regex" and isinstance(what, str):
        with _named(where):
            return {"type": "regex", "pattern": without_marks(what)}
    if kind == "choice" and isinstance(what, list) and what and all(isinstance(each, str) for each in what):
        with _named(where):
            check_size(what)
            for each in what:
                check_plain(each)
        return one_of([constant(each) for each in what])
    if kind == "grammar" and isinstance(what, str):
        return {"type": "grammar", "grammar": what}
    raise Error(
        f"{where} is {str(what)[:60]!r}; allowed: a schema for json, a text for regex and grammar, texts for choice"
    )


def _some(calls: list[Format], parallel: bool) -> Format:
    if not calls:
        return constant("")
    return {"type": "plus", "content": one_of(calls)} if parallel else one_of(calls)


def _call_k3(tool: Mapping[str, Any]) -> Format:
    name = tool["function"]["name"]
    return sequence(
        constant(f'{OPEN}call tool="{name}" index="'),
        {"type": "regex", "pattern": "[1-9][0-9]?"},
        constant(f'"{SEP}'),
        _parameters(tool, arguments),
        constant(f"{CLOSE}call{SEP}"),
    )


def _call_k2(tool: Mapping[str, Any]) -> Format:
    name = tool["function"]["name"]
    return sequence(
        constant(f"{K2['<|tool_call_begin|>']}functions.{name}:"),
        {"type": "regex", "pattern": "[0-9]{1,3}"},
        constant(K2["<|tool_call_argument_begin|>"]),
        _parameters(tool, json_value),
        constant(K2["<|tool_call_end|>"]),
    )


def _parameters(tool: Mapping[str, Any], follow: Any) -> Format:
    function = tool["function"]
    schema = function.get("parameters")
    with _named(f"tools[{function['name']}].function.parameters"):
        out: Format = follow({"type": "object", "properties": {}} if schema is None else schema)
    return out


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Errors about a schema begin with the field that holds it."""
    try:
        yield
    except Error as error:
        raise Error(f"{where}: {error}") from None


__all__ = ["Tools", "answer_k2", "answer_k3", "body_format"]
