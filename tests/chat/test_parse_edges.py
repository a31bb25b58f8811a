"""Failures reported of other servers' Kimi parsers, one test each, named by the tracker they were reported to.

Every text is also cut everywhere. What the report asks of the request or the grammar is tested in tests/serve.
"""

import json
import time

import pytest
from cuts import K2_MARKS, K3_MARKS, calls_of, check_cuts, even, every_cut, few_cuts, streamed
from test_parse_k2 import ARGUMENTS, BEGIN, CALL, CALL_END, END
from test_parse_k2 import call as k2_call
from test_parse_k3 import END as MESSAGE_END
from test_parse_k3 import RESPONSE, RESPONSE_END, THINK_END, TOOLS, TOOLS_END, argument, closed, opened
from test_parse_k3 import call as k3_call

from perilune.chat import CallArguments, CallEnd, CallStart, Options, Reply, Stream, ToolCall, declared, parser

F, G = ToolCall("functions.f:0", "f", '{"a": 1}'), ToolCall("functions.g:1", "g", "{}")
K2_F, K2_G = k2_call("functions.f:0", '{"a": 1}'), k2_call("functions.g:1")
K3_F, K3_G = k3_call("f", argument("a", "1", "number")), k3_call("g", index=2)


def everywhere(text, name, options=None):
    """The one reply of every cut of a text."""
    few = few_cuts(text, name, 20, 0)
    return check_cuts(text, (p for ways in (every_cut(text, 1), few) for p in ways), options, name)


K2 = {
    "1 vllm#24478: several calls are merged": (
        f"</think>{BEGIN}{K2_F}{K2_G}{END}<|im_end|>",
        Reply(tool_calls=(F, G)),
    ),
    "2 Kimi-K2#89, vllm#28543: the section's marker and noise in the reasoning": (
        f"why {BEGIN}\n noise {K2_F}{END}<|im_end|>",
        Reply("why ", "", (F,)),
    ),
    "3 vllm#31207: a section kept back is shown when it ends": (
        f"R</think>C{BEGIN}not a call{END}<|im_end|>",
        Reply("R", "C"),
    ),
    "3 vllm#31207: a section kept back is shown when the output ends": (f"R</think>C{BEGIN}not a", Reply("R", "C")),
    "5 vllm#38441: a line end in the id drops the call": (
        f"</think>{BEGIN}{CALL}\nfunctions.f:0\n{ARGUMENTS}{{}}{CALL_END}{END}",
        Reply(tool_calls=(ToolCall("functions.f:0", "f", "{}"),)),
    ),
    "6 vllm#38353: content before the section is lost": (
        f"R</think>let me look{BEGIN}{K2_F}{END}<|im_end|>",
        Reply("R", "let me look", (F,)),
    ),
    "12 vllm#32216, llxprt-code#749: calls inside the reasoning": (
        f"R{BEGIN}{K2_F}{END}<|im_end|>",
        Reply("R", "", (F,)),
    ),
    "12 vllm#32216: a bare call inside the reasoning": (f"R{K2_F}<|im_end|>", Reply("R", "", (F,))),
    "13 sglang#20878: a dash in the name": (
        f"</think>{BEGIN}{k2_call('functions.read-file:0')}{END}",
        Reply(tool_calls=(ToolCall("functions.read-file:0", "read-file", "{}"),)),
    ),
    "15 llama.cpp#17376: the singular section marker": (
        f"</think><|tool_call_section_begin|>{K2_F}<|tool_call_section_end|>",
        Reply(tool_calls=(F,)),
    ),
    "15 llama.cpp#17376: noise in and behind a section with singular markers": (
        f"R</think><|tool_call_section_begin|> x {K2_F} y <|tool_call_section_end|> z",
        Reply("R", "", (F,)),
    ),
    "15 llama.cpp#17376: a singular marker inside the reasoning": (
        f"R<|tool_call_section_begin|> x {K2_F}<|tool_call_section_end|>",
        Reply("R", "", (F,)),
    ),
}
K3 = {
    "16 vllm#51412: the message's end is shown as content": (
        f"R{THINK_END}{RESPONSE}C{RESPONSE_END}{closed('message')}<|end_of_msg|>",
        Reply("R", "C"),
    ),
    "16 vllm#51412: the message's end without the response's end": (
        f"R{THINK_END}{RESPONSE}C{closed('message')}",
        Reply("R", "C"),
    ),
    "17 vllm#53246: think close left out before the tools": (
        f"R{TOOLS}{K3_F}{TOOLS_END}{MESSAGE_END}",
        Reply("R", "", (F,)),
    ),
    "17 vllm#53246: prose in the think channel, then an orphan response close": (
        f"R{RESPONSE_END}{TOOLS}{K3_F}{TOOLS_END}{MESSAGE_END}",
        Reply("R", "", (F,)),
    ),
    "17 vllm#53246: think close left out before the response": (
        f"R{RESPONSE}C{RESPONSE_END}{MESSAGE_END}",
        Reply("R", "C"),
    ),
    "17 vllm#53246: prose in the think channel, an orphan response close, then text": (
        f"R{RESPONSE_END}C{MESSAGE_END}",
        Reply("R", "C"),
    ),
    "20 sglang#39895: a property's name is not ASCII": (
        f"{THINK_END}{TOOLS}{k3_call('f', argument('城市', '北京'))}{TOOLS_END}{MESSAGE_END}",
        Reply(tool_calls=(ToolCall("functions.f:0", "f", '{"城市": "北京"}'),)),
    ),
    "21 smg#1983: tools opened inside the prefilled channel": (
        f"{TOOLS}{K3_F}{TOOLS_END}{MESSAGE_END}",
        Reply(tool_calls=(F,)),
    ),
    "23 senpi#465: markers without their last part": (
        "R<|close|>think<|open|>response\nC<|close|>response<|open|>tools"
        + f"{K3_F}<|close|>tools<|close|>message<|end_of_msg|>",
        Reply("R", "\nC", (F,)),
    ),
}


@pytest.mark.parametrize(("text", "expected"), K2.values(), ids=K2)
def test_kimi_k2(text, expected):
    assert everywhere(text, "kimi_k2") == expected


@pytest.mark.parametrize(("text", "expected"), K3.values(), ids=K3)
def test_kimi_k3(text, expected):
    assert everywhere(text, "kimi_k3") == expected


@pytest.mark.parametrize("size", [9_000, 50_000])
def test_4_vllm_37184_large_arguments_leak_or_are_dropped(size):
    """A cap on the section (8 KB there) loses what real edits of files need."""
    text = "0123456789" * (size // 10)
    outputs = {
        "kimi_k2": f"</think>{BEGIN}{k2_call('functions.f:0', json.dumps({'a': text}))}{END}<|im_end|>",
        "kimi_k3": f"{THINK_END}{TOOLS}{k3_call('f', argument('a', text))}{TOOLS_END}{MESSAGE_END}",
    }
    for name, output in outputs.items():
        reply = check_cuts(output, (even(output, n) for n in (1, 20, 4096)), None, name)
        assert [call.parsed for call in reply.tool_calls] == [{"a": text}]


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        (
            "kimi_k2",
            [f"</think>{BEGIN}{CALL}functions.f:0{ARGUMENTS}" + '{"a": ', f"1}}{CALL_END}{K2_G}{END}<|im_end|>"],
        ),
        (
            "kimi_k3",
            [
                f"{THINK_END}{TOOLS}{opened('call', tool='f')}{opened('argument', key='a', type='number')}",
                f"1{closed('argument')}{closed('call')}{K3_G}{TOOLS_END}{MESSAGE_END}",
            ],
        ),
    ],
)
def test_7_vllm_38274_end_and_begin_in_one_speculative_step(name, pieces):
    events = streamed(pieces, None, name)
    assert [event for event in events if isinstance(event, CallEnd)] == [CallEnd(0), CallEnd(1)]
    written = "".join(event.text for event in events if isinstance(event, CallArguments) and event.index == 0)
    assert json.loads(written) == {"a": 1}


@pytest.mark.parametrize("name", ["kimi_k2", "kimi_k3"])
def test_8_vllm_41182_long_text_before_a_call_ends_the_stream(name):
    prose = "A long story. " * 2_500
    if name == "kimi_k2":
        output = f"R</think>{prose}{BEGIN}{K2_F}{END}<|im_end|>"
    else:
        output = f"R{THINK_END}{RESPONSE}{prose}{RESPONSE_END}{TOOLS}{K3_F}{TOOLS_END}{MESSAGE_END}"
    reply = check_cuts(output, (even(output, n) for n in (1, 7)), None, name)
    assert reply == Reply("R", prose, (F,))


def test_9_vllm_54701_empty_deltas():
    """No event is empty, also where pieces are: `check` looks at every one. Interleaving: test_parse_fuzz."""
    for name, output in {
        "kimi_k2": f"</think>{BEGIN}{K2_F}{K2_G}{END}<|im_end|>",
        "kimi_k3": f"{THINK_END}{TOOLS}{K3_F}{K3_G}{TOOLS_END}{MESSAGE_END}",
    }.items():
        pieces = [piece for character in output for piece in ("", character, "")]
        assert check_cuts(output, iter([pieces]), None, name).tool_calls == (F, G)


def test_10_vllm_44906_no_call_under_tool_choice_none():
    options = Options(calls=False)
    k2, k3 = (
        f"R</think>C{BEGIN}{K2_F}{END}",
        f"R{THINK_END}{RESPONSE}C{RESPONSE_END}{TOOLS}{K3_F}{TOOLS_END}{MESSAGE_END}",
    )
    assert everywhere(k2, "kimi_k2", options) == everywhere(k3, "kimi_k3", options) == Reply("R", "C")


def test_11_vllm_46344_ids_of_calls():
    """K2 keeps the model's id, K3 numbers calls from 0 in this response: both unique, in order."""
    k2 = f"</think>{BEGIN}{k2_call('functions.f:7')}{k2_call('functions.f:8')}{END}"
    k3 = f"{THINK_END}{TOOLS}{k3_call('f', index=7)}{k3_call('f', index=8)}{TOOLS_END}"
    for text, name, ids in ((k2, "kimi_k2", ("f:7", "f:8")), (k3, "kimi_k3", ("f:0", "f:1"))):
        starts = [event for event in streamed(list(text), None, name) if isinstance(event, CallStart)]
        assert [start.index for start in starts] == [0, 1]
        assert [start.id for start in starts] == [f"functions.{id_}" for id_ in ids]


def test_13_sglang_8613_work_grows_with_the_output_and_no_faster():
    """Long arguments with many braces, quotes and angle brackets took other parsers minutes: five times, five times."""
    spent = {}
    for name in ("kimi_k2", "kimi_k3"):
        for count in (20_000, 100_000):
            body = json.dumps({"a": "<{[\"'|>" * (count // 8)}, ensure_ascii=False)
            if name == "kimi_k2":
                output = f"</think>{BEGIN}{k2_call('functions.f:0', body)}{END}"
            else:
                output = f"{THINK_END}{TOOLS}{k3_call('f', argument('a', body, 'object'))}{TOOLS_END}{MESSAGE_END}"
            best = float("inf")
            for _ in range(3):
                stream, begin = Stream(parser(name)), time.process_time()
                for piece in even(output, 4):
                    stream.push(piece)
                stream.finish()
                best = min(best, time.process_time() - begin)
            spent[name, count] = best
        # Quadratic work would be 25 times as much; letting go of read text makes steps of 16 kB.
        assert spent[name, 100_000] < 12 * spent[name, 20_000] + 0.1


TOOLS_OF_A_REQUEST = declared(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in {"f": {"a": {}}, "g": {"b": {}}}.items()
)


@pytest.mark.parametrize("id_", ["chatcmpl-tool-8f2e41", "5b6c7d8e-1111-4222-8333-944455566677", "0", "call_1"])
def test_14_sglang_18178_ids_of_another_model_in_the_history(id_):
    """The model repeats ids it has seen; one without a name is matched by its arguments."""
    reply = everywhere(
        f"</think>{BEGIN}{k2_call(id_, json.dumps({'b': 2}))}{END}", "kimi_k2", Options(tools=TOOLS_OF_A_REQUEST)
    )
    assert reply.tool_calls == (ToolCall(id_, "g", '{"b": 2}'),)


def test_18_vllm_50604_string_arguments_are_not_streamed():
    """17,500 characters of one argument: each piece is passed on at once, but for what may be its end."""
    stream = Stream(parser("kimi_k3"), Options())
    stream.push(f"{THINK_END}{TOOLS}{opened('call', tool='write')}{opened('argument', key='text', type='string')}")
    for number in range(1_750):
        (event,) = stream.push(f"line {number:04}\n")
        assert event == CallArguments(0, f"line {number:04}\\n")
    (event,) = stream.push("end <|clo")
    assert event == CallArguments(0, "end ")
    assert stream.push(f"se|>argument<|sep|>{closed('call')}") == [
        CallArguments(0, '"'),
        CallArguments(0, "}"),
        CallEnd(0),
    ]


@pytest.mark.parametrize("options", [Options(tools={}), Options(tools=declared([]), calls=False)])
def test_19_sglang_39583_calls_without_declared_tools_are_no_content(options):
    k3 = f"R{THINK_END}{RESPONSE}C{RESPONSE_END}{TOOLS}{K3_F}{TOOLS_END}{MESSAGE_END}"
    assert everywhere(k3, "kimi_k3", options) == Reply("R", "C")
    assert everywhere(f"R</think>C{BEGIN}{K2_F}{END}<|im_end|>", "kimi_k2", options) == Reply("R", "C")


@pytest.mark.parametrize("size", range(1, 61))
def test_22_frontend_crates_152_coalesced_deltas_misplace_markers(size):
    """A server that sends every n-th step gives pieces that hold several markers, or halves of two."""
    k3 = (
        f"R{THINK_END}{RESPONSE}C{RESPONSE_END}{TOOLS}{k3_call('f', argument('a', '1', 'number'))}{K3_G}"
        f"{TOOLS_END}{MESSAGE_END}"
    )
    assert check_cuts(k3, iter([even(k3, size)]), None, "kimi_k3") == Reply("R", "C", (F, G))
    k2 = f"R</think>C{BEGIN}{K2_F}{K2_G}{END}<|im_end|>"
    assert check_cuts(k2, iter([even(k2, size)]), None, "kimi_k2") == Reply("R", "C", (F, G))


def test_22_frontend_crates_196_undeclared_tools_empty_arguments_duplicates():
    options = Options(tools=TOOLS_OF_A_REQUEST)
    k3 = (
        f"{THINK_END}{TOOLS}{k3_call('nobody', argument('a', '1'))}{k3_call('f', index=2)}"
        f"{k3_call('g', argument('b', '1'), argument('b', '2'), index=3)}{TOOLS_END}{MESSAGE_END}"
    )
    assert calls_of(everywhere(k3, "kimi_k3", options)) == [("f", "{}"), ("g", '{"b": "1"}')]
    k2 = f"</think>{BEGIN}{k2_call('functions.nobody:0')}{k2_call('functions.f:1', '')}{END}"
    assert calls_of(everywhere(k2, "kimi_k2", options)) == [("f", "{}")]


@pytest.mark.parametrize(("name", "marks"), [("kimi_k2", K2_MARKS), ("kimi_k3", K3_MARKS)])
def test_23_senpi_523_every_stray_marker_is_swallowed(name, marks):
    """Any marker alone in the middle of visible text: the marker goes, the text before it stays."""
    for mark in marks:
        for thinking in (True, False):
            reply = everywhere(f"one {mark} two", name, Options(thinking=thinking))
            assert (reply.reasoning + reply.content).startswith("one ")
            assert "<|" not in reply.reasoning + reply.content
            assert not reply.tool_calls
