"""Rendering against the released renderer's output, the loss mask, and every refusal."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune import Error
from perilune.chat import Segment, join, render

GOLDENS = sorted((Path(__file__).parents[1] / "data" / "chat").glob("*.json"))

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "r"}
USER = {"role": "user", "content": "q"}


def tool(name="f", **extra):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **extra}}


def by_model(segments):
    """The loss-counted stretches, joined: one string a stretch."""
    stretches, previous = [], False
    for segment in segments:
        if segment.by_model:
            stretches = [*stretches[:-1], stretches[-1] + segment.text] if previous else [*stretches, segment.text]
        previous = segment.by_model
    return stretches


def test_goldens_are_there():
    assert len(GOLDENS) == 19


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_golden(path):
    golden = json.loads(path.read_text(encoding="utf-8"))
    segments = render(**golden["request"])
    assert [[segment.text, segment.special] for segment in segments] == golden["segments"]
    assert join(segments) == golden["text"]


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_without_the_generation_prefix_no_more_than_the_prefix_is_missing(path):
    request = json.loads(path.read_text(encoding="utf-8"))["request"]
    full, bare = render(**request), render(**request, add_generation_prompt=False)
    assert full[: len(bare)] == bare
    prefix = join(full[len(bare) :])
    channel = "think" if request.get("thinking", True) else "response"
    assert prefix == f'<|open|>message role="assistant"<|sep|><|open|>{channel}<|sep|>'
    assert not any(segment.by_model for segment in full[len(bare) :])


def test_loss_mask_is_what_the_model_writes_after_the_generation_prefix():
    messages = [
        {"role": "system", "content": "s"},
        USER,
        {"role": "assistant", "reasoning_content": "why", "content": "ok", "tool_calls": [CALL]},
        RESULT,
        {"role": "assistant", "name": "n", "content": "done"},
    ]
    first = (
        "why<|close|>think<|sep|><|open|>response<|sep|>ok<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="number"<|sep|>1<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    second = (
        "<|close|>think<|sep|><|open|>response<|sep|>done<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    assert by_model(render(messages, tools=[tool()])) == [first, second]
    direct = render(messages, tools=[tool()], thinking=False)
    assert by_model(direct)[1] == "done<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


def test_arguments_that_are_no_json_are_not_trained_on():
    broken = {"id": "a", "function": {"name": "f", "arguments": "{oops"}}
    segments = render([USER, {"role": "assistant", "content": "", "tool_calls": [broken]}])
    assert Segment("{oops", False, False) in segments
    assert "json" not in "".join(by_model(segments))


def test_the_prefix_of_a_turn_equals_the_generation_prefix():
    """What is masked out before a trained turn is exactly what serving puts there."""
    history = [USER, {"role": "assistant", "content": "x", "reasoning_content": "y"}]
    for thinking in (True, False):
        trained = render(history, thinking=thinking, add_generation_prompt=False)
        served = render(history[:1], thinking=thinking)
        start = next(i for i, segment in enumerate(trained) if segment.by_model)
        assert trained[:start] == served


@given(st.permutations(range(5)))
def test_results_follow_the_order_of_their_calls(order):
    calls = [{"id": f"c{i}", "function": {"name": f"f{i}", "arguments": "{}"}} for i in range(5)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"r{i}"} for i in range(5)]
    head = [USER, {"role": "assistant", "content": None, "tool_calls": calls}]
    assert render([*head, *(results[i] for i in order)]) == render([*head, *results])


def test_a_run_with_an_unknown_id_keeps_its_order():
    calls = [{"id": i, "function": {"name": f"f{i}"}} for i in "ab"]
    results = [{"role": "tool", "tool_call_id": i, "content": f"r{i}"} for i in "zb"]
    text = join(render([USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]))
    assert '<|open|>message role="tool" tool="fa" index="1"<|sep|>rz' in text
    assert '<|open|>message role="tool" tool="fb" index="2"<|sep|>rb' in text


def test_a_result_without_any_call_is_refused():
    with pytest.raises(Error, match=r"messages\[1\]\.tool_call_id is 'a'"):
        render([USER, RESULT])


def test_ids_may_repeat_in_later_turns():
    other = {"id": "a", "function": {"name": "g"}}
    messages = [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT]
    text = join(render([*messages, {"role": "assistant", "tool_calls": [other]}, RESULT]))
    assert 'tool="f" index="1"<|sep|>r<' in text
    assert 'tool="g" index="1"<|sep|>r<' in text


@pytest.mark.parametrize("value", ["", "x", "北京", 3, -0.5, True, None, [1, "a"], {"k": [None]}])
def test_argument_types(value):
    names = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null", list: "array"}
    call = {"id": "a", "function": {"name": "f", "arguments": json.dumps({"v": value})}}
    text = join(render([USER, {"role": "assistant", "tool_calls": [call]}]))
    shown = value if isinstance(value, str) else json.dumps(value)
    type_ = names.get(type(value), "object")
    assert f'<|open|>argument key="v" type="{type_}"<|sep|>{shown}<|close|>argument<|sep|>' in text


def test_effort_is_left_out_without_thinking_or_when_none():
    assert "thinking-effort" not in join(render([USER]))
    assert "thinking-effort" not in join(render([USER], thinking=False, thinking_effort="max"))
    for effort in ("low", "high", "max"):
        assert f"`thinking_effort={effort}`" in join(render([USER], thinking_effort=effort))


def test_accepted_requests():
    dynamic = {"role": "system", "content": "", "tools": [tool()]}
    render([USER, dynamic])
    render([dynamic, {"role": "system", "tools": [tool("g"), tool("h", strict=False)]}, USER])
    render([dynamic, USER], tools=[tool("g")], tool_choice="required")
    render([dynamic, USER], tool_choice={"type": "function", "function": {"name": "f"}})
    render([{"role": "system", "tools": [{"type": "function", "function": {"name": "no_parameters"}}]}, USER])
    render([USER], tool_choice="none")
    render([USER], tool_choice="auto", tools=[])
    render([USER], response_format={"type": "text"})
    render([USER], tools=[tool("a" * 256)])
    render([{"role": "assistant", "content": "x", "refusal": None, "audio": None, "annotations": []}, USER])


NESTED = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


def schema(**change):
    spec = {key: value for key, value in {**NESTED["json_schema"], **change}.items() if value is not None}
    return {"response_format": {"type": "json_schema", "json_schema": spec}}


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("messages is empty", {"messages": []}),
        ("messages is of type str", {"messages": "hi"}),
        ("messages[0] is of type str", {"messages": ["hi"]}),
        ("messages[0].role", {"messages": [{"role": "developer", "content": "x"}]}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
        ("messages[0].content", {"messages": [{"role": "assistant"}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("messages[0].content[0]", {"messages": [{"role": "user", "content": ["x"]}]}),
        ("messages[0].name", {"messages": [{**USER, "name": 3}]}),
        ("messages[0].tool_calls", {"messages": [{**USER, "tool_calls": [CALL]}]}),
        ("messages[0].partial", {"messages": [{"role": "assistant", "content": "x", "partial": True}]}),
        ("messages[0].function_call", {"messages": [{"role": "assistant", "content": "x", "function_call": {"a": 1}}]}),
        ("messages[0].reasoning_content", {"messages": [{"role": "assistant", "content": "", "reasoning_content": 3}]}),
        ("messages[0].tool_calls", {"messages": [{"role": "assistant", "tool_calls": "x"}]}),
        ("messages[0].tool_calls[0]", {"messages": [{"role": "assistant", "tool_calls": ["x"]}]}),
        ("messages[0].tool_calls[0].function", {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}),
        (
            "messages[0].tool_calls[0].function.name",
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}]},
        ),
        (
            "messages[0].tool_calls[0].function.arguments",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
        ),
        ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[0].tools", {"messages": [{**USER, "tools": [tool()]}]}),
        ("messages[0].tools", {"messages": [{"role": "assistant", "content": "x", "tools": [tool()]}]}),
        ("messages[0].content", {"messages": [{"role": "system", "content": "x", "tools": [tool()]}]}),
        ("messages[0].tools", {"messages": [{"role": "system", "tools": {"type": "function"}}]}),
        ("messages[0].tools[0]", {"messages": [{"role": "system", "tools": [None]}]}),
        ("tools[0].type", {"tools": [{"function": {"name": "f"}}]}),
        ("tools[1].type", {"tools": [tool(), {"type": "bogus", "function": {"name": "g"}}]}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
        ("tools[0].function.name", {"tools": [tool("1bad_name")]}),
        ("tools[0].function.name", {"tools": [tool("bad@name")]}),
        ("tools[0].function.name", {"tools": [tool("")]}),
        ("tools[0].function.name", {"tools": [tool("a" * 257)]}),
        ("tools[0].function.name", {"tools": [tool("newline\n")]}),
        ("tools[0].function.parameters", {"tools": [tool(parameters=[])]}),
        ("tools[0].function.strict", {"tools": [tool(strict="yes")]}),
        ("tools[0] cannot be written as JSON", {"tools": [tool(description="x", default=float("nan"))]}),
        ("tools[1].function.name", {"tools": [tool(), tool()]}),
        (
            "messages[1].tools[0].function.name",
            {"messages": [{"role": "system", "tools": [tool()]}, {"role": "system", "tools": [tool()]}]},
        ),
        (
            "messages[0].tools[0].function.name",
            {"messages": [{"role": "system", "tools": [tool()]}], "tools": [tool()]},
        ),
        ("tool_choice is 'required'", {"tool_choice": "required"}),
        ("tool_choice is 'required'", {"tool_choice": "required", "tools": []}),
        ("tool_choice is 'any'", {"tool_choice": "any", "tools": [tool()]}),
        ("tool_choice.type", {"tool_choice": {"type": "x"}, "tools": [tool()]}),
        (
            "tool_choice.function.name",
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool()]},
        ),
        ("thinking_effort", {"thinking_effort": "medium"}),
        ("thinking_effort", {"thinking_effort": ""}),
        ("thinking_effort", {"thinking_effort": "huge", "thinking": False}),
        ("response_format is of type str", {"response_format": "json_object"}),
        ("response_format.type", {"response_format": {"type": "bogus"}}),
        ("response_format.json_schema is missing", {"response_format": {"type": "json_schema"}}),
        ("response_format.json_schema.name", schema(name=None)),
        ("response_format.json_schema.schema", schema(schema="x")),
        ("response_format.json_schema.schema", {"response_format": {**NESTED, "json_schema": {"name": "n"}}}),
        ("response_format.json_schema.strict", schema(strict="yes")),
    ],
)
def test_refusals_name_the_field_in_one_line(field, request_):
    with pytest.raises(Error) as caught:
        render(**{"messages": [USER], **request_})
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_request_is_not_changed():
    messages = [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT]
    before = json.dumps(messages)
    render(messages, tools=[tool()])
    assert json.dumps(messages) == before
