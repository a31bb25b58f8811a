"""Ways of cutting an output into pieces, and what must hold for every one of them. Shared by the parser tests."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from perilune.chat import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Options,
    Reasoning,
    Reply,
    Stream,
    collect,
    parse,
    parser,
)

K3_MARKS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
K2_MARKS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_begin|>",
    "<|tool_call_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|im_end|>",
)
MARKS = {"kimi_k3": K3_MARKS, "kimi_k2": K2_MARKS}


def streamed(pieces: Sequence[str], options: Options | None = None, name: str = "kimi_k3") -> list:
    """The events of an output that comes in these pieces."""
    stream = Stream(parser(name), options or Options())
    events = [event for piece in pieces for event in stream.push(piece)]
    return events + stream.finish()


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The pieces between these places."""
    return [text[a:b] for a, b in pairwise([0, *sorted(places), len(text)])]


def every_cut(text: str, cuts: int) -> Iterator[list[str]]:
    """All ways to cut at exactly so many places."""
    return (cut(text, places) for places in combinations(range(1, len(text)), cuts))


def even(text: str, size: int) -> list[str]:
    """Pieces of `size` characters, as a server that sends every n-th step makes them."""
    return [text[i : i + size] for i in range(0, len(text), size)]


def at_marks(text: str, name: str) -> list[str]:
    """A piece for each special token and for each run of text between: what an id-by-id decoder gives at most."""
    return [piece for piece in re.split("(" + "|".join(map(re.escape, MARKS[name])) + ")", text) if piece]


def random_cuts(text: str, count: int, seed: int) -> Iterator[list[str]]:
    """`count` seeded cuttings, from two pieces to nearly single characters; empty pieces too."""
    draw = random.Random(seed)
    for _ in range(count):
        yield cut(text, [draw.randint(0, len(text)) for _ in range(draw.randint(1, max(1, len(text) // 3)))])


def few_cuts(text: str, name: str, count: int, seed: int) -> Iterator[list[str]]:
    """The telling ones: pieces of one to three characters, special tokens, and some random ones."""
    yield even(text, 1 + seed % 3)
    yield at_marks(text, name)
    yield from random_cuts(text, count, seed)


def in_order(events: Sequence[object]) -> None:
    """Calls start once and in order, end at most once, and no event is empty."""
    started, ended = [], []
    for event in events:
        match event:
            case CallStart(index, id_, tool):
                assert id_
                assert tool
                assert index == len(started)
                started.append(index)
            case CallArguments(index, text):
                assert text
                assert index == started[-1]
                assert index not in ended
            case CallEnd(index):
                assert index == started[-1]
                assert index not in ended
                ended.append(index)
            case Content(text) | Reasoning(text):
                assert text


def check(events: Sequence[object], whole: Reply, name: str = "kimi_k3") -> None:
    """The events spell `whole`; calls come one after the other; no event is empty, no marker is shown."""
    assert collect(events) == whole
    in_order(events)
    for shown in (whole.reasoning, whole.content):
        assert not any(mark in shown for mark in MARKS[name])


def check_cuts(text: str, cuttings: Iterator[list[str]], options: Options | None, name: str) -> Reply:
    """Every cutting gives what the whole text gives; returns that."""
    whole = parse(text, options, name)
    for pieces in cuttings:
        assert "".join(pieces) == text
        check(streamed(pieces, options, name), whole, name)
    return whole


def calls_of(reply: Reply) -> list[tuple[str, str]]:
    """(tool, arguments) of every complete call."""
    return [(call.name, call.arguments) for call in reply.tool_calls if call.complete]
