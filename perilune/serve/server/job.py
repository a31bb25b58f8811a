"""A request made ready for the engine, and what its answers are while they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from perilune.chat import Content, Options, Reasoning, Stream, parser
from perilune.chat.parse import CallArguments, CallEnd, CallStart
from perilune.chat.render import END
from perilune.errors import Error
from perilune.serve.answer import Answer
from perilune.serve.async_llm import AsyncLLM
from perilune.serve.request import Logprob, Params
from perilune.serve.server.context import Context
from perilune.serve.server.errors import ApiError, refusal
from perilune.serve.server.grammar import Grammar, Mask, Portable

Event = Reasoning | Content | CallStart | CallArguments | CallEnd


@dataclass(frozen=True)
class Job:
    """One prompt and how it is answered. counted: prompt tokens as usage counts them.

    options: of the parser; None gives the text as it is. constrained: the field that `grammar` comes from.
    marks: depths in the prompt where checkpoints are wanted.
    """

    prompt: list[int]
    counted: int
    params: Params
    stop: tuple[str, ...] = ()
    options: Options | None = None
    grammar: Grammar | None = None
    constrained: str = ""
    marks: tuple[int, ...] = ()
    salt: str = ""
    priority: int = 0


@dataclass
class Piece:
    """What a step adds to an answer. finished: with its last piece, a reason as OpenAI names it."""

    text: str = ""
    events: list[Event] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    finished: str | None = None
    stopped_by: str | int | None = None
    cached: int = 0


async def follow(context: Context, job: Job, index: int = 0) -> AsyncGenerator[Piece, None]:
    """The pieces of one answer; the first is empty and says that the request was taken.

    Raises ApiError for what the engine refuses, and for an answer that fails. index: of several answers to one prompt,
    each with a seed of its own.
    """
    params, mask = job.params, None
    if params.seed is not None and index:
        params = replace(params, seed=params.seed + index)
    options: dict[str, Any] = {"stop": job.stop, "salt": job.salt, "marks": job.marks, "priority": job.priority}
    if job.grammar is not None:
        mask = context.grammars.mask(job.grammar, len(job.prompt), params.max_tokens)
        near = isinstance(context.llm, AsyncLLM)
        options["mask"] = mask if near else Portable(job.grammar.format, len(job.prompt), params.max_tokens)
    stream = None
    if job.options is not None:
        stream = Stream(parser("kimi_k3" if context.k3 else "kimi_k2"), job.options)
        options["special"] = not context.k3
    clock = _Clock(context, params.max_tokens)
    calls = open_ = 0  # begun; of these not ended
    deltas = context.llm.stream(job.prompt, params, **options)
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                output = delta.output
                piece = Piece(delta.text, [], output.tokens, output.logprobs or [], output.prompt_logprobs or [])
                piece.cached = min(output.cached, job.counted)
                clock.step(len(output.tokens))
                if stream is not None:
                    text = delta.text if delta.answer is None else _to_its_end(context, delta.text, delta.answer)
                    piece.events = [*stream.push(text)] if text else []
                    if delta.answer is not None:
                        piece.events += stream.finish()
                    begun = sum(isinstance(event, CallStart) for event in piece.events)
                    open_ += begun - sum(isinstance(event, CallEnd) for event in piece.events)
                    calls += begun
                if delta.answer is not None:
                    if isinstance(options.get("mask"), Portable) and mask is not None:
                        await asyncio.to_thread(mask.replay, [*job.prompt, *delta.answer.tokens])
                    piece.finished = _reason(delta.answer, mask, calls > 0 and not open_, job)
                    piece.stopped_by = delta.answer.stop
                    clock.end(job.counted, piece.cached, piece.finished)
                yield piece
    except Error as error:
        raise refusal(error) from None


def _to_its_end(context: Context, text: str, answer: Answer) -> str:
    """The last text of an answer as its parser wants it: with the token that ends a turn, without one that ends a text.

    Of Kimi-K3's special tokens a text has the markers only, of the K2 family's all.
    """
    words = context.tokenizer
    if context.k3:
        return text + END if answer.stop == words.specials.get(END, "") else text
    ended = answer.stop == words.text_end_id != words.eos_id
    return text.removesuffix(words.decode([words.text_end_id])) if ended else text


def _reason(answer: Answer, mask: Mask | None, calls: bool, job: Job) -> str:
    """Why an answer ended. calls: whether it calls tools, to the end. Raises ApiError for one that failed."""
    if answer.finished == "error":
        if mask is not None and mask.stuck:
            raise ApiError(400, f"{job.constrained}: nothing can follow what was written so far", job.constrained)
        raise ApiError(500, f"the answer failed: {answer.error}")
    if answer.finished == "abort":
        raise ApiError(503, "the server ended the request; try again", headers={"Retry-After": "5"})
    if answer.finished == "deadline":
        raise ApiError(503, "the request ran out of time")
    if answer.finished == "length" or (mask is not None and mask.ending):
        return "length"
    return "tool_calls" if calls else "stop"


async def merged(context: Context, jobs: list[tuple[Job, int]]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Pieces of several answers as they come, each with its place among them."""
    if len(jobs) == 1:
        async with aclosing(follow(context, *jobs[0])) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()

    async def pump(place: int, job: Job, index: int) -> None:
        try:
            async with aclosing(follow(context, job, index)) as pieces:
                async for piece in pieces:
                    queue.put_nowait((place, piece))
            queue.put_nowait((place, None))
        except Exception as error:  # whatever it is, nobody may wait for this answer any more
            queue.put_nowait((place, error))

    tasks = [asyncio.create_task(pump(place, *job)) for place, job in enumerate(jobs)]
    try:
        left = len(tasks)
        while left:
            place, got = await queue.get()
            if isinstance(got, Exception):
                raise got
            if got is None:
                left -= 1
            else:
                yield place, got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Clock:
    """Times of one answer, for the metrics."""

    def __init__(self, context: Context, max_tokens: int, now: Callable[[], float] = time.monotonic) -> None:
        self.metrics, self.now = context.metrics, now
        self.begin = now()
        self.last: float | None = None
        self.tokens = 0
        self.metrics.asked.observe(max_tokens)

    def step(self, tokens: int) -> None:
        if not tokens:
            return
        now = self.now()
        if self.last is None:
            self.metrics.first.observe(now - self.begin)
        else:
            self.metrics.between.observe(now - self.last)
        self.last, self.tokens = now, self.tokens + tokens

    def end(self, prompt: int, cached: int, reason: str) -> None:
        self.metrics.whole.observe(self.now() - self.begin)
        self.metrics.ended(prompt, cached, self.tokens, reason)


__all__ = ["Event", "Job", "Piece", "follow", "merged"]
