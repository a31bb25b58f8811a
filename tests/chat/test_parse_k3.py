"""Kimi-K3 output parsing: round trips with rendering, every cut of every output, and known malformations."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from cuts import in_order
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from perilune import Error
from perilune.chat import (
    CallArguments,
    CallEnd,
    CallStart,
    Options,
    Reply,
    Stream,
    ToolCall,
    collect,
    declared,
    join,
    parse,
    parser,
    render,
)

GOLDENS = sorted((Path(__file__).parents[1] / "data" / "chat").glob("*.json"))
MARKS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

K3 = parser("kimi_k3")


def opened(tag, **attributes):
    return f"<|open|>{tag}" + "".join(f' {key}="{value}"' for key, value in attributes.items()) + "<|sep|>"


def closed(tag):
    return f"<|close|>{tag}<|sep|>"


def argument(key, value, type_="string"):
    return opened("argument", key=key, type=type_) + value + closed("argument")


def call(name, *arguments, index=1):
    return opened("call", tool=name, index=index) + "".join(arguments) + closed("call")


END = closed("message") + "<|end_of_msg|>"
THINK_END, RESPONSE, RESPONSE_END = closed("think"), opened("response"), closed("response")
TOOLS, TOOLS_END = opened("tools"), closed("tools")


def streamed(pieces, options=None):
    """The events of an output that comes in these pieces."""
    stream = Stream(K3, options or Options())
    events = [event for piece in pieces for event in stream.push(piece)]
    return events + stream.finish()


def cut(text, places):
    edges = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def check_every_cut(text, options=None):
    """One piece, single characters and every two pieces give the same reply; returns it."""
    whole = parse(text, options)
    assert collect(streamed(text, options)) == whole
    for place in range(len(text)):
        assert collect(streamed([text[:place], text[place:]], options)) == whole
    return whole


def assistant_turns():
    for path in GOLDENS:
        request = json.loads(path.read_text(encoding="utf-8"))["request"]
        for message in request["messages"]:
            if message["role"] == "assistant":
                yield pytest.param(message, request.get("thinking", True), id=path.stem)


@pytest.mark.parametrize(("message", "thinking"), list(assistant_turns()))
def test_a_rendered_turn_comes_back(message, thinking):
    segments = render([message], thinking=thinking, add_generation_prompt=False)
    # The text after the generation prefix, which bad_arguments' JSON element is part of too.
    start = next(i for i, segment in enumerate(segments) if segment.by_model)
    reply = check_every_cut(join(segments[start:]), Options(thinking=thinking))
    assert reply.content == (message.get("content") or "")
    assert reply.reasoning == message.get("reasoning_content", "")
    sent = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    assert [(call.name, call.arguments) for call in reply.tool_calls] == sent
    again = render([reply.to_message()], thinking=thinking, add_generation_prompt=False)
    assert again == segments
    # The whole turn, its prefix included, reads the same.
    assert parse(join(segments), Options(thinking=thinking)) == reply


json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
plain = st.text().filter(lambda text: "<|" not in text and not text.endswith("<"))


@settings(deadline=None)
@given(
    reasoning=plain.filter(lambda text: text == text.strip()),
    content=plain,
    arguments=st.lists(st.dictionaries(plain, json_value, max_size=3), max_size=3),
    data=st.data(),
)
def test_any_turn_survives_rendering_and_any_cut(reasoning, content, arguments, data):
    calls = [
        {
            "id": f"functions.tool-{i}:{i}",
            "type": "function",
            "function": {"name": f"tool-{i}", "arguments": json.dumps(a)},
        }
        for i, a in enumerate(arguments)
    ]
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}
    text = join(segment for segment in render([message], add_generation_prompt=False) if segment.by_model)
    assume(not any(mark in json.dumps(arguments) for mark in MARKS))
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    reply = collect(streamed(cut(text, places)))
    assert (reply.reasoning, reply.content) == (reasoning, content)
    assert [call.id for call in reply.tool_calls] == [call["id"] for call in calls]
    assert [call.parsed for call in reply.tool_calls] == arguments


soup = st.lists(
    st.sampled_from(
        [
            *MARKS,
            *("think", "response", "tools", "call", "argument", "json", "message", "respons", "foo"),
            *(' tool="f"', ' index="1"', ' key="k"', ' key="z"', ' type="string"', ' type="number"', ' type="', " key"),
            *(" ", "\n", "<", "<|", "<|op", "|>", '"', "\\", "1", "{", "text", "é北"),
            *(THINK_END, RESPONSE, RESPONSE_END, TOOLS, TOOLS_END, END),
            *(opened("call", tool="f"), opened("argument", key="k", type="string"), closed("argument"), closed("call")),
        ]
    ),
    max_size=30,
).map("".join)


@settings(deadline=None, max_examples=250)
@given(text=soup, thinking=st.booleans(), data=st.data())
def test_any_output_in_any_cut_gives_one_reply_without_markers(text, thinking, data):
    options = Options(thinking=thinking)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    whole = parse(text, options)
    events = streamed(cut(text, places), options)
    assert collect(events) == whole
    assert collect(streamed(text, options)) == whole
    for shown in (whole.reasoning, whole.content):
        assert not any(mark in shown for mark in MARKS)
    in_order(events)
    # Arguments given as JSON text are passed on as they are; all others are an object by construction.
    assert "json" in text or all(isinstance(call.parsed, dict) for call in whole.tool_calls if call.complete)


def test_every_beginning_of_an_output_shows_a_beginning_of_its_texts():
    """Cut off anywhere (max_tokens), nothing but a lone "<" can be shown that the whole output does not have."""
    text = f"why{THINK_END}{RESPONSE}It is <b>.{RESPONSE_END}{TOOLS}{call('f', argument('a', 'x'))}{TOOLS_END}{END}"
    whole = parse(text)
    for size in range(len(text)):
        part = parse(text[:size])
        assert whole.reasoning.startswith(part.reasoning.removesuffix("<"))
        assert whole.content.startswith(part.content.removesuffix("<"))
        for got, full in zip(part.tool_calls, whole.tool_calls, strict=False):
            assert full.arguments.startswith(got.arguments.removesuffix("<"))


def test_string_arguments_stream_as_they_are_produced():
    """A long string argument shows up with every piece, not at the end of its call."""
    stream = Stream(K3, Options())
    stream.push(THINK_END + RESPONSE + RESPONSE_END + TOOLS + opened("call", tool="write"))
    assert stream.push(opened("argument", key="text", type="string")) == [CallArguments(0, '{"text": "')]
    for _ in range(100):
        assert stream.push('line "x"\n') == [CallArguments(0, 'line \\"x\\"\\n')]
    assert stream.push(closed("argument")) == [CallArguments(0, '"')]
    assert stream.push(closed("call")) == [CallArguments(0, "}"), CallEnd(0)]


def test_reading_is_linear_in_the_output():
    """Many small pieces of a long argument take a fixed work each: the cursor never goes back."""
    stream = Stream(K3, Options(thinking=False))
    stream.push(TOOLS + opened("call", tool="f") + opened("argument", key="k", type="array") + "[")
    for _ in range(20_000):
        stream.push("1, ")
    assert stream.cursor.position == len(stream.text)
    reply = collect([CallStart(0, "i", "f"), *stream.push("1]" + closed("argument") + closed("call"))])
    assert len(reply.tool_calls[0].parsed["k"]) == 20_001


DATA = "<|open|>think<|sep|> <|close|>think<|sep|> <|close|> <|sep|> <|close|>argument. <|close|>response<|sep|>"

CASES = {
    "several calls keep apart": (
        f"{THINK_END}{RESPONSE}{RESPONSE_END}{TOOLS}{call('f', argument('a', '1'))}"
        f"{call('g', argument('b', '2'), index=2)}{TOOLS_END}{END}",
        Reply(tool_calls=(ToolCall("functions.f:0", "f", '{"a": "1"}'), ToolCall("functions.g:1", "g", '{"b": "2"}'))),
    ),
    "content before the tools stays": (
        f"R{THINK_END}{RESPONSE}let me see{RESPONSE_END}{TOOLS}{call('f')}{TOOLS_END}{END}",
        Reply("R", "let me see", (ToolCall("functions.f:0", "f", "{}"),)),
    ),
    "think close left out, straight to the tools": (
        f"R{TOOLS}{call('f')}{TOOLS_END}{END}",
        Reply("R", "", (ToolCall("functions.f:0", "f", "{}"),)),
    ),
    "think close left out, straight to the response": (f"R{RESPONSE}C{RESPONSE_END}{END}", Reply("R", "C")),
    "think close left out, an orphan response close, then tools": (
        f"R and prose{RESPONSE_END}{TOOLS}{call('f')}{TOOLS_END}{END}",
        Reply("R and prose", "", (ToolCall("functions.f:0", "f", "{}"),)),
    ),
    "response open left out": (f"R{THINK_END}C{RESPONSE_END}{END}", Reply("R", "C")),
    "response close left out before the tools": (
        f"R{THINK_END}{RESPONSE}C{TOOLS}{call('f')}{TOOLS_END}{END}",
        Reply("R", "C", (ToolCall("functions.f:0", "f", "{}"),)),
    ),
    "response close left out before the end": (f"R{THINK_END}{RESPONSE}C{END}", Reply("R", "C")),
    "message close is no content": (f"R{THINK_END}{RESPONSE}C{closed('message')}", Reply("R", "C")),
    "nothing after the end is read": (
        f"R{THINK_END}{RESPONSE}C{RESPONSE_END}{END}{opened('message', role='user')}more",
        Reply("R", "C"),
    ),
    "another turn begun without an end": (
        f"R{THINK_END}{RESPONSE}C{opened('message', role='user')}more",
        Reply("R", "C"),
    ),
    "white space between channels": (f"R{THINK_END}\n\n{RESPONSE}C\n{RESPONSE_END}\n{END}", Reply("R", "C\n")),
    "spaces between the parts of markers": (
        "R<|close|> think <|sep|> <|open|> response <|sep|>C<|close|> response <|sep|>",
        Reply("R", "C"),
    ),
    "markers without their last part": (
        "R<|close|>think<|open|>response\nC<|close|>response<|end_of_msg|>",
        Reply("R", "\nC"),
    ),
    "stray markers": (f"R<|sep|>R{THINK_END}{RESPONSE}a<|open|>b<|close|>c<|sep|>d{THINK_END}e", Reply("RR", "abcde")),
    "thinking again after the response": (
        f"R{THINK_END}{RESPONSE}C{RESPONSE_END}{opened('think')}S{THINK_END}{RESPONSE}D{RESPONSE_END}{END}",
        Reply("RS", "CD"),
    ),
    "a call outside the tools": (f"R{call('f')}{END}", Reply("R", "", (ToolCall("functions.f:0", "f", "{}"),))),
    "noise around calls": (
        f"{TOOLS}\nx{opened('call', tool='f')}y{argument('a', '1')}z{closed('call')}\n{TOOLS_END}w{END}",
        Reply(tool_calls=(ToolCall("functions.f:0", "f", '{"a": "1"}'),)),
    ),
    "a call without a name is dropped": (
        f"{TOOLS}{opened('call', index='1')}{argument('a', '1')}{closed('call')}{call('g', index=2)}{TOOLS_END}{END}",
        Reply(tool_calls=(ToolCall("functions.g:0", "g", "{}"),)),
    ),
    "a call close left out": (
        f"{TOOLS}{opened('call', tool='f')}{argument('a', '1')}{call('g')}{TOOLS_END}{END}",
        Reply(tool_calls=(ToolCall("functions.f:0", "f", '{"a": "1"}'), ToolCall("functions.g:1", "g", "{}"))),
    ),
    "an argument close left out": (
        f"{TOOLS}{opened('call', tool='f')}{opened('argument', key='a', type='string')}x"
        f"{closed('call')}{TOOLS_END}{END}",
        Reply(tool_calls=(ToolCall("functions.f:0", "f", '{"a": "x"}'),)),
    ),
    "everything after an argument left out": (
        f"{TOOLS}{opened('call', tool='f')}{opened('argument', key='a', type='number')}3<|end_of_msg|>",
        Reply(tool_calls=(ToolCall("functions.f:0", "f", '{"a": 3}'),)),
    ),
    "a repeated argument counts once": (
        f"{TOOLS}{call('f', argument('a', '1'), argument('a', '2'), argument('b', '3'))}{TOOLS_END}{END}",
        Reply(tool_calls=(ToolCall("functions.f:0", "f", '{"a": "1", "b": "3"}'),)),
    ),
    "an argument without a key is dropped": (
        f"{TOOLS}{opened('call', tool='f')}{opened('argument', type='string')}x{closed('argument')}"
        f"{argument('b', '3')}{closed('call')}{TOOLS_END}{END}",
        Reply(tool_calls=(ToolCall("functions.f:0", "f", '{"b": "3"}'),)),
    ),
    "typed arguments": (
        TOOLS
        + call("f", argument("n", " 3 ", "number"), argument("b", "true", "boolean"), argument("z", "null", "null")),
        Reply(tool_calls=(ToolCall("functions.f:0", "f", '{"n": 3, "b": true, "z": null}'),)),
    ),
    "an argument that is not of its type is a string": (
        TOOLS
        + call("f", argument("n", "three", "number"), argument("m", "NaN", "number"), argument("o", "{", "object")),
        Reply(tool_calls=(ToolCall("functions.f:0", "f", '{"n": "three", "m": "NaN", "o": "{"}'),)),
    ),
    "an argument without a type": (
        f"{TOOLS}{call('f', opened('argument', key='a') + '[1]' + closed('argument'), argument('b', 'x', ''))}",
        Reply(tool_calls=(ToolCall("functions.f:0", "f", '{"a": [1], "b": "x"}'),)),
    ),
    "names that are not ASCII, quoted values": (
        f"{TOOLS}{call('f', argument('城市 &quot;a&quot; &amp;amp;', '北京'))}{TOOLS_END}{END}",
        Reply(tool_calls=(ToolCall("functions.f:0", "f", '{"城市 \\"a\\" &amp;": "北京"}'),)),
    ),
    "a name with signs": (
        f"{TOOLS}{call('mcp-server.read_file-2')}{TOOLS_END}{END}",
        Reply(tool_calls=(ToolCall("functions.mcp-server.read_file-2:0", "mcp-server.read_file-2", "{}"),)),
    ),
    "markers inside an argument are data": (
        TOOLS + call("f", argument("a", DATA)),
        Reply(tool_calls=(ToolCall("functions.f:0", "f", json.dumps({"a": DATA})),)),
    ),
    "arguments as one JSON text": (
        f"{TOOLS}{opened('call', tool='f')}{opened('json', type='object')}{{oops{closed('json')}"
        f"{closed('call')}{TOOLS_END}{END}",
        Reply(tool_calls=(ToolCall("functions.f:0", "f", "{oops"),)),
    ),
    "cut off inside an argument": (
        f"{TOOLS}{opened('call', tool='f')}{opened('argument', key='a', type='string')}half",
        Reply(tool_calls=(ToolCall("functions.f:0", "f", '{"a": "half', complete=False),)),
    ),
    "cut off inside a marker": (f"R{THINK_END}{RESPONSE}C<|close|>respo", Reply("R", "C")),
    "cut off inside the first part of a marker": (f"R{THINK_END}{RESPONSE}C<|clo", Reply("R", "C")),
    "a comparison at the end": (f"R{THINK_END}{RESPONSE}a <", Reply("R", "a <")),
    "never ends thinking": ("all of it", Reply("all of it")),
    "nothing": ("", Reply()),
}


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_malformed_output(text, expected):
    assert check_every_cut(text) == expected


def test_without_thinking_the_output_starts_in_the_response():
    options = Options(thinking=False)
    assert check_every_cut(f"C{RESPONSE_END}{TOOLS}{call('f')}{TOOLS_END}{END}", options) == Reply(
        content="C", tool_calls=(ToolCall("functions.f:0", "f", "{}"),)
    )
    assert check_every_cut(f"{RESPONSE}C{RESPONSE_END}{END}", options) == Reply(content="C")
    assert check_every_cut(f"{opened('think')}R{THINK_END}{RESPONSE}C{END}", options) == Reply("R", "C")


@pytest.mark.parametrize(
    "options", [Options(calls=False), Options(tools=declared([]))], ids=["choice none", "no tools"]
)
def test_refused_calls_are_dropped_and_never_content(options):
    text = f"R{THINK_END}{RESPONSE}C{RESPONSE_END}{TOOLS}{call('f', argument('a', 'x'))}{TOOLS_END}{END}"
    assert check_every_cut(text, options) == Reply("R", "C")


def test_calls_of_undeclared_tools_are_dropped():
    tools = declared([{"type": "function", "function": {"name": "g"}}])
    reply = check_every_cut(f"{TOOLS}{call('f')}{call('g', index=2)}{TOOLS_END}{END}", Options(tools=tools))
    assert reply.tool_calls == (ToolCall("functions.g:0", "g", "{}"),)


def test_ids_come_from_the_caller():
    options = Options(call_id=lambda name, index: f"call_{index}_{name}")
    assert parse(f"{TOOLS}{call('f')}", options).tool_calls[0].id == "call_0_f"


def test_a_header_is_not_waited_for_without_end():
    stream = Stream(K3, Options(thinking=False))
    stream.push('<|open|>response x="')
    assert collect(stream.push("a" * 5000)).content == ' x="' + "a" * 5000
    text = '<|open|>response x="' + "a" * 5000
    assert parse(text, Options(thinking=False)).content == ' x="' + "a" * 5000


def test_a_long_stream_keeps_little_text_and_loses_none():
    piece = "0123456789" * 100
    stream = Stream(K3)
    events = stream.push("R" + THINK_END + RESPONSE)
    for _ in range(100):
        events += stream.push(piece)
    assert len(stream.text) < 20_000
    tail = f"{RESPONSE_END}{TOOLS}{opened('call', tool='f')}{opened('argument', key='k', type='array')}["
    events += stream.push(tail)
    for _ in range(100):
        events += stream.push("[],\n" * 250)
    events += stream.push(f"1]{closed('argument')}{closed('call')}{TOOLS_END}{END}") + stream.finish()
    reply = collect(events)
    assert reply.content == piece * 100
    assert reply.tool_calls[0].parsed == {"k": [[]] * 25_000 + [1]}


def test_a_cursor_can_be_kept_and_used_again():
    """The parser is a function of text and cursor: the same ones give the same events, any number of times."""
    text = f"R{THINK_END}{RESPONSE}C"
    _, cursor = K3(text[:6], Stream(K3).cursor, Options())
    assert K3(text, cursor, Options()) == K3(text, cursor, Options())


def test_arguments_that_are_no_object():
    with pytest.raises(Error, match="not a JSON object"):
        _ = ToolCall("i", "f", "[1]").parsed
    with pytest.raises(Error, match="allowed: kimi_k3, kimi_k2"):
        parser("kimi")
