"""A job before and after the engine: where checkpoints are wanted, and why an answer ended."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
from models import tiny_config
from serving import chat_model, tiny_tokenizer
from test_grammar import k2_tokenizer

from perilune import Transformer
from perilune.chat import Options
from perilune.model import initialize
from perilune.serve import LLM, EngineConfig
from perilune.serve.answer import Answer, Stream
from perilune.serve.async_llm import Delta
from perilune.serve.request import Output, Params
from perilune.serve.server import ServerConfig
from perilune.serve.server.anthropic_in import Messages, translate
from perilune.serve.server.context import Context, make
from perilune.serve.server.job import Job, Piece, follow
from perilune.serve.server.prepare import chat_job
from perilune.serve.server.tenants import OPEN


@lru_cache
def context(family: str) -> Context:
    words = tiny_tokenizer() if family == "k3" else k2_tokenizer()
    linear = dataclasses.replace(tiny_config("kimi_linear"), vocab_size=words.vocab_size)
    model = chat_model() if family == "k3" else initialize(Transformer(linear), 0)
    return make(ServerConfig(), LLM(model, EngineConfig(2_000_000, slots=2), tokenizer=words), 0)


MARK = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "f", "description": "tool", "input_schema": {"type": "object"}}


@pytest.mark.parametrize("family", ["k3", "k2"])
@pytest.mark.parametrize("thinks", [None, {"type": "disabled"}, {"type": "enabled"}], ids=["unsaid", "off", "on"])
@pytest.mark.parametrize("effort", [None, "low"])
def test_a_checkpoint_is_wanted_right_after_what_was_marked(family: str, thinks: Any, effort: str | None) -> None:
    """Whatever else is rendered before it: tools, how much to think, a system message of the format's own."""
    here = context(family)
    for system, tools, place in product([False, True], [False, True], ["system", "tools", "first", "last"]):
        if (place, system) == ("system", False) or (place, tools) == ("tools", False):
            continue
        mark = {name: MARK if name == place else {} for name in ("system", "tools", "first", "last")}
        talk = [
            {"role": "user", "content": [{"type": "text", "text": "first", **mark["first"]}]},
            {"role": "assistant", "content": "second"},
            {"role": "user", "content": [{"type": "text", "text": "last", **mark["last"]}]},
        ]
        fields: dict[str, Any] = {"model": "perilune", "max_tokens": 5, "messages": talk, "thinking": thinks}
        fields |= {"system": [{"type": "text", "text": "system", **mark["system"]}]} if system else {}
        fields |= {"tools": [{**TOOL, **mark["tools"]}]} if tools else {}
        fields |= {"output_config": {"effort": effort}} if effort else {}
        found = translate(Messages(**fields))
        job = asyncio.run(chat_job(here, found.chat, OPEN, marks=found.marks))
        (depth,) = job.marks
        assert job.prompt[depth - 1] == here.tokenizer.eos_id
        begin = max((i for i in range(depth - 1) if job.prompt[i] == here.tokenizer.eos_id), default=-1)
        assert {"tools": "tool"}.get(place, place) in here.tokenizer.decode(job.prompt[begin + 1 : depth])


class Says:
    """An engine whose answer is given: each token is a step."""

    def __init__(self, here: Context, *parts: str, stop: tuple[str, ...] = ()) -> None:
        words = here.tokenizer
        self.words, self.stop = words, stop
        self.tokens = [
            id for part in parts for id in ([words.specials[part]] if part in words.specials else words.encode(part))
        ]

    async def stream(self, prompt: list[int], params: Params, **options: Any) -> AsyncGenerator[Delta, None]:
        from perilune.chat import StreamDecoder

        words, special = self.words, options.get("special", False)
        ends, vocabulary = (words.eos_id, words.text_end_id), words.vocab_size
        stream = Stream(Answer(1, prompt), self.stop, ends, vocabulary=vocabulary)
        stream.decoder, stream.watcher = StreamDecoder(words, not special), StreamDecoder(words, not special)
        yield Delta("", Output(1))
        for token in self.tokens:
            stopped = token in ends or bool(self.stop and stream.watch(token))
            output = Output(1, [token], finished="stop" if stopped else None)
            yield Delta(stream.push(output), output, stream.answer if stopped else None)
            if stopped:
                return


def ask(family: str, *parts: str, stop: tuple[str, ...] = ()) -> tuple[list[Piece], str | None]:
    here = context(family)
    said = dataclasses.replace(here, started=Says(here, *parts, stop=stop))  # type: ignore[arg-type]
    job = Job([1], 1, Params(max_tokens=500), stop, Options(thinking=False))

    async def all_of() -> list[Piece]:
        return [piece async for piece in follow(said, job)]

    pieces = asyncio.run(all_of())
    return pieces, pieces[-1].finished


def spelled(pieces: list[Piece]) -> str:
    return " ".join(f"{type(event).__name__}:{getattr(event, 'text', '')}" for p in pieces for event in p.events)


K3_CALL = (
    *("ok", "<|close|>", "response", "<|sep|>", "<|open|>", "tools", "<|sep|>", "<|open|>"),
    *('call tool="f" index="1"', "<|sep|>", "<|open|>", 'argument key="a" type="string"', "<|sep|>", "value"),
)
K3_END = tuple(part for tag in ("argument", "call", "tools", "message") for part in ("<|close|>", tag, "<|sep|>"))
K2_CALL = (
    *("ok", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>"),
    '{"a": "value"}',
)


def test_a_call_that_a_stop_text_cuts_is_not_one_to_make() -> None:
    """`tool_calls` as the reason would have clients run a tool with half of its arguments."""
    assert ask("k3", *K3_CALL, *K3_END, "<|end_of_msg|>")[1] == "tool_calls"
    assert ask("k3", *K3_CALL, *K3_END, "<|end_of_msg|>", stop=("lu",))[1] == "stop"
    assert ask("k2", *K2_CALL, "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|im_end|>")[1] == "tool_calls"
    assert ask("k2", *K2_CALL, "<|tool_call_end|>", "<|im_end|>", stop=("lu",))[1] == "stop"


@pytest.mark.parametrize(("family", "call", "end"), [("k3", K3_CALL, "<|end_of_msg|>"), ("k2", K2_CALL, "<|im_end|>")])
def test_the_end_of_a_turn_ends_its_call(family: str, call: tuple[str, ...], end: str) -> None:
    """The parsers' own rule for whole texts; the end of a text ends nothing."""
    pieces, reason = ask(family, *call, end)
    assert (reason, spelled(pieces).split()[-1]) == ("tool_calls", "CallEnd:")
    pieces, reason = ask(family, *call, "[EOS]")
    assert reason == "stop"
    assert "CallEnd" not in spelled(pieces)


@pytest.mark.parametrize("family", ["k3", "k2"])
@pytest.mark.parametrize("end", ["[EOS]", "turn"])
def test_the_token_that_ends_an_answer_is_no_text_of_it(family: str, end: str) -> None:
    last = {"k3": "<|end_of_msg|>", "k2": "<|im_end|>"}[family] if end == "turn" else end
    pieces, reason = ask(family, "say [EOS] or <|im_end", last)
    assert reason == "stop"
    assert "".join(getattr(event, "text", "") for piece in pieces for event in piece.events).startswith("say [EOS] or")
    assert "".join(getattr(event, "text", "") for piece in pieces for event in piece.events).count("[EOS]") == 1
