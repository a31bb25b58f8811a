"""Every way of cutting every golden output, and every one-step malformation of it, gives what one piece gives."""

import json
import re
import zlib
from pathlib import Path

import pytest
from cuts import MARKS, calls_of, check, check_cuts, even, every_cut, few_cuts, random_cuts
from test_parse_k2 import CASES as K2_CASES
from test_parse_k3 import CASES as K3_CASES

from perilune.chat import Content, Options, Stream, StreamDecoder, join, parse, parser, render, render_k2, train_bpe

GOLDENS = sorted((Path(__file__).parents[1] / "data" / "chat").glob("*.json"))
RICH = [
    {
        "role": "assistant",
        "reasoning_content": "Zwei Städte, 北京 zuerst: a < b && b <| c.",
        "content": 'I look at "both".\n<b>Now</b>',
        "tool_calls": [
            {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(
                [
                    ("get-weather", '{"city": "北京", "days": 3, "units": null, "deep": {"a": [1, "</think>"]}}'),
                    ("run_shell", '{"cmd": "ls \\"x\\" < y\\n|>"}'),
                    ("now", "{}"),
                ]
            )
        ],
    }
]


def turns():
    """(format, options, output) of every assistant turn in the goldens, and of one with everything in it."""
    requests = [json.loads(path.read_text(encoding="utf-8"))["request"] for path in GOLDENS]
    names = [path.stem for path in GOLDENS]
    for name, request in [*zip(names, requests, strict=True), ("rich", {"messages": RICH})]:
        for message in (message for message in request["messages"] if message["role"] == "assistant"):
            thinking = request.get("thinking", True)
            three = render([message], thinking=thinking, add_generation_prompt=False)
            start = next(i for i, segment in enumerate(three) if segment.by_model)
            yield f"k3-{name}", "kimi_k3", Options(thinking=thinking), join(three[start:])
            two = render_k2([message], thinking=thinking, add_generation_prompt=False)
            start = next(i for i, segment in enumerate(two) if segment.by_model)
            yield f"k2-{name}", "kimi_k2", Options(thinking=thinking), join(two[start:])


TURNS = {key: rest for key, *rest in turns()}
MALFORMED = {
    **{f"k3 {name}": ("kimi_k3", Options(), text) for name, (text, _) in K3_CASES.items()},
    **{f"k2 {name}": ("kimi_k2", Options(), text) for name, (text, _) in K2_CASES.items()},
}
OUTPUTS = TURNS | MALFORMED
each = pytest.mark.parametrize(("name", "options", "text"), OUTPUTS.values(), ids=OUTPUTS)


@each
def test_one_cut_anywhere(name, options, text):
    check_cuts(text, every_cut(text, 1), options, name)


def short(outputs, limit):
    return {key: value for key, value in outputs.items() if len(value[2]) <= limit}


SHORT = short(OUTPUTS, 80)


@pytest.mark.parametrize(("name", "options", "text"), SHORT.values(), ids=SHORT)
def test_two_cuts_anywhere(name, options, text):
    check_cuts(text, every_cut(text, 2), options, name)


LONGER = {key: value for key, value in short(OUTPUTS, 300).items() if key not in SHORT}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "text"), LONGER.values(), ids=LONGER)
def test_two_cuts_anywhere_in_longer_outputs(name, options, text):
    check_cuts(text, every_cut(text, 2), options, name)


@each
def test_even_and_random_pieces(name, options, text):
    """Single characters, every n-th step of a server, 50 seeded cuttings."""
    check_cuts(text, (even(text, size) for size in range(1, 41)), options, name)
    check_cuts(text, random_cuts(text, 50, zlib.crc32(text.encode())), options, name)


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level vocabulary with the special tokens of both families, small enough to split characters."""
    return train_bpe([" ".join(text for _, _, text in OUTPUTS.values())], 600)


@each
def test_pieces_of_one_token(name, options, text, tokenizer):
    """Tokens as the model makes them, through the decoder that a server uses: characters come apart into bytes."""
    ids = tokenizer.encode(text)
    decoder = StreamDecoder(tokenizer, skip_special=False)
    pieces = [*(decoder.push([token]) for token in ids), decoder.finish()]
    check_cuts(text, iter([pieces]), options, name)


def parts(text, name):
    """The output as a list of special tokens and texts between."""
    return [part for part in re.split("(" + "|".join(map(re.escape, (*MARKS[name], "</think>"))) + ")", text) if part]


def mutations(text, name):
    """Every output one step away: a part dropped, doubled, swapped, halved, the last; noise, spaces, more thinking."""
    whole = parts(text, name)
    for i, part in enumerate(whole):
        before, after = whole[:i], whole[i + 1 :]
        yield [*before, *after]
        yield [*before, part, part, *after]
        yield [*before, part]
        yield [*before, "\n x ", part, *after]
        if after:
            yield [*before, after[0], part, *after[1:]]
        if part in MARKS[name]:
            yield [*before, part[: len(part) // 2], *after]
            yield [*before, part[: len(part) // 2]]
            yield [*before, " ", part, " ", *after]
            yield [*before, "<think>" if name == "kimi_k2" else "<|open|>think<|sep|>", *whole[i:]]


@pytest.mark.parametrize(("name", "options", "text"), TURNS.values(), ids=TURNS)
def test_every_malformation_of_one_step(name, options, text):
    for number, pieces in enumerate(mutations(text, name)):
        broken = "".join(pieces)
        check_cuts(broken, few_cuts(broken, name, 1, number), options, name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "text"), TURNS.values(), ids=TURNS)
def test_every_malformation_of_two_steps(name, options, text):
    for number, once in enumerate(mutations(text, name)):
        if number % 5 == 0:
            for more, twice in enumerate(mutations("".join(once), name)):
                broken = "".join(twice)
                check_cuts(broken, few_cuts(broken, name, 1, number + more), options, name)


@pytest.mark.parametrize(("name", "options", "text"), TURNS.values(), ids=TURNS)
def test_a_mark_lost_outside_a_call_never_loses_the_call(name, options, text):
    """What servers got wrong most often: one marker too few before the tools, and the calls are gone."""
    whole = parts(text, name)
    sure = calls_of(parse(text, options, name))
    first = "<|tool_call_begin|>" if name == "kimi_k2" else "<|open|>"
    begin = whole.index(first) if name == "kimi_k2" and first in whole else _first_call(whole)
    for i in range(begin):
        if whole[i].startswith("<"):
            assert calls_of(parse("".join(whole[:i] + whole[i + 1 :]), options, name)) == sure


def _first_call(whole):
    calls = [i for i, part in enumerate(whole) if part.startswith("call ")]
    return calls[0] - 1 if calls else 0


@pytest.mark.parametrize("name", ["kimi_k3", "kimi_k2"])
def test_little_is_held_back(name):
    """Visible text lags behind by less than the longest marker, whatever it holds."""
    answer = "a < b <| c <|x|> d </ e " * 20
    stream = Stream(parser(name), Options(thinking=False))
    shown = 0
    for sent, character in enumerate(answer, 1):
        shown += sum(len(event.text) for event in stream.push(character) if isinstance(event, Content))
        assert sent - shown < max(map(len, MARKS[name]))
    shown += sum(len(event.text) for event in stream.finish() if isinstance(event, Content))
    assert shown == len(answer)


@pytest.mark.parametrize(("name", "options", "text"), TURNS.values(), ids=TURNS)
def test_interleaved_streams_do_not_touch_each_other(name, options, text):
    """Eight streams of one output, a character each in turn, the later ones behind."""
    streams = [Stream(parser(name), options) for _ in range(8)]
    events = [[] for _ in streams]
    for step in range(len(text) + 8):
        for i, stream in enumerate(streams):
            if 0 <= step - i < len(text):
                events[i] += stream.push(text[step - i])
    whole = parse(text, options, name)
    for stream, mine in zip(streams, events, strict=True):
        check(mine + stream.finish(), whole, name)


@pytest.mark.parametrize(("name", "options", "text"), TURNS.values(), ids=TURNS)
def test_a_turn_cut_off_anywhere_shows_nothing_that_the_whole_one_does_not(name, options, text):
    """max_tokens ends an output in the middle of anything; a marker's beginning is dropped, a lone "<" is text."""
    whole = parse(text, options, name)
    for size in range(len(text)):
        part = parse(text[:size], options, name)
        assert whole.reasoning.startswith(part.reasoning.removesuffix("<"))
        assert whole.content.startswith(part.content.removesuffix("<"))
        assert len(part.tool_calls) <= len(whole.tool_calls)
