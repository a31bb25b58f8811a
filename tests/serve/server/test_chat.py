"""/v1/chat/completions: what one answer holds, whole and as a stream; rendering and counts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import chat_model, serving, tiny_llm, tiny_tokenizer

from perilune import Transformer
from perilune.chat import Options, Tokenizer, parse, render
from perilune.model import initialize
from perilune.serve import LLM, EngineConfig
from perilune.serve.server import ServerConfig, build_app
from perilune.serve.server.run import running

DATA = Path(__file__).parents[2] / "data"
USER = {"role": "user", "content": "What is 2 + 2?"}
PATH = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"messages": [USER], "max_tokens": 24, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(client: httpx.Client, path: str = PATH, **body: Any) -> list[dict[str, Any]]:
    response = client.post(path, json={"messages": [USER], "max_tokens": 24, **body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that the chunks of one choice spell, its finish reason and log probabilities."""
    out: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "logprobs": [], "finish": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            out["content"] += delta.get("content") or ""
            out["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(out["tool_calls"]):
                    out["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                out["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            out["logprobs"] += (choice.get("logprobs") or {}).get("content", [])
            out["finish"] = choice["finish_reason"] or out["finish"]
    return out


@pytest.mark.parametrize("path", sorted((DATA / "chat").glob("*.json")), ids=lambda path: path.stem)
def test_goldens_render_equal_through_http(client: httpx.Client, path: Path) -> None:
    golden = json.loads(path.read_text(encoding="utf-8"))
    response = client.post(f"{PATH}/render", json=golden["request"])
    assert response.status_code == 200, response.text
    assert (response.json()["text"], response.json()["segments"]) == (golden["text"], golden["segments"])


def test_an_answer_is_what_the_engine_makes_of_the_rendered_prompt(client: httpx.Client) -> None:
    words = tiny_tokenizer()
    prompt, _ = words.encode_segments(render([USER]))
    (direct,) = tiny_llm().generate([prompt], max_tokens=24, temperature=0)
    answer = ask(client, temperature=0, return_token_ids=True)
    assert answer["prompt_token_ids"] == prompt
    assert answer["choices"][0]["token_ids"] == direct.tokens
    reply = parse(direct.text, Options(thinking=True, tools={}))
    assert answer["choices"][0]["message"].get("reasoning_content", "") == reply.reasoning
    assert answer["usage"] == {
        "prompt_tokens": len(prompt) - 3,
        "completion_tokens": len(direct.tokens),
        "total_tokens": len(prompt) - 3 + len(direct.tokens),
        "prompt_tokens_details": {"cached_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"]},
    }


@pytest.mark.parametrize("thinking", [True, False])
def test_a_stream_spells_the_whole_answer(client: httpx.Client, thinking: bool) -> None:
    fields = {"temperature": 0, "thinking": thinking, "logprobs": True, "top_logprobs": 2}
    answer = ask(client, **fields)
    whole = answer["choices"][0]
    chunks = stream(client, **fields, stream_options={"include_usage": True})
    got = joined(chunks)
    assert got["content"] == (whole["message"]["content"] or "")
    assert got["reasoning_content"] == whole["message"].get("reasoning_content", "")
    assert got["finish"] == whole["finish_reason"]
    assert [each["token"] for each in got["logprobs"]] == [each["token"] for each in whole["logprobs"]["content"]]
    assert all(len(each["top_logprobs"]) == 2 for each in got["logprobs"])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"] == len(got["logprobs"])
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_several_answers_have_seeds_of_their_own_and_come_again(client: httpx.Client) -> None:
    first, again = (ask(client, n=3, seed=7, return_token_ids=True)["choices"] for _ in range(2))
    tokens = [choice["token_ids"] for choice in first]
    assert [choice["index"] for choice in first] == [0, 1, 2]
    assert len({tuple(each) for each in tokens}) == 3
    assert tokens == [choice["token_ids"] for choice in again]
    chunks = stream(client, n=3, seed=7, thinking=True)
    for index in range(3):
        assert joined(chunks, index)["reasoning_content"] == first[index]["message"].get("reasoning_content", "")


def test_a_stop_text_ends_the_answer(client: httpx.Client) -> None:
    bias = {str(tiny_tokenizer().encode("a")[0]): 100.0}
    answer = ask(client, temperature=0, logit_bias=bias, stop=["aaa"], thinking=False)["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"], answer["stop_reason"]) == ("", "stop", "aaa")


def test_the_same_prompt_again_is_cached(client: httpx.Client) -> None:
    long = {"messages": [{"role": "user", "content": "cache me " * 60}]}
    first = ask(client, **long)["usage"]
    second = ask(client, **long)["usage"]
    assert first["prompt_tokens"] == second["prompt_tokens"] > 128
    assert second["prompt_tokens_details"]["cached_tokens"] >= 128


def test_prompt_logprobs(client: httpx.Client) -> None:
    answer = ask(client, prompt_logprobs=1, return_token_ids=True)
    scores, prompt = answer["prompt_logprobs"], answer["prompt_token_ids"]
    assert len(scores) == len(prompt)
    assert scores[0] is None
    assert all(str(token) in score for token, score in zip(prompt[1:], scores[1:], strict=True))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_forced_call_is_whole(client: httpx.Client, choice: Any, streamed: bool) -> None:
    fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 400, "thinking": False, "seed": 5}
    if streamed:
        got = joined(stream(client, **fields))
        calls = [(call["name"], call["arguments"]) for call in got["tool_calls"]]
    else:
        message = ask(client, **fields)["choices"][0]["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert calls
    assert len(calls) == 1 or choice == "required"
    for name, arguments in calls:
        value = json.loads(arguments)
        assert name == "weather"
        assert isinstance(value["city"], str)
        assert isinstance(value["days"], int)


def test_drafts_and_grammars_together() -> None:
    """Prompt lookup guesses what the grammar may forbid: what comes out is as without it."""
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": TOOL["function"]["parameters"]}}
    fields = {"max_tokens": 300, "thinking": False, "temperature": 0, "return_token_ids": True}
    tokens = []
    for drafts in (0, 4):
        with serving(drafts=drafts) as url, httpx.Client(base_url=url, timeout=60) as client:
            answer = ask(client, **fields, response_format=format)["choices"][0]
            assert json.loads(answer["message"]["content"]).keys() == {"city", "days"}
            forced = ask(client, **fields, tools=[TOOL], tool_choice="required")["choices"][0]
            assert forced["message"]["tool_calls"]
            tokens.append((answer["token_ids"], forced["token_ids"]))
    assert tokens[0] == tokens[1]


def test_arguments_stream_as_they_are_made(client: httpx.Client) -> None:
    fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 600, "thinking": False, "seed": 1}
    # About every twentieth token of a text ends it.
    fields["logit_bias"] = {str(tiny_tokenizer().specials["<|close|>"]): 3.0}
    chunks = stream(client, **fields)
    calls = [call for chunk in chunks for c in chunk["choices"] for call in c["delta"].get("tool_calls", ())]
    assert sum("id" in call for call in calls) >= 1
    assert max(len(call["function"]["arguments"]) for call in calls) < 20 < len(calls)


def test_a_schema_rules_the_answer(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    for format in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}},
    ):
        for thinking in (False, True):
            answer = ask(client, response_format=format, max_tokens=200, thinking=thinking)["choices"][0]
            content = answer["message"]["content"]
            assert not set("\n\t") & set(content)
            assert isinstance(json.loads(content), dict)
    assert isinstance(json.loads(content)["ok"], bool)


def test_other_structures(client: httpx.Client) -> None:
    for fields, expected in (
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"structured_outputs": {"regex": "[ab]"}}, ("a", "b")),
        ({"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "q"}}}, ("q",)),
    ):
        content = ask(client, **fields, thinking=False, max_tokens=100)["choices"][0]["message"]["content"]
        assert content in expected


def test_tool_choice_none_shows_no_call(client: httpx.Client) -> None:
    message = ask(client, tools=[TOOL], tool_choice="none")["choices"][0]["message"]
    assert "tool_calls" not in message


def test_published_counts_through_http() -> None:
    """The counts that the vendor expects, with the released vocabulary and a random model over it."""
    cases = json.loads((DATA / "tokenizer" / "prompt_tokens.json").read_text(encoding="utf-8"))
    words = Tokenizer.load(DATA / "tokenizer" / "kimi.tiktoken.model")
    config = dataclasses.replace(chat_model().config, vocab_size=words.vocab_size, eos_token_id=words.eos_id)
    llm = LLM(initialize(Transformer(config), 0), EngineConfig(20_000_000, slots=4), tokenizer=words)
    with running(build_app(ServerConfig(), llm)) as url, httpx.Client(base_url=url, timeout=60) as client:
        answers = [client.post(PATH, json={**case["request"], "max_tokens": 1}).json() for case in cases]
        forced = ask(client, tools=[TOOL], tool_choice="required", max_tokens=100, thinking=False)
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [36, 119, 99]
    assert [case["prompt_tokens"] for case in cases] == [36, 119, 99]
    assert json.loads(forced["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]).keys() == {
        "city",
        "days",
    }


def test_calls_of_a_conversation_have_ids_of_their_own(client: httpx.Client) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    fields = {"messages": messages, "tools": [TOOL], "tool_choice": "required", "max_tokens": 400, "thinking": False}
    assert ask(client, **fields)["choices"][0]["message"]["tool_calls"][0]["id"] == "functions.weather:1"
