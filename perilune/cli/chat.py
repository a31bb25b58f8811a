"""`perilune chat`: a conversation with a checkpoint in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from perilune.chat import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Options,
    Reasoning,
    Stream,
    StreamDecoder,
    Tokenizer,
    collect,
    parser,
    render,
    render_k2,
)
from perilune.cli.checkpoint import LAST_SEED, Dtype, open_checkpoint, require_draws
from perilune.cli.parse import parse

Event = Reasoning | Content | CallStart | CallArguments | CallEnd

DESCRIPTION = """Talk with a checkpoint. An empty line or Ctrl-D ends the conversation, Ctrl-C stops the program.

examples:
  perilune chat runs/quickstart/checkpoint
  perilune chat DIR --system "You answer in one sentence." --thinking --thinking-effort low"""


@dataclass(frozen=True)
class Chat:
    checkpoint: Annotated[str, tyro.conf.Positional]
    """folder of a checkpoint with its tokenizer"""
    system: str | None = None
    """a system message"""
    thinking: bool = False
    """let the model think before it answers; its thoughts are shown between (think) and (answer)"""
    thinking_effort: Literal["low", "high", "max"] | None = None
    """how much; None says nothing about it to the model"""
    max_tokens: int = 1000
    """most tokens of one answer"""
    temperature: float = 1.0
    """0 takes the most likely token each time"""
    top_p: float | None = 0.95
    """keep the most likely tokens that hold this much probability"""
    seed: int = 0
    """of the draws"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes the GPU if there is one"""
    dtype: Dtype = "stored"
    """number format of the weights; stored takes that of the files"""


def run(arguments: list[str]) -> None:
    args = parse(Chat, "chat", arguments, DESCRIPTION)
    require_draws(args.max_tokens, args.seed)
    from perilune.model import Sampling, generate

    model, tokenizer = open_checkpoint(args.checkpoint, args.device, args.dtype)
    k3 = model.config.family == "kimi_k3"
    messages: list[dict[str, Any]] = [{"role": "system", "content": args.system}] if args.system else []
    while line := ask():
        messages.append({"role": "user", "content": line})
        if k3:
            segments = render(messages, thinking=args.thinking, thinking_effort=args.thinking_effort)
        else:
            segments = render_k2(messages, thinking=args.thinking)
        prompt, _ = tokenizer.encode_segments(segments)
        sampling = Sampling(args.temperature, top_p=args.top_p, seed=min(args.seed + len(messages), LAST_SEED))
        tokens = generate(model, prompt, args.max_tokens, sampling, {tokenizer.eos_id, tokenizer.text_end_id})
        reply = collect(show(events(tokens, tokenizer, k3, args.thinking)))
        messages.append({"role": "assistant", "content": reply.content, "reasoning_content": reply.reasoning})


def ask() -> str:
    """The person's next line; empty at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def events(tokens: Iterable[int], tokenizer: Tokenizer, k3: bool, thinking: bool) -> Iterator[Event]:
    """What the model says, as its tokens come."""
    # All markers of the K2 family are special tokens; of Kimi-K3's the decoder keeps those that its parser needs.
    decoder = StreamDecoder(tokenizer, skip_special=k3)
    stream = Stream(parser("kimi_k3" if k3 else "kimi_k2"), Options(thinking=thinking))
    for token in tokens:
        if token != tokenizer.text_end_id or token == tokenizer.eos_id:
            yield from stream.push(decoder.push([token]))
    yield from stream.push(decoder.finish())
    yield from stream.finish()


def show(said: Iterable[Event]) -> Iterator[Event]:
    """Print thoughts and answer, and pass the events on."""
    last: type | None = None
    for event in said:
        if isinstance(event, Reasoning | Content):
            if type(event) is not last and (last or isinstance(event, Reasoning)):
                print("(think) " if isinstance(event, Reasoning) else "\n(answer) ", end="")
            last = type(event)
            print(event.text, end="", flush=True)
        yield event
    print()


__all__ = ["run"]
