"""K2-family rendering against the format's own example, and back through the parser."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune import Error
from perilune.chat import Options, Tokenizer, join, parse, render_k2

MODEL = Path(__file__).parents[1] / "data" / "tokenizer" / "kimi.tiktoken.model"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
SYSTEM = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"


def turn(id_="functions.get_weather:0", arguments='{"city":"Beijing"}', **extra):
    call = {"id": id_, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return {"role": "assistant", "content": "text", "tool_calls": [call], **extra}


def result(id_="functions.get_weather:0"):
    return {"role": "tool", "tool_call_id": id_, "name": "get_weather", "content": '{"t": 3}'}


def test_the_whole_format():
    messages = [
        {"role": "user", "content": "Q"},
        turn(reasoning_content="R"),
        result(),
        {"role": "user", "content": "q"},
    ]
    assert join(render_k2(messages, tools=[TOOL], thinking=True)) == (
        f"<|im_system|>tool_declare<|im_middle|>{json.dumps([TOOL], separators=(',', ':'))}<|im_end|>{SYSTEM}"
        "<|im_user|>user<|im_middle|>Q<|im_end|><|im_assistant|>assistant<|im_middle|><think>R</think>text"
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city":"Beijing"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        '<|im_system|>get_weather<|im_middle|>## Return of functions.get_weather:0\n{"t": 3}<|im_end|>'
        "<|im_user|>user<|im_middle|>q<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    )


def test_without_thinking_and_with_a_system_message():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "name": "Ann", "content": "Q"},
        {"role": "assistant", "content": "A", "reasoning_content": "left out"},
    ]
    assert join(render_k2(messages, add_generation_prompt=False)) == (
        "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>Ann<|im_middle|>Q<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>A<|im_end|>"
    )


@pytest.mark.parametrize("thinking", [True, False])
def test_loss_mask_starts_where_generation_starts(thinking):
    messages = [{"role": "user", "content": "Q"}, turn(reasoning_content="R")]
    segments = render_k2(messages, thinking=thinking, add_generation_prompt=False)
    start = next(i for i, segment in enumerate(segments) if segment.by_model)
    assert segments[:start] == render_k2(messages[:1], thinking=thinking)
    assert all(segment.by_model for segment in segments[start:])


@pytest.mark.parametrize("thinking", [True, False])
def test_a_rendered_turn_comes_back(thinking):
    message = turn(reasoning_content="R")
    segments = render_k2([{"role": "user", "content": "Q"}, message], thinking=thinking, add_generation_prompt=False)
    reply = parse(join(s for s in segments if s.by_model), Options(thinking=thinking), "kimi_k2")
    assert (reply.reasoning, reply.content) == ("R" if thinking else "", "text")
    assert reply.to_message()["tool_calls"] == message["tool_calls"]


def test_ids_of_another_model_are_rewritten_with_the_name_and_a_running_counter():
    messages = [{"role": "user", "content": "Q"}, turn("call_1"), result("call_1"), turn("call_2"), result("call_2")]
    text = join(render_k2(messages))
    for i in range(2):
        assert f"<|tool_call_begin|>functions.get_weather:{i}<|tool_call_argument_begin|>" in text
        assert f"## Return of functions.get_weather:{i}\n" in text
    assert "call_1" not in text


def test_tools_declared_in_the_middle_and_empty_arguments():
    messages = [{"role": "user", "content": "Q"}, {"role": "system", "tools": [TOOL]}, turn(arguments=None)]
    text = join(render_k2(messages))
    assert (
        f"Q<|im_end|><|im_system|>tool_declare<|im_middle|>{json.dumps([TOOL], separators=(',', ':'))}<|im_end|>"
        in text
    )
    assert "<|tool_call_argument_begin|>{}<|tool_call_end|>" in text


def test_refusals():
    with pytest.raises(Error, match=r"messages\[0\]\.role"):
        render_k2([{"role": "developer", "content": "x"}])
    with pytest.raises(Error, match="tool_choice"):
        render_k2([{"role": "user", "content": "x"}], tool_choice="required")


@pytest.fixture(scope="module")
def kimi():
    return Tokenizer.load(MODEL, family="k2")


hostile = st.lists(st.sampled_from(["<|im_end|>", "<|im_user|>", "</think>", "<|tool_call_begin|>", "x", "\n"])).map(
    "".join
)


@settings(deadline=None)
@given(text=hostile | st.text())
def test_no_text_can_become_a_marker(kimi, text):
    def special(text):
        call = {"id": text, "function": {"name": text or "f", "arguments": json.dumps({text: text})}}
        messages = [
            {"role": "user", "name": text, "content": text},
            {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "x", "name": text, "content": text},
        ]
        segments = render_k2(messages, thinking=True)
        # Ordinary text between two markers is one segment: the token counts of the released template.
        assert all(a.special or b.special for a, b in pairwise(segments))
        return [id_ for id_ in kimi.encode_segments(segments)[0] if kimi.is_special(id_)]

    assert special(text) == special("harmless")
