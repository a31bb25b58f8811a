"""POST /v1/chat/completions and its rendering."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from perilune.chat import join
from perilune.serve.server import reply
from perilune.serve.server.context import Context
from perilune.serve.server.exchange import Exchange, read_body
from perilune.serve.server.job import Job, Piece
from perilune.serve.server.params import answers
from perilune.serve.server.prepare import beside, chat_job, conversation, counted, rendered
from perilune.serve.server.schema import Chat
from perilune.serve.server.wire import Json, event

Object = dict[str, Any]


async def chat_completions(request: Request) -> Response:
    """Answers to a conversation, whole or as a stream of chunks."""
    context, tenant, body, size = await read_body(request, Chat)
    job = await chat_job(context, body, tenant, size)
    n = answers(context, body)
    exchange = Exchange(request, context, tenant, [(job, index) for index in range(n)])
    model = context.check_model(body.model)
    if body.stream:
        return await exchange.stream(lambda pieces: _chunks(context, body, job, n, model, pieces))
    wholes = await exchange.whole()
    choices: list[Object] = []
    for index, whole in enumerate(wholes):
        choice: Object = {"index": index, "message": reply.message(whole), "logprobs": None}
        if body.logprobs:
            choice["logprobs"] = reply.chat_logprobs(context.tokenizer, whole.logprobs)
        choice |= {"finish_reason": whole.finished, "stop_reason": _stop_reason(body, whole.stopped_by)}
        if body.return_token_ids:
            choice["token_ids"] = whole.tokens
        choices.append(choice)
    out = {**reply.head("chat.completion", model, "chatcmpl"), "choices": choices}
    out["usage"] = reply.usage(job.counted, dict(enumerate(wholes)), n)
    if body.prompt_logprobs is not None:
        out["prompt_logprobs"] = reply.prompt_logprobs(context.tokenizer, wholes[0].prompt_logprobs)
    if body.return_token_ids:
        out["prompt_token_ids"] = job.prompt
    return Json(out)


async def render_chat(request: Request) -> Response:
    """What a conversation is to the model: its text, segments and tokens, without an answer."""
    context, _, body, size = await read_body(request, Chat)
    return await beside(size, _rendering, context, body)


def _rendering(context: Context, body: Chat) -> Response:
    segments = rendered(context, conversation(context, body))
    prompt, _ = context.tokenizer.encode_segments(segments)
    shown = [[segment.text, segment.special] for segment in segments]
    return Json(
        {
            "text": join(segments),
            "segments": shown,
            "prompt_token_ids": prompt,
            "prompt_tokens": counted(context, prompt),
        }
    )


async def _chunks(
    context: Context, body: Chat, job: Job, n: int, model: str, pieces: AsyncGenerator[tuple[int, Piece], None]
) -> AsyncGenerator[bytes, None]:
    options = body.stream_options
    head = reply.head("chat.completion.chunk", model, "chatcmpl")
    wholes: dict[int, reply.Whole] = {}

    def chunk(index: int, delta: Object, **more: Any) -> bytes:
        out = {**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}]}
        if options is not None and options.continuous_usage_stats:
            out["usage"] = reply.usage(job.counted, wholes, n)
        elif options is not None and options.include_usage:
            out["usage"] = None
        return event(out)

    async for index, piece in pieces:
        if index not in wholes:
            wholes[index] = reply.Whole()
            first: Object = {"role": "assistant", "content": ""}
            ids = {"prompt_token_ids": job.prompt} if body.return_token_ids and not index else {}
            yield chunk(index, first, **ids)
        whole = wholes[index]
        whole.tokens += piece.tokens
        whole.cached = max(whole.cached, piece.cached)
        deltas = [delta for each in piece.events if (delta := reply.delta(each)) is not None]
        more: Object = {}
        if body.logprobs and piece.logprobs:
            more["logprobs"] = reply.chat_logprobs(context.tokenizer, piece.logprobs)
        if body.return_token_ids and piece.tokens:
            more["token_ids"] = piece.tokens
        if piece.finished is not None:
            end = {"finish_reason": piece.finished, "stop_reason": _stop_reason(body, piece.stopped_by)}
            deltas.append({})
        elif not deltas and more:
            deltas.append({})  # tokens whose text waits for what follows
        for place, delta in enumerate(deltas):
            last = place == len(deltas) - 1
            extra = {**(more if not place else {}), **(end if last and piece.finished is not None else {})}
            yield chunk(index, delta, **extra)
    if options is not None and options.include_usage:
        yield event({**head, "choices": [], "usage": reply.usage(job.counted, wholes, n)})


def _stop_reason(body: Chat, stopped_by: str | int | None) -> str | int | None:
    """The stop text or token of the request that ended the answer; None for the model's own end."""
    return stopped_by if isinstance(stopped_by, str) or stopped_by in (body.stop_token_ids or ()) else None


__all__ = ["chat_completions", "render_chat"]
