"""POST /v1/completions: a text, or token ids, continued."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from perilune.chat.request import check_response_format
from perilune.errors import Error
from perilune.serve.server import reply
from perilune.serve.server.context import Context
from perilune.serve.server.exchange import Exchange, read_body
from perilune.serve.server.job import Job, Piece
from perilune.serve.server.params import answer_params, answers, check_policy, stops
from perilune.serve.server.prepare import SLOW, beside, compiled, priority
from perilune.serve.server.schema import Completion
from perilune.serve.server.structure import body_format
from perilune.serve.server.tenants import Tenant
from perilune.serve.server.wire import Json, event

Object = dict[str, Any]
_MOST_PROMPTS = 256


async def completions(request: Request) -> Response:
    """Continuations of one prompt or several, whole or as a stream of chunks."""
    context, tenant, body, size = await read_body(request, Completion)
    model = context.check_model(body.model)
    check_policy(context.config.request_policy, body)
    n = answers(context, body)
    jobs = await _jobs(context, body, tenant, size)
    exchange = Exchange(request, context, tenant, [(job, index) for job in jobs for index in range(n)])
    if body.stream:
        return await exchange.stream(lambda pieces: _chunks(context, body, jobs, n, model, pieces))
    wholes = await exchange.whole()
    choices: list[Object] = []
    for place, whole in enumerate(wholes):
        job = jobs[place // n]
        if body.max_tokens == 0:
            whole.text, whole.tokens, whole.logprobs, whole.finished, whole.stopped_by = "", [], [], "length", None
        text = (_echo(context, job) if body.echo else "") + whole.text
        choice: Object = {"index": place, "text": text, "logprobs": None, "finish_reason": whole.finished}
        choice["stop_reason"] = whole.stopped_by if isinstance(whole.stopped_by, str) else None
        if body.logprobs is not None:
            choice["logprobs"] = _logprobs(context, body, job, whole)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = reply.prompt_logprobs(context.tokenizer, whole.prompt_logprobs)
        if body.return_token_ids:
            choice |= {"token_ids": whole.tokens, "prompt_token_ids": job.prompt}
        choices.append(choice)
    out = {**reply.head("text_completion", model, "cmpl"), "choices": choices}
    out["usage"] = reply.usage(sum(job.counted for job in jobs), dict(enumerate(wholes)), n)
    return Json(out)


async def _jobs(context: Context, body: Completion, tenant: Tenant, size: int) -> list[Job]:
    if body.suffix:
        raise Error("suffix is set; allowed: none, the model only continues")
    if body.best_of not in (None, body.n or 1):
        raise Error(f"best_of is {body.best_of}; allowed: n, {body.n or 1}")
    if body.stream and body.echo and body.logprobs is not None:
        raise Error("stream is true; allowed: false, with echo and logprobs together")
    if body.response_format is not None and not isinstance(body.response_format, dict):
        raise Error(f"response_format is {type(body.response_format).__name__}; must be an object")
    if (body.response_format or {}).get("type") != "structural_tag":
        check_response_format(body.response_format)
    schemas = body.response_format or body.structured_outputs
    format = await beside(SLOW if schemas else size, body_format, body.response_format, body.structured_outputs)
    why = "structured_outputs" if body.structured_outputs is not None else "response_format"
    grammar = await compiled(context, format, why)
    jobs = []
    for tokens in await beside(size, _prompts, context, body.prompt):
        params = answer_params(context, body, len(tokens), grammar is not None)
        salt, asked = tenant.salted(body.cache_salt), priority(context, body.priority)
        stop = stops(context, body)
        jobs.append(Job(tokens, len(tokens), params, stop, None, grammar, why, salt=salt, priority=asked))
    return jobs


def _prompts(context: Context, prompt: Any) -> list[list[int]]:
    """The prompts as token ids; a text begins with the beginning-of-sequence token. Raises Error."""
    many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    each = prompt if many else [prompt]
    if len(each) > _MOST_PROMPTS:
        raise Error(f"prompt holds {len(each)} prompts; allowed: up to {_MOST_PROMPTS}")
    vocabulary, tokenizer = context.vocabulary, context.tokenizer
    out: list[list[int]] = []
    for place, one in enumerate(each):
        where = f"prompt[{place}]" if many else "prompt"
        if isinstance(one, str):
            begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            out.append(begin + tokenizer.encode(one))
        elif not isinstance(one, list) or not all(type(token) is int for token in one):
            raise Error(f"{where} is of type {type(one).__name__}; must be a text or a list of token ids")
        elif not all(0 <= token < vocabulary for token in one):
            raise Error(f"{where} holds a token id outside the vocabulary, 0 to {vocabulary - 1}")
        else:
            out.append(one)
        if not out[-1]:
            raise Error(f"{where} is empty; needs at least one token")
    return out


def _echo(context: Context, job: Job) -> str:
    return context.tokenizer.decode([t for t in job.prompt if t < context.tokenizer.vocab_size], skip_special=True)


def _logprobs(context: Context, body: Completion, job: Job, whole: reply.Whole) -> Object:
    scores: Sequence[Any] = whole.logprobs
    tokens = whole.tokens
    if body.echo:
        scores, tokens = [None, *whole.prompt_logprobs, *scores], [*job.prompt, *tokens]
    return reply.text_logprobs(context.tokenizer, scores, tokens, reply.Offsets(context.tokenizer))


async def _chunks(
    context: Context,
    body: Completion,
    jobs: Sequence[Job],
    n: int,
    model: str,
    pieces: AsyncGenerator[tuple[int, Piece], None],
) -> AsyncGenerator[bytes, None]:
    options = body.stream_options
    head = reply.head("text_completion", model, "cmpl")
    prompt = sum(job.counted for job in jobs)
    wholes: dict[int, reply.Whole] = {}
    offsets: dict[int, reply.Offsets] = {}
    async for place, piece in pieces:
        job = jobs[place // n]
        if body.max_tokens == 0:
            piece = Piece(finished=piece.finished and "length", cached=piece.cached)
        fresh = place not in wholes
        whole = wholes.setdefault(place, reply.Whole())
        whole.tokens += piece.tokens
        whole.cached = max(whole.cached, piece.cached)
        text = (_echo(context, job) if fresh and body.echo else "") + piece.text
        if not (text or piece.tokens or piece.finished is not None):
            continue
        choice: Object = {"index": place, "text": text, "logprobs": None, "finish_reason": piece.finished}
        if body.logprobs is not None and piece.tokens:
            begins = offsets.setdefault(place, reply.Offsets(context.tokenizer))
            choice["logprobs"] = reply.text_logprobs(context.tokenizer, piece.logprobs, piece.tokens, begins)
        if body.return_token_ids:
            choice["token_ids"] = piece.tokens
        out = {**head, "choices": [choice]}
        if options is not None and options.continuous_usage_stats:
            out["usage"] = reply.usage(prompt, wholes, n)
        yield event(out)
    if options is not None and options.include_usage:
        yield event({**head, "choices": [], "usage": reply.usage(prompt, wholes, n)})


__all__ = ["completions"]
