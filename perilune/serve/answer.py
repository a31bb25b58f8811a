"""An answer, and how it grows by what each step adds to its request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from perilune.chat import StreamDecoder
from perilune.serve.engine import Hold
from perilune.serve.request import Logprob, Output


@dataclass
class Answer:
    """A finished request. tokens: of the answer, a stop token included; versions: the weights that made each of them.

    text: without special tokens and without the stop text; "" without a tokenizer. finished as in `Output`; stop: the
    stop text, or the token of `Params.stop_ids`, that ended it.
    cached: prompt tokens that came from the cache. hold: on its end, where it was added with `hold=seconds`.
    routing: experts of the tokens from `computed_from` on, [tokens, sparse layers, J]; the last token of the answer was
    never computed and is left out.
    """

    id: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: str = ""
    stop: str | int | None = None
    error: str | None = None
    versions: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    cached: int = 0
    routing: torch.Tensor | None = None
    computed_from: int = 0
    hold: Hold | None = None


@dataclass
class Stream:
    """Text of an answer on its way. watcher: decodes committed tokens at once, to find stop texts.

    seen: the last text of the watcher, no more than a stop text may lie in.
    """

    answer: Answer
    stops: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    salt: str = ""
    decoder: StreamDecoder | None = None
    watcher: StreamDecoder | None = None
    seen: str = ""
    shown: int = 0
    vocabulary: int = 0

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Without ids that the model has and the tokenizer has not."""
        return [token for token in tokens if token < self.vocabulary]

    def watch(self, token: int) -> bool:
        assert self.watcher is not None
        new = self.watcher.push(self._known([token]))
        self.seen = self.seen[max(0, len(self.seen) - max(map(len, self.stops))) :] + new
        return any(stop in self.seen for stop in self.stops)

    def push(self, output: Output) -> str:
        """Take an output in; the text that it adds. Text that may be the beginning of a stop text waits."""
        answer = self.answer
        answer.tokens += output.tokens
        answer.versions += output.versions
        answer.logprobs += output.logprobs or []
        answer.prompt_logprobs += output.prompt_logprobs or []
        answer.cached = output.cached
        if output.routing is not None:
            if answer.routing is None:
                answer.routing, answer.computed_from = output.routing, output.computed_from
            else:
                kept = answer.routing[: output.computed_from - answer.computed_from]
                answer.routing = torch.cat([kept, output.routing])
        if self.decoder is not None:
            answer.text += self.decoder.push(self._known(output.tokens))
            if output.finished is not None:
                answer.text += self.decoder.finish()
        # What was shown holds no stop text and no beginning of one.
        found = [(at, stop) for stop in self.stops if (at := answer.text.find(stop, self.shown)) >= 0]
        if found:
            at, answer.stop = min(found)
            answer.text = answer.text[:at]
        elif output.finished == "stop" and answer.tokens[-1] in self.stop_ids:
            answer.stop = answer.tokens[-1]
        end = len(answer.text)
        if output.finished is None:
            held = (n for stop in self.stops for n in range(1, len(stop)) if answer.text.endswith(stop[:n]))
            end -= max(held, default=0)
        else:
            answer.finished, answer.error = output.finished, output.error
            if answer.routing is not None:  # without drafts that were wrong
                computed = len(answer.prompt) + len(answer.tokens) - 1
                answer.routing = answer.routing[: computed - answer.computed_from]
        piece = answer.text[self.shown : end]
        self.shown = max(self.shown, end)
        return piece


__all__ = ["Answer", "Stream"]
