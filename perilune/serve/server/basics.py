"""The small endpoints: models, tokens, health, metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

import perilune
from perilune.errors import Error
from perilune.serve.server.backend import ask, shared
from perilune.serve.server.context import Context
from perilune.serve.server.errors import ApiError
from perilune.serve.server.exchange import read_body
from perilune.serve.server.metrics import alive, look, total
from perilune.serve.server.prepare import beside, conversation, tokenize
from perilune.serve.server.reply import word
from perilune.serve.server.schema import Detokenize, Tokenize
from perilune.serve.server.wire import Json


async def models(request: Request) -> Response:
    """The names of the model; one of them with its name in the path."""
    context: Context = request.app.state.context
    context.tenants.who(request)
    listed = [
        {
            "id": name,
            "object": "model",
            "created": context.created,
            "owned_by": "perilune",
            "root": context.config.model_names[0],
            "parent": None,
            "max_model_len": context.longest,
        }
        for name in context.config.model_names
    ]
    wanted = request.path_params.get("name")
    if wanted is None:
        return Json({"object": "list", "data": listed})
    context.check_model(wanted)
    return Json(next(each for each in listed if each["id"] == wanted))


async def tokenize_text(request: Request) -> Response:
    """Tokens of a text or of a conversation."""
    context, _, body, size = await read_body(request, Tokenize)
    context.check_model(body.model)
    return await beside(size, _tokenized, context, body)


def _tokenized(context: Context, body: Tokenize) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise Error("prompt and messages are both given or both missing; give one of them")
    if body.prompt is not None:
        begin = context.tokenizer.bos_id
        ids = [begin] if body.add_special_tokens and begin is not None else []
        ids += context.tokenizer.encode(body.prompt)
    else:
        ids = tokenize(context, conversation(context, body))
    words = [word(context.tokenizer, id) for id in ids] if body.return_token_strs else None
    return Json({"count": len(ids), "max_model_len": context.longest, "tokens": ids, "token_strs": words})


async def detokenize(request: Request) -> Response:
    """The text of tokens, special ones included."""
    context, _, body, size = await read_body(request, Detokenize)
    context.check_model(body.model)
    return await beside(size, _detokenized, context, body)


def _detokenized(context: Context, body: Detokenize) -> Response:
    if outside := [id for id in body.tokens if id >= context.tokenizer.vocab_size]:
        raise ApiError(400, f"tokens holds {outside[0]}; must be 0 to {context.tokenizer.vocab_size - 1}", "tokens")
    return Json({"prompt": context.tokenizer.decode(body.tokens)})


async def health(request: Request) -> Response:
    """200 while requests are taken, else 503. Asks the engine's thread, so that a stuck one is not well."""
    context: Context = request.app.state.context
    if context.draining:
        raise ApiError(503, "the server is shutting down")
    await shared(context.under_way, "health", lambda: ask(context.llm, alive))
    return Json({"status": "ok"})


async def version(request: Request) -> Response:
    """The version of Perilune."""
    return Json({"version": perilune.__version__})


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    context: Context = request.app.state.context
    facts = await shared(context.under_way, "metrics", lambda: ask(context.llm, look))
    return Response(context.metrics.text(total(facts)), media_type="text/plain; version=0.0.4; charset=utf-8")


__all__ = ["detokenize", "health", "metrics", "models", "tokenize_text", "version"]
