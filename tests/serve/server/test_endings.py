"""The end of an answer that is short of tokens: patterns are completed wherever they are cut."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grammar import tool, walk

from perilune.chat import Options, declared, parse
from perilune.serve.server.endings import ends
from perilune.serve.server.structure import answer_k2, answer_k3, body_format

PATTERNS = (
    r"[a-z]+-[a-z]+",
    r"[0-9,]+ EUR",
    r".*END",
    r"[^@\n]+@[^@\n]+\.com",
    r"([a-z]+-){3}x",
    r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}",
    r"(ab|c[0-9.]|d+e)+x?",
    r"\"[^\"\n]*\"x",
    r"\S+ \W\D",
    r"(?:a{2,4}|[^a]{3})b*?c",
    r"[一-龥]{2}。",
    r"x*",
)


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=25)
@given(data=st.data())
def test_every_beginning_of_a_match_is_completed_by_an_end(pattern: str, data: st.DataObject) -> None:
    """Compared with Python's own matching of whole texts."""
    text = data.draw(st.from_regex(pattern, fullmatch=True))
    found = ends(pattern)
    for cut in range(len(text) + 1):
        assert any(re.fullmatch(pattern, text[:cut] + end) for end in found), text[:cut]


@pytest.mark.parametrize(
    "pattern", [r"(a)\1", r"(?=a)b", r"\ba", "(", "[a-z]{5000}", "((a{200}){200}){200}", "a" * 2000]
)
def test_what_has_no_ends_or_too_many_has_none(pattern: str) -> None:
    assert ends(pattern) <= {""} | ({"a"} if pattern == r"\ba" else set())


RAW = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


@pytest.mark.parametrize("family", ["k3", "k2"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("pattern", ["^[a-z]+-[a-z]+$", "^[0-9,]+ EUR$", "^.*END$", "^([a-z]+-){3}x$"])
def test_arguments_with_a_pattern_are_whole_at_max_tokens(family: str, inside: bool, pattern: str) -> None:
    """Raw texts of Kimi-K3 and JSON texts; nobody ends a value before the mask does."""
    text: dict[str, Any] = {"type": "string", "pattern": pattern}
    if inside:
        text = {"type": "object", "properties": {"t": text}, "required": ["t"]}
    schema = {**RAW, "properties": {**RAW["properties"], "a": text}}
    answer = answer_k3 if family == "k3" else answer_k2
    spoken, why = walk(family, answer(False, None, [tool(schema)], "required", False), 1, 200, close=0.0)
    assert why == "end", spoken
    (call,) = parse(spoken, Options(False, tools=declared([tool(schema)])), f"kimi_{family}").tool_calls
    assert call.complete
    jsonschema.Draft202012Validator(schema).validate(json.loads(call.arguments))


def test_a_response_with_a_pattern_is_whole_at_max_tokens() -> None:
    for pattern in PATTERNS[:8]:
        body = body_format(None, {"regex": pattern})
        text, why = walk("k3", answer_k3(False, body, [], "none", True), random.Random(pattern).randrange(9), 200, 0.0)
        assert why == "end", text
        assert re.fullmatch(pattern, parse(text, Options(thinking=False)).content), text
