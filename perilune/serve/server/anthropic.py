"""POST /v1/messages: Anthropic's Messages API, which coding tools speak."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from perilune.chat import Content, Reasoning
from perilune.chat.parse import CallArguments, CallStart
from perilune.errors import Error
from perilune.serve.server.anthropic_in import CountTokens, Messages, Translated, translate
from perilune.serve.server.context import Context
from perilune.serve.server.errors import anthropic_error, refusal
from perilune.serve.server.exchange import Exchange, read_body
from perilune.serve.server.job import Event, Job, Piece
from perilune.serve.server.prepare import beside, chat_job, conversation, counted, tokenize
from perilune.serve.server.reply import Whole
from perilune.serve.server.tenants import Tenant
from perilune.serve.server.wire import Json, event

Object = dict[str, Any]
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SIGNATURE = "perilune"  # clients want one; there is nothing to sign


async def messages(request: Request) -> Response:
    """An answer as content blocks, whole or as a stream of events."""
    context, tenant, body, size = await read_body(request, Messages)
    translated = translate(body)
    job = await _job(context, tenant, translated, size)
    exchange = Exchange(request, context, tenant, [(job, 0)])
    if body.stream:
        return await exchange.stream(
            lambda pieces: _events(body.model, job, pieces),
            b"",
            lambda e: event(anthropic_error(e.status, e.message), "error"),
        )
    (whole,) = await exchange.whole()
    reason, sequence = _stop(whole.finished, whole.stopped_by)
    out = {**_head(body.model), "content": _blocks(whole.events), "stop_reason": reason, "stop_sequence": sequence}
    return Json(out | {"usage": _usage(job, whole)})


async def count_tokens(request: Request) -> Response:
    """Input tokens of a request, without an answer."""
    context, _, body, size = await read_body(request, CountTokens)
    translated = translate(body)
    try:
        prompt = await beside(size, tokenize, context, conversation(context, translated.chat))
    except Error as error:
        raise refusal(error, translated.renamed) from None
    return Json({"input_tokens": counted(context, prompt)})


async def _job(context: Context, tenant: Tenant, translated: Translated, size: int) -> Job:
    try:
        return await chat_job(context, translated.chat, tenant, size, translated.marks)
    except Error as error:
        raise refusal(error, translated.renamed) from None


def _head(model: str) -> Object:
    return {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": model}


def _stop(finished: str | None, stopped_by: str | int | None) -> tuple[str, str | None]:
    if finished == "stop" and isinstance(stopped_by, str):
        return "stop_sequence", stopped_by
    return _REASONS[finished or "stop"], None


def _usage(job: Job, whole: Whole) -> Object:
    return {
        "input_tokens": job.counted - whole.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": whole.cached,
        "output_tokens": len(whole.tokens),
    }


def _blocks(events: list[Event]) -> list[Object]:
    blocks: list[Object] = []
    written: list[str] = []

    def close() -> None:
        if blocks and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = _object("".join(written))
        written.clear()

    for each in events:
        block = _block(each)
        if block is not None and (not blocks or isinstance(each, CallStart) or blocks[-1]["type"] != block["type"]):
            close()
            blocks.append(block)
        if isinstance(each, Reasoning):
            blocks[-1]["thinking"] += each.text
        elif isinstance(each, Content):
            blocks[-1]["text"] += each.text
        elif isinstance(each, CallArguments):
            written.append(each.text)
    close()
    return blocks


def _object(text: str) -> Any:
    """Arguments as an object; {} for those that were cut off."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {"value": value}


def _block(each: Event) -> Object | None:
    """The empty block that an event belongs to."""
    if isinstance(each, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": _SIGNATURE}
    if isinstance(each, Content):
        return {"type": "text", "text": ""}
    if isinstance(each, CallStart):
        # Clients keep results by id for a whole conversation.
        return {"type": "tool_use", "id": f"toolu_{uuid4().hex[:24]}", "name": each.name, "input": {}}
    return None


async def _events(model: str, job: Job, pieces: AsyncGenerator[tuple[int, Piece], None]) -> AsyncGenerator[bytes, None]:
    whole = Whole()
    start = {**_head(model), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(job, whole)}
    yield event({"type": "message_start", "message": start}, "message_start")
    yield event({"type": "ping"}, "ping")
    index, kind = -1, ""

    def close() -> list[bytes]:
        if index < 0:
            return []
        out = []
        if kind == "thinking":
            out.append(delta({"type": "signature_delta", "signature": _SIGNATURE}))
        return [*out, event({"type": "content_block_stop", "index": index}, "content_block_stop")]

    def delta(what: Object) -> bytes:
        return event({"type": "content_block_delta", "index": index, "delta": what}, "content_block_delta")

    async for _, piece in pieces:
        whole.add(piece)
        for each in piece.events:
            block = _block(each)
            if block is not None and (isinstance(each, CallStart) or kind != block["type"]):
                for chunk in close():
                    yield chunk
                index, kind = index + 1, block["type"]
                shown = {**block, "signature": ""} if kind == "thinking" else block
                begin = {"type": "content_block_start", "index": index, "content_block": shown}
                yield event(begin, "content_block_start")
            if isinstance(each, Reasoning):
                yield delta({"type": "thinking_delta", "thinking": each.text})
            elif isinstance(each, Content):
                yield delta({"type": "text_delta", "text": each.text})
            elif isinstance(each, CallArguments):
                yield delta({"type": "input_json_delta", "partial_json": each.text})
    for chunk in close():
        yield chunk
    reason, sequence = _stop(whole.finished, whole.stopped_by)
    end = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": sequence}}
    yield event(end | {"usage": _usage(job, whole)}, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


__all__ = ["count_tokens", "messages"]
