"""K2-family output parsing: round trips, every cut of every output, and known malformations."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.chat import CallArguments, Options, Reply, Stream, ToolCall, collect, declared, parse, parser

K2 = parser("kimi_k2")
BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKS = [BEGIN, END, CALL, ARGUMENTS, CALL_END, "<|im_end|>", "</think>"]


def call(id_, arguments="{}"):
    return f"{CALL}{id_}{ARGUMENTS}{arguments}{CALL_END}"


def streamed(pieces, options=None):
    stream = Stream(K2, options or Options())
    events = [event for piece in pieces for event in stream.push(piece)]
    return events + stream.finish()


def check_every_cut(text, options=None):
    """One piece, single characters and every two pieces give the same reply; returns it."""
    whole = parse(text, options, "kimi_k2")
    assert collect(streamed(text, options)) == whole
    for place in range(len(text)):
        assert collect(streamed([text[:place], text[place:]], options)) == whole
    return whole


JSON, THINKING_JSON = '{"a": 1}', '{"a": "<think></think>"}'
F = ToolCall("functions.f:0", "f", "{}")

CASES = {
    "thinking, text, calls": (
        f"R</think>C{BEGIN}{call('functions.f:0')}{call('functions.g:1', JSON)}{END}<|im_end|>",
        Reply("R", "C", (F, ToolCall("functions.g:1", "g", JSON))),
    ),
    "no thinking": ("</think>C<|im_end|>", Reply("", "C")),
    "think opened again by the model": ("<think>R</think>C", Reply("R", "C")),
    "think close left out before the section": (f"R{BEGIN}{call('functions.f:0')}{END}", Reply("R", "", (F,))),
    "think close left out before a bare call": (f"R{call('functions.f:0')}", Reply("R", "", (F,))),
    "singular section markers": (
        f"</think><|tool_call_section_begin|>{call('functions.f:0')}<|tool_call_section_end|>x",
        Reply("", "", (F,)),
    ),
    "white space before the section is dropped": (
        f"R</think>\n\n{BEGIN}{call('functions.f:0')}{END}",
        Reply("R", "", (F,)),
    ),
    "white space alone stays": ("R</think>\n\n<|im_end|>", Reply("R", "\n\n")),
    "white space around text stays": ("R</think>\n a \n", Reply("R", "\n a \n")),
    "noise in and after the section": (
        f"</think>C{BEGIN}\nx{call('functions.f:0')}\ny{END}\nz<|im_end|>",
        Reply("", "C", (F,)),
    ),
    "a line end in the id": (f"</think>{BEGIN}{call(chr(10) + 'functions.f:0' + chr(10))}{END}", Reply("", "", (F,))),
    "an id without its prefix": (f"</think>{BEGIN}{call('f:0')}{END}", Reply("", "", (ToolCall("f:0", "f", "{}"),))),
    "a name with signs": (
        f"</think>{BEGIN}{call('functions.mcp-srv.read_file-2:11')}{END}",
        Reply("", "", (ToolCall("functions.mcp-srv.read_file-2:11", "mcp-srv.read_file-2", "{}"),)),
    ),
    "empty arguments": (f"</think>{BEGIN}{call('functions.f:0', ' ')}{END}", Reply("", "", (F,))),
    "a call begins inside another's id": (
        f"</think>{BEGIN}{CALL}functions.x{call('functions.f:0')}{END}",
        Reply("", "", (F,)),
    ),
    "a call begins inside another's arguments": (
        f"</think>{BEGIN}{CALL}functions.f:0{ARGUMENTS}{{}}{call('functions.g:1')}{END}",
        Reply("", "", (F, ToolCall("functions.g:1", "g", "{}"))),
    ),
    "a call without arguments is dropped": (f"</think>{BEGIN}{CALL}functions.f:0{CALL_END}{END}", Reply()),
    "the section ends inside a call": (f"</think>{BEGIN}{CALL}functions.f:0{ARGUMENTS}{{}}{END}", Reply("", "", (F,))),
    "the turn ends inside a call": (
        f"</think>{BEGIN}{CALL}functions.f:0{ARGUMENTS}{{}}<|im_end|>",
        Reply("", "", (F,)),
    ),
    "think marks inside arguments are data": (
        f"</think>{BEGIN}{call('functions.f:0', THINKING_JSON)}{END}",
        Reply("", "", (ToolCall("functions.f:0", "f", THINKING_JSON),)),
    ),
    "stray markers in text": (f"R</think>a{CALL_END}b</think>c{ARGUMENTS}d{END}e", Reply("R", "abcde")),
    "two sections": (
        f"</think>{BEGIN}{call('functions.f:0')}{END}{BEGIN}{call('functions.g:1')}{END}",
        Reply("", "", (F, ToolCall("functions.g:1", "g", "{}"))),
    ),
    "cut off inside arguments": (
        f'</think>{BEGIN}{CALL}functions.f:0{ARGUMENTS}{{"a',
        Reply("", "", (ToolCall("functions.f:0", "f", '{"a', complete=False),)),
    ),
    "cut off inside a marker": ("R</think>C<|tool_ca", Reply("R", "C")),
    "a comparison at the end": ("R</think>a <", Reply("R", "a <")),
    "another turn": ("R</think>C<|im_user|>user<|im_middle|>D", Reply("R", "C")),
    "nothing": ("", Reply()),
}


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_output(text, expected):
    assert check_every_cut(text) == expected


def test_without_thinking():
    options = Options(thinking=False)
    assert check_every_cut(f"C{BEGIN}{call('functions.f:0')}{END}", options) == Reply("", "C", (F,))
    assert check_every_cut("<think>R</think>C", options) == Reply("R", "C")
    assert check_every_cut("a <think> b", options) == Reply("", "a <think> b")


def test_large_arguments_stream_and_arrive_whole():
    """No cap on a section: 50 kB of arguments in small pieces."""
    stream = Stream(K2, Options(thinking=False))
    events = stream.push(f"{BEGIN}{CALL}functions.f:0{ARGUMENTS}")
    for piece in ['{"text": "', *["0123456789"] * 5_000, '"}']:
        got = stream.push(piece)
        assert got == [CallArguments(0, piece)]
        events += got
    events += stream.push(CALL_END + END)
    assert len(collect(events).tool_calls[0].parsed["text"]) == 50_000


def schema(*names, required=()):
    return {"type": "object", "properties": {name: {} for name in names}, "required": list(required)}


TOOLS = declared(
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in {
        "f": schema("a", "b", required=["a"]),
        "g": schema("c"),
        "h": schema("b", "c", "d"),
    }.items()
)


@pytest.mark.parametrize(
    ("id_", "arguments", "name"),
    [
        ("0", '{"a": 1, "b": 2}', "f"),
        ("call_8f2e", '{"d": 1}', "h"),
        ("8f2e-11", '{"a": 1}', "f"),
        ("0", '{"c": 1}', None),
        ("0", '{"x": 1}', None),
        ("0", "{", None),
        ("f", '{"a": 1}', "f"),
        ("functions.nobody:0", '{"a": 1}', None),
    ],
)
def test_ids_without_a_name_are_matched_by_their_arguments(id_, arguments, name):
    reply = check_every_cut(f"</think>{BEGIN}{call(id_, arguments)}{call('functions.g:1')}{END}", Options(tools=TOOLS))
    expected = () if name is None else (ToolCall(id_, name, arguments),)
    assert reply.tool_calls == (*expected, ToolCall("functions.g:1", "g", "{}"))


def test_refused_calls_are_dropped_and_never_content():
    text = f"R</think>C{BEGIN}{call('functions.f:0')}{END}"
    assert check_every_cut(text, Options(calls=False)) == Reply("R", "C")


soup = st.lists(
    st.sampled_from(
        [
            *(*MARKS, "<think>", "<|tool_call_section_begin|>", "<|im_user|>"),
            *(
                "functions.f:0",
                "0",
                "g:1",
                "{",
                "}",
                '"a"',
                ":",
                " ",
                "\n",
                "<",
                "<|",
                "<|tool_call",
                "</th",
                "text",
                "é北",
            ),
            call("functions.f:0", '{"a": 1}'),
        ]
    ),
    max_size=25,
).map("".join)


@settings(deadline=None, max_examples=200)
@given(text=soup, options=st.sampled_from([Options(), Options(thinking=False), Options(tools=TOOLS)]), data=st.data())
def test_any_output_in_any_cut_gives_one_reply_without_markers(text, options, data):
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12))), len(text)]
    whole = parse(text, options, "kimi_k2")
    assert collect(streamed([text[a:b] for a, b in pairwise(edges)], options)) == whole
    assert collect(streamed(text, options)) == whole
    assert not any(mark in whole.content for mark in MARKS)
    assert not any(mark in whole.reasoning for mark in MARKS)


def test_json_arguments_are_typed():
    value = {"a": [1, None, True], "b": "北"}
    assert parse(call("functions.f:0", json.dumps(value)), name="kimi_k2").tool_calls[0].parsed == value
