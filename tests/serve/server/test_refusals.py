"""What is wrong with a request is a 400 that names the field, in the shape of the API's errors; never a 500."""

from __future__ import annotations

import gc
import json
import random
import re
import socket
import threading
from typing import Any

import httpx
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from serving import serving

from perilune.chat import Tokenizer
from perilune.serve.server import ServerConfig, wire
from perilune.serve.server.anthropic_in import CountTokens, Messages
from perilune.serve.server.schema import Chat, Completion, Detokenize, Strict, Tokenize

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "q"}


def tool(name: Any = "f", **extra: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **extra}}


def declaring(*tools: Any, **extra: Any) -> list[Any]:
    return [{"role": "system", "tools": list(tools), **extra}, USER]


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
# (what the body has beside one user message, the field that the error names)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [{**USER, "tools": [tool()]}]}, "messages[0].tools"),
    ({"messages": [USER, {"role": "assistant", "content": "x", "tools": [tool()]}]}, "messages[1].tools"),
    ({"messages": declaring(tool(), content="x")}, "messages[0].content"),
    ({"messages": declaring({"function": {"name": "f"}})}, "messages[0].tools[0].type"),
    ({"messages": declaring({"type": "function"})}, "messages[0].tools[0].function"),
    ({"messages": declaring({"type": "function", "function": {}})}, "messages[0].tools[0].function.name"),
    ({"messages": declaring(tool("1bad_name"))}, "messages[0].tools[0].function.name"),
    ({"messages": declaring(tool("bad@name"))}, "messages[0].tools[0].function.name"),
    ({"messages": declaring(tool(""))}, "messages[0].tools[0].function.name"),
    ({"messages": declaring(tool("a" * 257))}, "messages[0].tools[0].function.name"),
    ({"messages": declaring(tool("f"), {**tool("g"), "type": "web"})}, "messages[0].tools[1].type"),
    ({"messages": [{"role": "system", "tools": {"f": 1}}, USER]}, "messages[0].tools"),
    ({"messages": declaring("f")}, "messages[0].tools[0]"),
    ({"messages": declaring(tool(), tool())}, "messages[0].tools[1].function.name"),
    ({"messages": [*declaring(tool()), *declaring(tool())]}, "messages[2].tools[0].function.name"),
    ({"messages": declaring(tool()), "tools": [tool()]}, "messages[0].tools[0].function.name"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": "always", "tools": [tool()]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool()]}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function", "function": {"name": []}}, "tools": [tool()]}, "tool_choice.function.name"),
    ({"tool_choice": "the engine has failed", "tools": [tool()]}, "tool_choice"),
    ({"tool_choice": "the engine is being drained", "tools": [tool()]}, "tool_choice"),
    ({"tool_choice": "x" * 100_000, "tools": [tool()]}, "tool_choice"),
    ({"reasoning_effort": "medium"}, "reasoning_effort"),
    ({"thinking": {"type": "enabled", "effort": "huge"}}, "thinking.effort"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "keep": "some"}}, "thinking.keep"),
    ({"thinking": "yes"}, "thinking"),
    ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": [1]}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": 1}}},
        "response_format.json_schema.strict",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "structural_tag", "format": {"type": "nothing"}}}, "response_format"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs"),
    ({"structured_outputs": {"$ref": "#"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": SCHEMA}, "structured_outputs"),
    ({"response_format": SCHEMA, "min_tokens": 2}, "min_tokens"),
    (
        {"tools": [tool(parameters={"properties": {"a": {"$ref": "#/$defs/no"}}})], "tool_choice": "required"},
        "tools[f].function.parameters",
    ),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "user", "content": "word " * 40_000}]}, "messages"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"seed": 2**64}, "seed"),
    ({"priority": 1}, "priority"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"cache_salt": "x" * 300}, "cache_salt"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[f"{i}-{param}" for i, (_, param) in enumerate(WRONG)])
def test_a_wrong_field_is_named(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = client.post(CHAT, json={"messages": [USER], **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert param.split(".")[-1].split("[")[0] in error["message"]
    assert len(error["message"]) <= 1000


RIGHT: list[dict[str, Any]] = [
    {"messages": declaring(tool())},
    {"messages": [USER, *declaring(tool("f"), tool("g"), tool("h"))], "tools": [tool("e")]},
    {"messages": [USER, {"role": "system", "tools": [tool()]}]},
    {"messages": declaring({"type": "function", "function": {"name": "f"}}), "tool_choice": "required"},
    {"messages": declaring(tool(strict=False))},
    {"tool_choice": "none"},
    {"tool_choice": "auto"},
    {"reasoning_effort": "low", "thinking": {"type": "enabled", "effort": "max", "keep": "all"}},
    {"reasoning_effort": "none"},
    {"response_format": {"type": "text"}},
    {"response_format": {**SCHEMA, "json_schema": {**SCHEMA["json_schema"], "strict": True}}},
    {"temperature": 0.6, "thinking": False, "top_p": 0.95, "presence_penalty": 0, "frequency_penalty": 0, "n": 1},
    {"temperature": 0.0},
    {"user": "somebody", "metadata": {"a": "b"}, "store": True, "unknown": [1]},
    {"messages": [USER, {"role": "assistant", "content": "x", "reasoning_content": "y"}, USER]},
]


@pytest.mark.parametrize("fields", RIGHT, ids=[",".join(each) for each in RIGHT])
def test_what_is_allowed_is_answered(client: httpx.Client, fields: dict[str, Any]) -> None:
    response = client.post(CHAT, json={"messages": [USER], "max_tokens": 2, **fields})
    assert response.status_code == 200, response.text


def test_thinking_effort_wins_over_reasoning_effort(client: httpx.Client) -> None:
    body = {"messages": [USER], "reasoning_effort": "low", "thinking": {"type": "enabled", "effort": "max"}}
    assert "thinking_effort=max" in client.post(f"{CHAT}/render", json=body).json()["text"]
    off = client.post(f"{CHAT}/render", json={"messages": [USER], "reasoning_effort": "none"}).json()["text"]
    assert off.endswith("<|open|>response<|sep|>")


def test_the_policy_of_the_vendor() -> None:
    config = ServerConfig(request_policy="kimi", default_thinking_effort="max", drain_seconds=2)
    with serving(config) as url, httpx.Client(base_url=url, timeout=60) as client:
        for fields in ({}, {"temperature": 0.6, "thinking": False}, {"temperature": 1.0, "top_p": 0.95}, {"n": 1}):
            assert client.post(CHAT, json={"messages": [USER], "max_tokens": 1, **fields}).status_code == 200
        for field, value in (
            *(("temperature", t) for t in (1.1, 2.0, -0.1)),
            *(("top_p", 0.8), ("presence_penalty", 0.5), ("frequency_penalty", 0.5), ("n", 2)),
        ):
            response = client.post(CHAT, json={"messages": [USER], field: value})
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert "thinking_effort=max" in client.post(f"{CHAT}/render", json={"messages": [USER]}).json()["text"]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"", "application/json", 400),
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"messages": "\xff"}', "application/json", 400),
        (b'{"messages": ' + b"[" * 100_000, "application/json", 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "application/json", 400),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "application/json", 400),
        (b'{"temperature": NaN, "messages": []}', "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"{}", None, 415),
    ],
    ids=["empty", "cut", "list", "no-utf8", "deep", "surrogate", "long-number", "nan", "text", "no-kind"],
)
def test_bodies_that_are_no_request(client: httpx.Client, body: bytes, kind: str | None, status: int) -> None:
    for path in (CHAT, "/v1/completions", "/v1/messages", "/tokenize", "/detokenize"):
        response = client.post(path, content=body, headers={} if kind is None else {"content-type": kind})
        assert response.status_code == status, response.text
        assert response.json()["error"]["message"]


def test_paths_and_methods_that_are_not_there(client: httpx.Client) -> None:
    for response, status in ((client.get("/nothing"), 404), (client.get(CHAT), 405), (client.post("/health"), 405)):
        assert response.status_code == status
        assert response.json()["error"]["type"]
    response = client.post(CHAT, json={"model": "other", "messages": [USER]})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


def test_a_schema_that_nothing_satisfies_is_refused_not_failed(client: httpx.Client) -> None:
    for schema in ({"enum": []}, {"type": "string", "minLength": 5, "maxLength": 2}, {"type": "object", "required": 3}):
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        response = client.post(CHAT, json={"messages": [USER], "response_format": format, "max_tokens": 50})
        assert response.status_code in (200, 400), response.text
        parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        fields = {"tools": [tool(parameters=parameters)], "tool_choice": "required", "max_tokens": 50}
        response = client.post(CHAT, json={"messages": [USER], **fields})
        assert response.status_code in (200, 400), response.text


def test_a_body_of_many_parts_is_read_without_collecting_garbage() -> None:
    """Which would walk all parts again and again, while nobody else is served."""
    phases: list[str] = []
    gc.callbacks.append(lambda phase, info: phases.append(phase))
    try:
        gc.collect()
        phases.clear()
        wire.parsed(Chat, b'{"messages": [' + b"[]," * 300_000 + b"[]]}")
        assert phases.count("stop") <= 1  # the one that was due, afterwards
        with pytest.raises(ValidationError):
            wire.parsed(Chat, b"{")
    finally:
        gc.callbacks.pop()
    assert gc.isenabled()


@pytest.mark.parametrize("model", [Chat, Completion, Tokenize, Detokenize, Messages, CountTokens])
def test_a_body_of_many_errors_is_refused_for_the_first(model: type[Strict]) -> None:
    """8 MB have room for millions, and all of them were made into objects while nobody else was served."""
    missing = sum(field.is_required() for field in model.model_fields.values())
    for name in model.model_fields:
        for many in ([[]] * 1000, {str(i): [] for i in range(1000)}):
            found = list[ValidationError]()
            try:
                wire.parsed(model, json.dumps({name: many}).encode())
            except ValidationError as problem:
                found.append(problem)
            assert all(each.error_count() <= missing + 2 for each in found), name  # two: a union has two branches
            assert all(len(wire._wrong(each).message) < 200 for each in found)


def test_an_answer_is_one_line_however_lines_are_read() -> None:
    """Clients that split as `str.splitlines` does would find half an event."""
    text = "".join(map(chr, range(0x3000)))
    head, *rest = wire.event({"a": text}).decode().splitlines()
    assert rest == [""]
    assert json.loads(head.removeprefix("data: ")) == {"a": text}


def test_large_bodies_are_worked_on_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizing 8 MB takes seconds, in which nobody else would be served."""
    threads: list[str] = []
    for name in ("encode", "decode"):
        real = getattr(Tokenizer, name)

        def seen(self: Tokenizer, what: Any, *more: Any, real: Any = real, **options: Any) -> Any:
            if len(what) > 10_000:
                threads.append(threading.current_thread().name)
            return real(self, what, *more, **options)

        monkeypatch.setattr(Tokenizer, name, seen)
    long = "word " * 8_000
    talk = {"model": "tiny", "messages": [{"role": "user", "content": long}]}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": long}),
        ("/tokenize", talk),
        ("/detokenize", {"tokens": [300] * 20_000}),
        (f"{CHAT}/render", talk),
        (CHAT, talk),
        ("/v1/completions", {"prompt": long}),
        ("/v1/messages", {**talk, "max_tokens": 1}),
        ("/v1/messages/count_tokens", talk),
    ]
    config = ServerConfig(model_names=("tiny",), max_model_len=1000, drain_seconds=2)
    with serving(config) as url, httpx.Client(base_url=url, timeout=60) as client:
        for number, (path, fields) in enumerate(asked, start=1):
            assert client.post(path, json=fields).status_code in (200, 400)
            assert len(threads) >= number, path
    assert "perilune-server" not in threads


def test_grammars_are_made_beside_the_event_loop(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema of 7 kB may take 2 s, in which nobody else would be served."""
    threads: list[str] = []
    made = xgrammar.Grammar.from_json_schema

    def seen(*schemas: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return made(*schemas, **options)

    monkeypatch.setattr(xgrammar.Grammar, "from_json_schema", seen)
    talk = {"model": "tiny", "messages": [USER], "max_tokens": 1}
    schema = {"type": "object", "properties": {"a": {"type": "object"}}}
    asked: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {**talk, "tools": [tool(parameters=schema)], "tool_choice": "required"}),
        (CHAT, {**talk, "messages": declaring(tool(parameters=schema, strict=True))}),
        (CHAT, {**talk, "response_format": SCHEMA}),
        (CHAT, {**talk, "structured_outputs": {"json": schema}}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "response_format": SCHEMA}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": schema}}),
        ("/v1/messages", {**talk, "tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}}),
        ("/v1/messages", {**talk, "output_config": {"format": {"type": "json_schema", "schema": schema}}}),
    ]
    for number, (path, fields) in enumerate(asked, start=1):
        response = client.post(path, json=fields)
        assert response.status_code == 200, response.text
        assert len(threads) >= number, path
    assert "perilune-server" not in threads


def test_bytes_that_are_no_http_harm_nobody(keyed: str) -> None:
    host, port = keyed.removeprefix("http://").split(":")
    draw = random.Random(0)
    seeds = [b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{}", b"GET / HTTP/9.9\r\n\r\n"]
    for i in range(40):
        raw = bytearray(seeds[i % 2])
        for _ in range(draw.randrange(1, 12)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(bytes(raw))
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert not answer or not re.match(rb"HTTP/1.1 5", answer), (raw, answer)
    assert httpx.get(f"{keyed}/health", timeout=60).status_code == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
SEEDS: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "system", "content": "s"},
            USER,
            {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ]},
            {"role": "tool", "tool_call_id": "a", "content": "x"},
        ],
        "tools": [tool(parameters={"type": "object", "properties": {"a": {"type": "string"}}})],
        "tool_choice": "auto", "response_format": SCHEMA, "temperature": 0.5, "top_p": 0.9, "n": 1, "stop": ["x"],
        "logprobs": True, "top_logprobs": 1, "logit_bias": {"1": 1}, "seed": 1, "thinking": True, "stream": False,
        "stream_options": {"include_usage": True}, "chat_template_kwargs": {"thinking": True},
    },
    "/v1/completions": {
        "prompt": "a", "echo": True, "logprobs": 1, "n": 1, "stop": "x", "stream": False, "suffix": None, "best_of": 1,
        "structured_outputs": {"choice": ["a", "b"]}, "prompt_logprobs": 1, "stop_token_ids": [1], "min_tokens": 0,
    },
    "/v1/messages": {
        "model": "tiny", "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "a", "name": "f", "input": {}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"}, "stop_sequences": ["x"], "temperature": 0.1, "stream": False,
        "output_config": {"effort": "low"},
    },
    "/tokenize": {"messages": [USER], "prompt": None, "tools": None},
    "/detokenize": {"tokens": [1, 2]},
}  # fmt: skip


@st.composite
def bent(draw: st.DrawFn, value: Any) -> Any:
    """A value with one place inside replaced, removed or added."""
    if isinstance(value, (dict, list)) and value and draw(st.integers(0, 3)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw(st.sampled_from(keys))
        copy = value.copy()
        copy[key] = draw(bent(value[key]))
        return copy
    if isinstance(value, dict) and draw(st.booleans()):
        return {**value, draw(st.text(max_size=8)): draw(json_values)}
    return draw(json_values)


@settings(max_examples=60)
@given(data=st.data(), path=st.sampled_from(sorted(SEEDS)), stream=st.booleans())
def test_a_fuzzed_body_is_never_a_500(client: httpx.Client, data: st.DataObject, path: str, stream: bool) -> None:
    body = data.draw(bent(SEEDS[path]))
    if isinstance(body, dict) and "completions" in path + "/messages":
        body.setdefault("max_tokens", 2)
        if stream:
            body["stream"] = True
    response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    assert "unexpected" not in response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


header_bytes = st.binary(max_size=40).map(lambda raw: bytes(c for c in raw if c >= 32 and c != 127).strip())


@settings(max_examples=40)
@given(
    name=st.sampled_from(["authorization", "x-api-key", "x-request-id", "content-type", "accept", "traceparent"]),
    value=header_bytes,
)
def test_a_fuzzed_header_is_never_a_500(keyed: str, name: str, value: bytes) -> None:
    headers = [(b"authorization", b"Bearer key-of-alice"), (b"content-type", b"application/json")]
    headers = [pair for pair in headers if pair[0] != name.encode()] + [(name.encode(), value)]
    response = httpx.post(f"{keyed}/tokenize", content=b'{"prompt": "a"}', headers=headers, timeout=60)
    assert response.status_code in (200, 400, 401, 415), response.text
