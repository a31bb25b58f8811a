"""Grammars of answers: what random tokens under the mask spell is always what was asked for."""

from __future__ import annotations

import asyncio
import json
import random
import re
from contextlib import suppress
from functools import lru_cache
from typing import Any

import jsonschema
import pytest
import torch
import xgrammar
from serving import tiny_tokenizer

from perilune import Error
from perilune.chat import Options, Reply, Tokenizer, declared, parse
from perilune.chat.specials import K2
from perilune.serve.server.grammar import Grammars
from perilune.serve.server.marks import RESERVED, without_marks
from perilune.serve.server.schemas import check_size
from perilune.serve.server.structure import answer_k2, answer_k3, body_format


@lru_cache
def k2_tokenizer() -> Tokenizer:
    """The tiny vocabulary with the K2 family's special tokens."""
    words = tiny_tokenizer()
    first = min(words.specials.values())
    return Tokenizer(words._bpe, {name: first + i for i, name in enumerate(K2.values())})


@lru_cache
def grammars(family: str) -> Grammars:
    words = tiny_tokenizer() if family == "k3" else k2_tokenizer()
    return Grammars(words, words.vocab_size)


def walk(family: str, format: Any, seed: int, most: int = 700, close: float = 0.05) -> tuple[str, str]:
    """Random tokens that the mask allows, one in twenty of them the most closing one: (text, why it ended)."""
    ours, words = grammars(family), tiny_tokenizer() if family == "k3" else k2_tokenizer()
    mask = ours.mask(asyncio.run(ours.compile(format)), 3, most)
    draw, tokens = random.Random(seed), [0, 0, 0]
    closing = [i for name in ("<|close|>", "<|tool_call_end|>") for i in [words.specials.get(name)] if i is not None]
    while len(tokens) < most + 3:
        bits = mask(tokens)
        allowed = (bits.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)).bitwise_and(1).flatten().nonzero()
        ids = allowed.flatten().tolist()
        if not ids:
            return words.decode(tokens[3:]), "stuck"
        ends = [id for id in closing if id in ids]
        tokens.append(draw.choice(ends) if ends and draw.random() < close else draw.choice(ids))
        if tokens[-1] == words.eos_id:
            return words.decode(tokens[3:-1]), "end"
    return words.decode(tokens[3:]), "length"


def tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def calls(family: str, schema: Any, seed: int, **fields: Any) -> Reply:
    answer = answer_k3 if family == "k3" else answer_k2
    text, why = walk(family, answer(False, None, [tool(schema)], "required", True), seed)
    assert why == "end", text
    name = "kimi_k3" if family == "k3" else "kimi_k2"
    return parse(text, Options(thinking=False, tools=declared([tool(schema)])), name)


SCHEMAS: dict[str, Any] = {
    "nothing": {},
    "empty": {"type": "object", "properties": {}},
    "strings": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["b"]},
    "kinds": {
        "type": "object",
        "properties": {
            "i": {"type": "integer", "minimum": -3, "maximum": 40},
            "n": {"type": "number"},
            "b": {"type": "boolean"},
            "z": {"type": "null"},
            "l": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "o": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
        "required": ["i", "n", "b", "z", "l", "o"],
    },
    "unions": {
        "type": "object",
        "properties": {
            "u": {"type": ["string", "null"]},
            "e": {"enum": ["x", " y", 3, None, '"&<']},
            "c": {"const": "fixed"},
            "a": {"anyOf": [{"type": "integer"}, {"type": "string", "enum": ["one", "two"]}]},
        },
        "required": ["u", "e", "c", "a"],
    },
    "lengths": {
        "type": "object",
        "properties": {
            "p": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 4},
            "q": {"type": "string", "pattern": "^(ab|c[0-9.])$"},
            "m": {"type": "string", "minLength": 2},
        },
        "required": ["p", "q", "m"],
    },
    "refs": {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {}}}},
        "type": "object",
        "properties": {"node": {"$ref": "#/$defs/node"}, "again": {"$ref": "#/properties/node"}},
        "required": ["node"],
    },
    "itself": {"type": "object", "properties": {"inner": {"$ref": "#"}, "v": {"type": "integer"}}, "required": ["v"]},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "any of": {
        "anyOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
        ]
    },
    "odd keys": {
        "type": "object",
        "properties": {" ": {"type": "string"}, 'a"&<b': {"type": "integer"}, "键": {"type": "boolean"}},
        "required": [" ", 'a"&<b', "键"],
    },
    "no object": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
}  # fmt: skip


@pytest.mark.parametrize("family", ["k3", "k2"])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_arguments_follow_their_schema(family: str, schema: Any) -> None:
    for seed in range(4):
        reply = calls(family, schema, seed)
        assert reply.tool_calls
        for call in reply.tool_calls:
            assert (call.name, call.complete) == ("f", True)
            jsonschema.Draft202012Validator(schema).validate(json.loads(call.arguments))


@pytest.mark.parametrize("family", ["k3", "k2"])
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("use", ["none", "optional", "required"])
@pytest.mark.parametrize("kind", [None, "json_schema", "json_object"])
def test_channels_come_in_their_order(family: str, thinking: bool, use: Any, kind: str | None) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    response = None if kind is None else {"type": kind, "json_schema": {"name": "x", "schema": schema}}
    answer = answer_k3 if family == "k3" else answer_k2
    tools = [tool(schema), tool({"type": "object", "properties": {}})]
    tools[1]["function"]["name"] = "g"
    format = answer(thinking, body_format(response, None), tools if use != "none" else [], use, True)
    called = 0
    for seed in range(5):
        text, why = walk(family, format, seed)
        assert why == "end", text
        reply = parse(text, Options(thinking=thinking, tools=declared(tools)), f"kimi_{family}")
        called += bool(reply.tool_calls)
        assert (use != "required") or reply.tool_calls
        assert all(call.complete for call in reply.tool_calls)
        if kind is not None and use != "required" and not reply.tool_calls:
            assert isinstance(json.loads(reply.content), dict)
            assert not set("\n\t") & set(reply.content)
        for marker in ("<|open|>", "<|close|>", "<|sep|>", "<|tool_call", "think>"):
            assert marker not in reply.content + reply.reasoning
    assert called == {"none": 0, "required": 5}.get(use, called)


def test_one_call_only_where_calls_may_not_be_parallel() -> None:
    format = answer_k3(False, None, [tool({"type": "object", "properties": {}})], "required", False)
    for seed in range(5):
        text, _ = walk("k3", format, seed)
        assert len(parse(text, Options(thinking=False)).tool_calls) == 1


def test_an_answer_ends_before_its_last_token_and_says_so() -> None:
    """Texts without an end are cut where the grammar allows it: what was asked for is whole."""
    format = answer_k3(True, None, [tool(SCHEMAS["strings"])], "required", True)
    for most in (300, 500):
        text, why = walk("k3", format, 1, most, close=0.0)
        assert why == "end"
        (call, *_) = parse(text, Options(thinking=True)).tool_calls
        assert json.loads(call.arguments)["b"] is not None


def test_drafts_that_were_wrong_are_forgotten() -> None:
    ours, words = grammars("k3"), tiny_tokenizer()
    format = answer_k3(False, {"type": "const_string", "value": "abc"}, [], "none", True)
    compiled = asyncio.run(ours.compile(format))
    drafted, plain = ours.mask(compiled, 0, 50), ours.mask(compiled, 0, 50)
    a, b, c, x = (words.encode(letter)[0] for letter in "abcx")
    assert not drafted([x]).eq(plain([])).all()  # a token that cannot be: nothing behind it matters
    for tokens in ([a, b, c], [a], [a, b], [a, x], [a, b, x], [a, b, c]):
        if x not in tokens:
            assert drafted(tokens).eq(ours.mask(compiled, 0, 50)(tokens)).all()
        else:
            drafted(tokens)


def test_a_grammar_that_another_thread_has_made_forgotten_is_given_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is remembered is cleared when it is full, by any of the threads that compile."""

    class Forgetful(dict[bytes, Any]):
        def __setitem__(self, name: bytes, value: Any) -> None:
            pass

    ours = grammars("k3")
    monkeypatch.setattr(ours, "_known", Forgetful())
    assert ours.compiled({"type": "const_string", "value": "ab"}).reserve > 64


def test_drafts_behind_the_end_are_forgotten_with_it() -> None:
    """Prompt lookup copies what came after a turn's end: the mask of what came instead is as without drafts."""
    ours, words = grammars("k3"), tiny_tokenizer()
    compiled = ours.compiled({"type": "sequence", "elements": [{"type": "const_string", "value": "ab"}]})
    a, b = (words.encode(letter)[0] for letter in "ab")
    drafted = ours.mask(compiled, 0, 10_000)
    for drafts in ([], [a], [a, b], [a, b, words.eos_id], [a, b, words.eos_id, a, b, a, a]):
        drafted(drafts)
        for committed in ([], [a], [a, b]):
            assert drafted(committed).eq(ours.mask(compiled, 0, 10_000)(committed)).all()
            drafted(drafts)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}},
        {"type": "object", "properties": {"a": {"$ref": "http://elsewhere"}}},
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
        {"type": "object", "properties": {"a": 3}},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 5, "maxLength": 2}}},
        {"type": "array", "items": {"type": "nothing"}},
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_followed_is_an_error(schema: Any) -> None:
    with pytest.raises(Error, match=r"tools\[f\].function.parameters: schema cannot be followed"):
        answer_k3(False, None, [tool(schema)], "required", True)


KEYWORDS = (
    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "properties", "required", "additionalProperties"),
    *("patternProperties", "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern"),
    *("format", "minimum", "maximum", "multipleOf", "minProperties", "$defs", "not"),
)
ODD = (None, True, 3, -1, 1.5, 10**30, "x", "#", "(", [], [3], [{}], [None], {}, {"x": 3}, {"enum": 3})


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_an_odd_keyword_is_followed_or_an_error(keyword: str) -> None:
    for value in ODD:
        for beside in ({}, {"type": "string"}, {"type": "object", "properties": {"b": {}}, "required": ["b"]}):
            schema = {**beside, keyword: value}
            for part in (schema, {"properties": {"a": schema}}, {"allOf": [schema, {"properties": {"b": {}}}]}):
                for family in (answer_k3, answer_k2):
                    with suppress(Error):
                        family(False, None, [tool(part)], "required", True)


def chain(last: int) -> dict[str, Any]:
    """References that spell 2 ** last schemas."""
    twice = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(last)}
    return {"$ref": "#/$defs/d0", "$defs": {**twice, f"d{last}": {"type": "object"}}}


def branches(last: int) -> dict[str, Any]:
    parts = {
        f"d{i}": {"properties": {key: {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for key in "ab"}} for i in range(last)
    }
    return {"allOf": [{"$ref": "#/$defs/d0"}], "$defs": {**parts, f"d{last}": {}}}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (chain(28), "over 10000 parts"),
        (branches(28), "over 10000 parts"),
        ({"properties": {f"p{i}": {} for i in range(1001)}}, "1001 properties"),
        ({"properties": {f"p{i}": {"items": {"$ref": "#"}} for i in range(700)}}, "over 2000000 characters"),
    ],
    ids=["chain", "branches", "properties", "references"],
)
def test_a_small_schema_of_a_large_grammar_is_an_error(schema: Any, said: str) -> None:
    with pytest.raises(Error, match=said):
        answer_k3(False, None, [tool(schema)], "required", True)
    if "parts" in said:
        with pytest.raises(Error, match=said):
            answer_k2(False, None, [tool(schema)], "required", True)


def test_schemas_have_a_size() -> None:
    check_size([{"enum": [*range(9_999)]}])
    for large in ({"enum": [*range(10_001)]}, {"a": [[{}] * 2_501, [{}] * 2_501]}):
        with pytest.raises(Error, match=r"schema cannot be followed: it has \d+ .*; allowed: up to \d+"):
            check_size(large)


@pytest.mark.parametrize("text", ["\x02", "a<|close|>b", "<|im_end|>", "</think>"])
def test_a_text_that_holds_a_marker_is_refused(text: str) -> None:
    """A parser would end the value, or the whole call, there."""
    for schema in (
        {"properties": {text: {}}},
        *({"properties": {"a": part}} for part in ({"enum": [text]}, {"const": text})),
    ):
        with pytest.raises(Error, match="which the chat format reserves"):
            answer_k3(False, None, [tool(schema)], "required", True)
    with pytest.raises(Error, match=r"structured_outputs.choice: .* reserves"):
        body_format(None, {"choice": ["a", text]})


PATTERNS = (
    r".+",
    r"\S+",
    r"\D+",
    r"\W+",
    r"[\s\S]+",
    r"[\w\W]+",
    r"[^a]+",
    r"[\S ]+",
    r"[\x00-\x7f]+",
    r"[\0-\u00ff]+",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_text_and_no_marker(pattern: str) -> None:
    grammar = grammars("k3").compiled({"type": "regex", "pattern": without_marks(pattern)})
    for text in ("!", "! ", "\x01", "\x02", "!\x07"):
        allowed = re.fullmatch(pattern, text) is not None and not set(text) & set(RESERVED)
        assert xgrammar.GrammarMatcher(grammar.compiled).accept_string(text) == allowed, text


@pytest.mark.parametrize("pattern", ["\x02", r"a\x02", r"\u0003", r"\cA", "[\x01\x02]", r"[\x01-\x07]"])
def test_a_pattern_that_needs_a_marker_is_refused(pattern: str) -> None:
    with pytest.raises(Error, match=r"pattern .* reserves"):
        without_marks(pattern)


@pytest.mark.parametrize("pattern", [r"a\.c", "[.]", r"[a-z\d_-]{1,3}", r"^\d{3}-\w+$", "[-+]"])
def test_other_patterns_stay_as_they_are(pattern: str) -> None:
    assert without_marks(pattern) == pattern
