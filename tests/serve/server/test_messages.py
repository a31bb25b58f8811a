"""/v1/messages: Anthropic's shapes, and that the prompt is that of the same conversation in OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

PATH = "/v1/messages"
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
TALK: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief."}],
    "tools": [TOOL],
    "messages": [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "why", "signature": "s"},
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "toolu_2", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "two"},
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "one"}]},
                {"type": "text", "text": "go on"},
            ],
        },
    ],
}
SAME = {
    "tools": [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": TOOL["input_schema"]}},
    ],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "ok",
            "reasoning_content": "why",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
                {"id": "toolu_2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_2", "content": "two"},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "one"},
        {"role": "user", "content": "go on"},
    ],
}


def ask(client: httpx.Client, **body: Any) -> httpx.Response:
    fields = {"model": "tiny", "max_tokens": 16, "messages": [{"role": "user", "content": "q"}], **body}
    return client.post(PATH, json=fields)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    out = []
    for block in filter(None, response.text.split("\n\n")):
        name, data = block.split("\n")
        out.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {out[-1]['type']}"
    return out


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 2000}, {"type": "disabled"}, None])
def test_the_prompt_is_that_of_the_same_conversation(client: httpx.Client, thinking: Any) -> None:
    on = thinking is not None and thinking["type"] == "enabled"
    same = client.post("/v1/chat/completions/render", json={**SAME, "thinking": on}).json()
    counted = client.post(f"{PATH}/count_tokens", json={"model": "tiny", **TALK, "thinking": thinking}).json()
    assert counted == {"input_tokens": same["prompt_tokens"]}
    usage = ask(client, **TALK, thinking=thinking).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == same["prompt_tokens"]


def test_an_answer_and_its_stream(client: httpx.Client) -> None:
    fields = {"temperature": 0.0, "thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 24}
    whole = ask(client, **fields).json()
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "tiny")
    assert whole["stop_reason"] in ("end_turn", "max_tokens")
    got = events(ask(client, **fields, stream=True))
    assert [got[0]["type"], got[-2]["type"], got[-1]["type"]] == ["message_start", "message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    for each in got:
        if each["type"] == "content_block_start":
            assert each["index"] == len(blocks)
            blocks.append(each["content_block"])
        elif each["type"] == "content_block_delta":
            delta = each["delta"]
            key = {"thinking_delta": "thinking", "text_delta": "text", "signature_delta": "signature"}[delta["type"]]
            blocks[each["index"]][key] += delta[key]
    assert blocks == whole["content"]
    assert got[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert got[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
def test_a_forced_tool_use(client: httpx.Client, choice: Any) -> None:
    tool = {**TOOL, "input_schema": {**TOOL["input_schema"], "required": ["x"]}}
    fields = {"tools": [tool], "tool_choice": choice, "max_tokens": 220}
    uses = [block for block in ask(client, **fields).json()["content"] if block["type"] == "tool_use"]
    assert isinstance(uses[0]["input"]["x"], int)
    assert uses[0]["id"].startswith("toolu_")
    got = events(ask(client, **fields, stream=True))
    starts = [
        e["index"] for e in got if e["type"] == "content_block_start" and e["content_block"]["type"] == "tool_use"
    ]
    parts = [e["delta"]["partial_json"] for e in got if e["type"] == "content_block_delta" and e["index"] == starts[0]]
    assert isinstance(json.loads("".join(parts))["x"], int)


@pytest.mark.parametrize("where", ["system", "tools", "messages", None])
def test_cache_control_leaves_a_checkpoint(client: httpx.Client, where: str | None) -> None:
    """The second request shares what was marked and nothing after it; unmarked, only a third one would hit."""
    mark = {"cache_control": {"type": "ephemeral"}}
    shared = f"{where} is what all requests of this test begin with. " * 8

    def usage(question: str) -> dict[str, Any]:
        marked = {key: mark if key == where else {} for key in ("system", "tools", "messages")}
        first = {"type": "text", "text": shared if where == "messages" else question, **marked["messages"]}
        talk = [
            {"role": "user", "content": [first]},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": question},
        ]
        system = shared if where in ("system", None) else f"of {where}"
        fields: dict[str, Any] = {"system": [{"type": "text", "text": system, **marked["system"]}], "messages": talk}
        if where == "tools":
            fields["tools"] = [{**TOOL, "description": shared, **mark}]
            fields["system"] = question
        found: dict[str, Any] = ask(client, **fields, max_tokens=1).json()["usage"]
        return found

    # Other tests may have left the words before a tool's name.
    before = usage("first " * 30)["cache_read_input_tokens"]
    cached = usage("other " * 30)["cache_read_input_tokens"]
    assert cached >= before + 128 if where else cached == before


def test_a_stop_sequence_is_named(client: httpx.Client) -> None:
    words = client.post("/tokenize", json={"prompt": "e", "add_special_tokens": False}).json()["tokens"]
    assert len(words) == 1
    # Random weights say everything: one of these comes soon.
    answer = ask(client, stop_sequences=["a", "e", "i", "o", "t", "n", "s", "r"], max_tokens=400).json()
    if answer["stop_reason"] == "stop_sequence":
        assert answer["stop_sequence"] in "aeiotnsr"
        assert answer["stop_sequence"] not in "".join(block.get("text", "") for block in answer["content"])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages[1].role"),
        ({"system": 3}, "system"),
        ({"tools": [{"name": "9", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search", "name": "f"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"thinking": {"type": "some"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"effort": []}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"enum": []}}}}, "output_config.format.schema"),
        ({"tool_choice": {"type": "tool", "name": "no"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": []}}, "tool_choice.name"),
        ({"tools": {}}, "tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": [], "input": {}}]}
                ]
            },
            "messages[0].content[0].name",
        ),
        ({"temperature": 1.5}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_field_is_named(client: httpx.Client, fields: dict[str, Any], named: str) -> None:
    response = ask(client, **fields)
    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith(named), error


def test_the_model_must_be_here(client: httpx.Client) -> None:
    response = ask(client, model="claude")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


def test_a_schema_for_the_output(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    config = {"format": {"type": "json_schema", "schema": schema}}
    content = ask(client, output_config=config, max_tokens=200).json()["content"]
    assert isinstance(json.loads(content[-1]["text"])["a"], bool)
