"""OpenAI's objects of an answer: usage, log probabilities, tool calls."""

from __future__ import annotations

import codecs
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from perilune.chat import Content, Reasoning, Tokenizer
from perilune.chat.parse import CallArguments, CallStart
from perilune.serve.request import Logprob
from perilune.serve.server.job import Event, Piece

Object = dict[str, Any]
NEVER = -9999.0  # JSON has no minus infinity


@dataclass
class Whole(Piece):
    """The pieces of one answer put together."""

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        for name in ("events", "tokens", "logprobs", "prompt_logprobs"):
            getattr(self, name).extend(getattr(piece, name))
        self.cached = max(self.cached, piece.cached)
        if piece.finished is not None:
            self.finished, self.stopped_by = piece.finished, piece.stopped_by


def head(kind: str, model: str, prefix: str) -> Object:
    """What every object of a response begins with."""
    return {"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def usage(prompt: int, wholes: Mapping[int, Whole], n: int) -> Object:
    """Token counts of all answers by their place, n to each prompt. prompt: tokens of all prompts, each once."""
    answer = sum(len(whole.tokens) for whole in wholes.values())
    of_prompt: dict[int, int] = {}
    for place, whole in wholes.items():
        of_prompt[place // n] = max(of_prompt.get(place // n, 0), whole.cached)
    cached = sum(of_prompt.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_logprobs(tokenizer: Tokenizer, scores: Sequence[Logprob]) -> Object:
    """`logprobs` of a chat choice."""
    return {"content": [{**_one(tokenizer, s.token, s.logprob), "top_logprobs": _top(tokenizer, s)} for s in scores]}


class Offsets:
    """Where in the text the tokens of an answer begin, one after the other: a special token has no place in it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._at = tokenizer, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, token: int) -> int:
        """In characters; inside of a character that of its beginning."""
        begin = self._at
        if token < self._tokenizer.vocab_size and not self._tokenizer.is_special(token):
            self._at += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return begin


def text_logprobs(
    tokenizer: Tokenizer, scores: Sequence[Logprob | None], tokens: Sequence[int], offsets: Offsets
) -> Object:
    """`logprobs` of a completion choice; None for a first prompt token."""
    return {
        "tokens": [word(tokenizer, token) for token in tokens],
        "token_logprobs": [None if s is None else finite(s.logprob) for s in scores],
        "top_logprobs": [None if s is None else _by_text(tokenizer, s) for s in scores],
        "text_offset": [offsets.of(token) for token in tokens],
    }


def _by_text(tokenizer: Tokenizer, score: Logprob) -> Object:
    """The likeliest tokens and the token itself by their texts; of tokens that show the same text, the likeliest."""
    out: Object = {}
    for token, value in sorted({score.token: score.logprob, **dict(score.top)}.items(), key=lambda item: -item[1]):
        out.setdefault(word(tokenizer, token), finite(value))
    return out


def prompt_logprobs(tokenizer: Tokenizer, scores: Sequence[Logprob]) -> list[Object | None]:
    """vLLM's `prompt_logprobs`: nothing for the first token, for each other one its own and the likeliest."""
    out: list[Object | None] = [None]
    for score in scores:
        ranks = {token: rank for rank, (token, _) in enumerate(score.top, start=1)}
        listed = {score.token: score.logprob, **dict(score.top)}
        out.append(
            {
                str(token): {
                    "logprob": finite(value),
                    "rank": ranks.get(token),
                    "decoded_token": word(tokenizer, token),
                }
                for token, value in listed.items()
            }
        )
    return out


def message(whole: Whole) -> Object:
    """An assistant message, as clients send it back."""
    reasoning = "".join(event.text for event in whole.events if isinstance(event, Reasoning))
    content = "".join(event.text for event in whole.events if isinstance(event, Content))
    calls: list[Object] = []
    for event in whole.events:
        if isinstance(event, CallStart):
            calls.append({"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}})
        elif isinstance(event, CallArguments):
            calls[event.index]["function"]["arguments"] += event.text
    out: Object = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        out["reasoning_content"] = reasoning
    if calls:
        out["tool_calls"] = calls
    return out


def delta(event: Event) -> Object | None:
    """What a stream adds to the message for an event of the parser."""
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None


def word(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; bytes that are no text of their own become U+FFFD."""
    return tokenizer.decode([token]) if token < tokenizer.vocab_size else ""


def finite(value: float) -> float:
    return max(value, NEVER)


def _one(tokenizer: Tokenizer, token: int, value: float) -> Object:
    bytes_ = list(tokenizer.token_bytes(token)) if token < tokenizer.vocab_size else []
    return {"token": word(tokenizer, token), "logprob": finite(value), "bytes": bytes_}


def _top(tokenizer: Tokenizer, score: Logprob) -> list[Object]:
    return [_one(tokenizer, token, value) for token, value in score.top]


__all__ = [
    *("Offsets", "Whole", "chat_logprobs", "delta", "head", "message", "prompt_logprobs", "text_logprobs", "usage"),
    "word",
]
