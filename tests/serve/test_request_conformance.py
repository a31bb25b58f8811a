"""What Moonshot's vendor tests ask of a Kimi-K3 service, with the `openai` client: the live rules, one test each.

Its prompt counts (36 and 119 tokens) are in server/test_chat.py, its schemas in test_tool_schemas.py.
"""

from __future__ import annotations

import json

import openai
import pytest
from serving import serving, towards_ends

from perilune.serve.server import ServerConfig

USER = {"role": "user", "content": "go"}
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def client():
    config = ServerConfig(model_names=("kimi-k3",), request_policy="kimi", drain_seconds=2)
    with (
        serving(config) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0) as made,
    ):
        yield made


def ask(client, messages=(USER,), max_tokens=2, **fields):
    """An answer; fields that the client does not know go into the body as they are."""
    known = {"tools", "tool_choice", "temperature", "top_p", "n", "presence_penalty", "frequency_penalty"}
    known |= {"response_format", "seed", "logit_bias", "reasoning_effort"}
    extra = {name: value for name, value in fields.items() if name not in known}
    fields = {name: value for name, value in fields.items() if name in known}
    return client.chat.completions.create(
        model="kimi-k3", messages=list(messages), max_tokens=max_tokens, extra_body=extra, **fields
    )


def tool(name="f", **function):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **function}}


def declares(*tools, **more):
    return {"role": "system", "tools": list(tools), **more}


NESTED = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "array"}}}}}
RIGHT = {
    "dynamic tools alone": {"messages": [declares(tool()), USER]},
    "later in the conversation": {"messages": [USER, {"role": "assistant", "content": "x"}, declares(tool()), USER]},
    "as the last message": {"messages": [USER, declares(tool())]},
    "three in one message": {"messages": [declares(tool("a"), tool("b"), tool("c")), USER]},
    "two messages": {"messages": [declares(tool("a")), declares(tool("b")), USER]},
    "a nested schema": {"messages": [declares(tool(parameters=NESTED)), USER]},
    "strict false": {"messages": [declares(tool(strict=False)), USER]},
    "beside global tools": {"messages": [declares(tool("a")), USER], "tools": [tool("b")]},
    "without parameters": {"messages": [declares({"type": "function", "function": {"name": "f"}}), USER]},
    "only dynamic and required": {"messages": [declares(tool()), USER], "tool_choice": "required"},
    "choice auto": {"tools": [tool()], "tool_choice": "auto"},
    "choice none": {"tools": [tool()], "tool_choice": "none"},
    "choice none without tools": {"tool_choice": "none"},
    "choice auto without tools": {"tool_choice": "auto"},
    "no optional parameter": {},
    "temperature 0.6 without thinking": {"temperature": 0.6, "thinking": {"type": "disabled"}},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 0": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top_p 0.95": {"top_p": 0.95},
    "penalties 0, n 1": {"presence_penalty": 0, "frequency_penalty": 0, "n": 1},
    **{f"effort {effort}": {"reasoning_effort": effort} for effort in ("low", "high", "max")},
    "format text": {"response_format": {"type": "text"}},
    "format json_object": {"response_format": {"type": "json_object"}},
    **{
        f"format json_schema, strict {strict}": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": strict}}
        }
        for strict in (True, False)
    },
}


@pytest.mark.parametrize("fields", RIGHT.values(), ids=RIGHT)
def test_accepted(client, fields):
    answer = ask(client, **fields)
    assert answer.usage.prompt_tokens > 0


def schema(**spec):
    return {"response_format": {"type": "json_schema", "json_schema": spec}}


BARE = {"type": "function", "function": {"parameters": {}}}
WRONG = {
    "tools in a user message": ({"messages": [{**USER, "tools": [tool()]}]}, "messages[0].tools"),
    "tools in an assistant message": (
        {"messages": [{"role": "assistant", "content": "x", "tools": [tool()]}, USER]},
        "messages[0].tools",
    ),
    "content beside tools": ({"messages": [declares(tool(), content="x"), USER]}, "messages[0].content"),
    "no type": ({"messages": [declares({"function": {"name": "f"}}), USER]}, "messages[0].tools[0].type"),
    "no function": ({"messages": [declares({"type": "function"}), USER]}, "messages[0].tools[0].function"),
    "no name": ({"messages": [declares(BARE), USER]}, "messages[0].tools[0].function.name"),
    **{
        f"name {name[:12]!r}": ({"messages": [declares(tool(name)), USER]}, "messages[0].tools[0].function.name")
        for name in ("1bad_name", "bad@name", "", "a" * 257)
    },
    "another type": ({"messages": [declares({**tool(), "type": "web"}), USER]}, "messages[0].tools[0].type"),
    "one of two of another type": (
        {"messages": [declares(tool("a"), {**tool("b"), "type": "bogus"}), USER]},
        "messages[0].tools[1].type",
    ),
    "tools no list": ({"messages": [{"role": "system", "tools": {"a": 1}}, USER]}, "messages[0].tools"),
    "a tool no object": ({"messages": [declares("f"), USER]}, "messages[0].tools[0]"),
    "a name twice in one message": (
        {"messages": [declares(tool(), tool()), USER]},
        "messages[0].tools[1].function.name",
    ),
    "a name twice in two messages": (
        {"messages": [declares(tool()), declares(tool()), USER]},
        "messages[1].tools[0].function.name",
    ),
    "a name that is global": (
        {"messages": [declares(tool()), USER], "tools": [tool()]},
        "messages[0].tools[0].function.name",
    ),
    "a result of no call": ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    "required without tools": ({"tool_choice": "required"}, "tool_choice"),
    "required with no tool": ({"tool_choice": "required", "tools": []}, "tool_choice"),
    "choice of an unknown word": ({"tool_choice": "perhaps", "tools": [tool()]}, "tool_choice"),
    "an unknown format": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "no json_schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "no schema name": (schema(schema=SCHEMA), "response_format.json_schema.name"),
    "no schema": (schema(name="n"), "response_format.json_schema.schema"),
    "strict no boolean": (schema(name="n", schema=SCHEMA, strict="yes"), "response_format.json_schema.strict"),
    "schema no object": (schema(name="n", schema="x"), "response_format.json_schema.schema"),
    **{f"temperature {value}": ({"temperature": value}, "temperature") for value in (1.1, 2.0, -0.1)},
    "top_p 0.8": ({"top_p": 0.8}, "top_p"),
    "presence penalty": ({"presence_penalty": 0.5}, "presence_penalty"),
    "frequency penalty": ({"frequency_penalty": 0.5}, "frequency_penalty"),
    "n 2": ({"n": 2}, "n"),
}


@pytest.mark.parametrize(("fields", "param"), WRONG.values(), ids=WRONG)
def test_refused_with_the_field_named(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.status_code == 400
    assert caught.value.body["param"] == param, caught.value.body


def test_thinking_is_on_and_its_text_is_apart(client):
    message = ask(client, max_tokens=12).choices[0].message
    assert message.reasoning_content
    assert not message.content


def test_thinking_effort_wins_over_reasoning_effort(client):
    def rendering(**body):
        path = "/chat/completions/render"
        return client.post(path, body={"messages": [USER], **body}, cast_to=object)["text"]

    assert "thinking_effort=low" in rendering(thinking={"type": "enabled", "effort": "low"}, reasoning_effort="max")
    assert "thinking_effort=high" in rendering(reasoning_effort="high")


@pytest.mark.parametrize("stream", [False, True])
def test_output_of_a_schema_is_one_line_of_json(client, stream):
    fields = {"max_tokens": 900, "seed": 1, "logit_bias": towards_ends(), **schema(name="n", schema=SCHEMA)}
    if stream:
        chunks = client.chat.completions.create(
            model="kimi-k3",
            messages=[USER],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"thinking": False},
            **fields,
        )
        pieces = [*chunks]
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert pieces[-1].usage.prompt_tokens > 0  # the usage at the top level, last
    else:
        text = ask(client, thinking=False, **fields).choices[0].message.content
    assert isinstance(json.loads(text)["a"], int)
    assert not set("\n\t\r") & set(text)
