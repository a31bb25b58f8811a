"""tool_choice required with the vendor's schemas and a model that babbles: the grammar alone makes arguments valid.

CI takes every tenth schema, whole and streamed, and biases the model towards ends, so that it babbles for less long;
`pytest -m slow` takes all 106, thinking and not, without the bias.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI
from serving import serving, towards_ends

FILE = Path(__file__).parents[1] / "data" / "tool-schemas" / "valid.jsonl"
SCHEMAS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
TOKENS = 1024  # of an answer; the vendor's test allows 2048
AT_ONCE = 8


async def whole(client: AsyncOpenAI, request: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(id, name, arguments) of every call."""
    answer = await client.chat.completions.create(**request)
    (choice,) = answer.choices
    assert choice.message.tool_calls, f"no call: {choice.message.content!r}, {choice.finish_reason}"
    return [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls]


async def streamed(client: AsyncOpenAI, request: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The same from a stream: ids and names come once, with the first piece of a call."""
    calls: dict[int, list[str]] = {}
    finished = []
    async for chunk in await client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            finished += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                if call.index not in calls:
                    assert call.index == len(calls)
                    assert call.id
                    assert call.function.name
                    calls[call.index] = [call.id, call.function.name, ""]
                else:
                    assert call.id is None
                calls[call.index][2] += call.function.arguments or ""
    assert len(finished) == 1
    return [(id_, name, arguments) for id_, name, arguments in calls.values()]


def check(calls: list[tuple[str, str, str]], schema: dict[str, Any]) -> None:
    """At least one call, of the tool, with ids that differ, each with valid arguments."""
    assert calls
    assert len({id_ for id_, _, _ in calls}) == len(calls)
    for _, name, arguments in calls:
        assert name == "f"
        # Not `validate`: that refuses a schema whose own $id is no plain reference, which two of them have.
        validator = jsonschema.validators.validator_for(schema)
        problems = [error.message for error in validator(schema).iter_errors(json.loads(arguments))]
        assert not problems, (arguments, problems)


async def every(
    url: str, schemas: list[tuple[int, dict[str, Any]]], stream: bool, thinking: bool, bias: dict[str, float]
) -> list[str]:
    """What is wrong with the answers for these schemas, some of them at once."""
    gate, wrong = asyncio.Semaphore(AT_ONCE), []

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=400, max_retries=0) as client:

        async def one(number: int, schema: dict[str, Any]) -> None:
            request = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "go"}],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
                "tool_choice": "required",
                "max_tokens": TOKENS,
                "seed": number,
                "logit_bias": bias,
                "extra_body": {"thinking": thinking, "thinking_effort": None},
            }
            async with gate:
                try:
                    check(await (streamed if stream else whole)(client, request), schema)
                except Exception as problem:
                    wrong.append(f"{number} {json.dumps(schema)[:200]}: {type(problem).__name__} {str(problem)[:400]}")

        await asyncio.gather(*(one(number, schema) for number, schema in schemas))
    return wrong


@pytest.fixture(scope="module")
def url():
    with serving(slots=AT_ONCE) as address:
        yield address


def test_the_schemas_are_all_there():
    assert len(SCHEMAS) == 106


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_sample(url, stream):
    sample = [(number, SCHEMAS[number]) for number in range(2 + stream, len(SCHEMAS), 10)]
    assert asyncio.run(every(url, sample, stream, False, towards_ends())) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("thinking", [False, True], ids=["", "thinking"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_schema(url, stream, thinking):
    assert asyncio.run(every(url, [*enumerate(SCHEMAS)], stream, thinking, {})) == []
