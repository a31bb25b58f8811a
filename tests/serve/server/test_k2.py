"""A model of the K2 family behind the same endpoints: its own rendering, markers and parser."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import httpx
import pytest
from serving import chat_model
from test_chat import TOOL, USER, ask, joined, stream
from test_grammar import k2_tokenizer

from perilune import Transformer
from perilune.chat import render_k2
from perilune.model import initialize
from perilune.serve import LLM, EngineConfig
from perilune.serve.server import ServerConfig, build_app
from perilune.serve.server.run import running


@pytest.fixture(scope="module")
def k2() -> Iterator[httpx.Client]:
    from models import tiny_config

    words = k2_tokenizer()
    config = dataclasses.replace(
        tiny_config("kimi_linear"), vocab_size=words.vocab_size, max_position_embeddings=32_768
    )
    llm = LLM(initialize(Transformer(config), 0), EngineConfig(20_000_000, slots=4), tokenizer=words)
    assert chat_model().config.family != llm.engine.model.config.family
    app = build_app(ServerConfig(drain_seconds=2), llm)
    with running(app) as url, httpx.Client(base_url=url, timeout=110) as client:
        yield client


def test_the_prompt_is_rendered_for_the_family_and_counted_whole(k2: httpx.Client) -> None:
    words = k2_tokenizer()
    for thinking in (False, True):
        prompt, _ = words.encode_segments(render_k2([USER], [TOOL], thinking))
        answer = ask(k2, tools=[TOOL], thinking=thinking, return_token_ids=True)
        assert answer["prompt_token_ids"] == prompt
        assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert ask(k2, return_token_ids=True)["prompt_token_ids"] == words.encode_segments(render_k2([USER]))[0]


@pytest.mark.parametrize("thinking", [True, False])
def test_a_forced_call_keeps_the_id_of_the_model(k2: httpx.Client, thinking: bool) -> None:
    fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "thinking": thinking, "seed": 3}
    message = ask(k2, **fields)["choices"][0]["message"]
    for call in message["tool_calls"]:
        assert call["id"].startswith("functions.weather:")
        assert json.loads(call["function"]["arguments"]).keys() == {"city", "days"}
    assert "<|" not in (message["content"] or "") + message.get("reasoning_content", "")
    got = joined(stream(k2, **fields))
    assert [(call["id"], call["arguments"]) for call in got["tool_calls"]] == [
        (call["id"], call["function"]["arguments"]) for call in message["tool_calls"]
    ]


def test_a_schema_rules_the_answer(k2: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    content = ask(k2, response_format=format, max_tokens=100)["choices"][0]["message"]["content"]
    assert isinstance(json.loads(content)["ok"], bool)
