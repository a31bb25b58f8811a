"""The public clients, `openai` and `anthropic`, against a real server with a tiny random model."""

from __future__ import annotations

import asyncio
import json

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict
from serving import serving, towards_ends

from perilune.serve.server import ServerConfig

USER = [{"role": "user", "content": "Say something."}]
QUIET = {"thinking": False}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def url():
    with serving() as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=110, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(url):
    with anthropic.Anthropic(base_url=url, api_key="none", timeout=110, max_retries=0) as made:
        yield made


# --- openai


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize("thinking", [True, False])
def test_a_stream_says_what_the_whole_answer_says(client, thinking):
    request = {"model": "tiny", "messages": USER, "max_tokens": 40, "seed": 3, "extra_body": {"thinking": thinking}}
    whole = client.chat.completions.create(**request)
    message = whole.choices[0].message
    content, reasoning, finished, usage = "", "", [], None
    for chunk in client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        assert chunk.id
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            finished += [choice.finish_reason] if choice.finish_reason else []
    assert content == (message.content or "")
    assert reasoning == (getattr(message, "reasoning_content", None) or "")
    assert bool(reasoning) == thinking
    assert finished == [whole.choices[0].finish_reason]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(usage, name) == getattr(whole.usage, name)


def test_the_clients_own_stream_helper(client):
    """It puts chunks together and raises for any that do not fit."""
    with client.chat.completions.stream(
        model="tiny",
        messages=USER,
        max_tokens=900,
        seed=1,
        extra_body=QUIET,
        logit_bias=towards_ends(),
        stream_options={"include_usage": True},
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == final.choices[0].message.content
    assert final.usage.completion_tokens <= 900


def test_logprobs_and_several_answers(client):
    answer = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=6, n=2, seed=1, logprobs=True, top_logprobs=3, extra_body=QUIET
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        for token in choice.logprobs.content:
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 3
            best = [top.logprob for top in token.top_logprobs]
            assert best == sorted(best, reverse=True)


def test_a_second_turn_is_served_from_the_cache(client):
    # Longer than the 64 tokens that the shortest hit has.
    first = [{"role": "user", "content": "A question that is long enough to be kept. " * 12}]
    request = {"model": "tiny", "max_tokens": 8, "seed": 5, "extra_body": QUIET}
    answer = client.chat.completions.create(messages=first, **request)
    again = [*first, {"role": "assistant", "content": answer.choices[0].message.content or "x"}, *USER]
    usage = client.chat.completions.create(messages=again, **request).usage
    assert usage.prompt_tokens_details.cached_tokens >= 64


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called_and_its_result_goes_back(client, choice):
    request = {"model": "tiny", "tools": [TOOL], "max_tokens": 900, "extra_body": QUIET, "logit_bias": towards_ends()}
    answer = client.chat.completions.create(messages=USER, tool_choice=choice, seed=2, **request)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    for call in message.tool_calls:
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    history = [*USER, message.model_dump(exclude_none=True), *results]
    following = client.chat.completions.create(messages=history, seed=2, **(request | {"max_tokens": 8}))
    assert following.usage.prompt_tokens > answer.usage.prompt_tokens


def test_the_helper_puts_streamed_calls_together(client):
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    with client.chat.completions.stream(
        model="tiny",
        messages=USER,
        tools=[strict],
        tool_choice="required",
        max_tokens=900,
        seed=4,
        extra_body=QUIET,
        logit_bias=towards_ends(),
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    assert [event.arguments for event in done] == [call.function.arguments for call in message.tool_calls]
    for call in message.tool_calls:
        jsonschema.validate(call.function.parsed_arguments, PARAMETERS)


class Trip(BaseModel):
    """What the structured answer must be."""

    model_config = ConfigDict(extra="forbid")

    days: int
    warm: bool
    tags: list[bool]


@pytest.mark.parametrize("thinking", [True, False])
def test_structured_output_is_parsed(client, thinking):
    answer = client.chat.completions.parse(
        model="tiny",
        messages=USER,
        response_format=Trip,
        max_tokens=900,
        seed=6,
        extra_body={"thinking": thinking},
        logit_bias=towards_ends(),
    )
    assert isinstance(answer.choices[0].message.parsed, Trip)
    schema = {"type": "json_schema", "json_schema": {"name": "t", "schema": Trip.model_json_schema()}}
    text = ""
    for chunk in client.chat.completions.create(
        model="tiny", messages=USER, response_format=schema, max_tokens=400, seed=7, stream=True, extra_body=QUIET
    ):
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
    Trip.model_validate_json(text)
    assert not set("\n\t") & set(text)


def test_completions(client):
    answer = client.completions.create(model="tiny", prompt=["def f(", "import "], max_tokens=5, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.completion_tokens <= 10
    pieces = client.completions.create(model="tiny", prompt="def f(", max_tokens=5, seed=1, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == answer.choices[0].text


def test_errors_have_their_classes(client):
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="tiny", messages=USER, temperature=-1)
    assert caught.value.body["param"] == "temperature"
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(model="nobody", messages=USER)
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.role"):
        client.chat.completions.create(model="tiny", messages=[{"role": "developer", "content": "x"}])


def test_keys():
    config = ServerConfig(model_names=("tiny",), api_keys=("right",), drain_seconds=2)
    with serving(config) as url:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(
                model="tiny", max_tokens=1, messages=USER
            )
        assert openai.OpenAI(base_url=f"{url}/v1", api_key="right").models.list().data
        anthropic.Anthropic(base_url=url, api_key="right").messages.create(model="tiny", max_tokens=1, messages=USER)


def test_sixteen_asynchronous_streams_keep_apart(url):
    async def go():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=100, max_retries=0) as client:

            async def alone(seed):
                answer = await client.chat.completions.create(
                    model="tiny", messages=USER, max_tokens=24, seed=seed, temperature=1.0, extra_body=QUIET
                )
                return answer.choices[0].message.content

            async def streamed(seed):
                text = ""
                stream = await client.chat.completions.create(
                    model="tiny", messages=USER, max_tokens=24, seed=seed, stream=True, extra_body=QUIET
                )
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                return text

            together = await asyncio.gather(*(streamed(seed) for seed in range(16)))
            return together, [await alone(seed) for seed in range(4)]

    together, alone = asyncio.run(go())
    assert len(set(together)) == 16
    # Other batches are other sums: one token near a tie may differ, four whole answers will not.
    assert sum(a == b for a, b in zip(together, alone, strict=False)) >= 2


def test_leaving_a_stream_frees_the_server(client):
    """Sixteen streams that are left at once, on eight slots: the next request is answered."""
    for seed in range(16):
        stream = client.chat.completions.create(
            model="tiny", messages=USER, max_tokens=20_000, seed=seed, stream=True, extra_body=QUIET
        )
        next(iter(stream))
        stream.close()
    assert client.chat.completions.create(model="tiny", messages=USER, max_tokens=2, extra_body=QUIET).choices


# --- anthropic


def test_a_message_and_its_stream(claude):
    request = {"model": "tiny", "max_tokens": 30, "system": "Be brief.", "messages": USER}
    answer = claude.messages.create(**request)
    assert answer.role == "assistant"
    assert answer.stop_reason in ("max_tokens", "end_turn")
    assert 0 < answer.usage.output_tokens <= 30
    with claude.messages.stream(**request) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(block.text for block in final.content if block.type == "text") == text
    assert final.usage.output_tokens <= 30
    assert claude.messages.count_tokens(model="tiny", system="Be brief.", messages=USER).input_tokens > 10


def test_thinking_blocks_go_back_as_they_came(claude):
    answer = claude.messages.create(
        model="tiny", max_tokens=1100, thinking={"type": "enabled", "budget_tokens": 1024}, messages=USER
    )
    assert answer.content[0].type == "thinking"
    history = [*USER, {"role": "assistant", "content": answer.content}, *USER]
    assert claude.messages.create(model="tiny", max_tokens=2, messages=history).usage.input_tokens > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_use_and_its_result(claude, streamed):
    tool = {"name": "get_weather", "description": "Weather.", "input_schema": PARAMETERS}
    request = {"model": "tiny", "max_tokens": 300, "tools": [tool], "messages": USER, "tool_choice": {"type": "any"}}
    if streamed:
        with claude.messages.stream(**request) as stream:
            answer = stream.get_final_message()
    else:
        answer = claude.messages.create(**request)
    uses = [block for block in answer.content if block.type == "tool_use"]
    assert uses
    assert answer.stop_reason in ("tool_use", "max_tokens")  # brought to its end before the last token
    for use in uses:
        jsonschema.validate(use.input, PARAMETERS)
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"} for use in uses]
    history = [*USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    following = claude.messages.create(model="tiny", max_tokens=4, tools=[tool], messages=history)
    assert following.usage.output_tokens <= 4


def test_errors_have_their_classes_there_too(claude):
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        claude.messages.create(model="tiny", max_tokens=3, messages=USER, stop_sequences=[""])
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        claude.messages.create(model="nobody", max_tokens=3, messages=USER)


def test_an_asynchronous_stream(url):
    async def go():
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
            client.messages.stream(model="tiny", max_tokens=12, messages=USER) as stream,
        ):
            kinds = [event.type async for event in stream]
            return kinds, await stream.get_final_message()

    kinds, final = asyncio.run(go())
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert final.usage.output_tokens <= 12
