"""Sampling fields of a request -> the engine's parameters."""

from __future__ import annotations

from perilune.errors import Error
from perilune.serve.request import Params
from perilune.serve.server.context import Context
from perilune.serve.server.schema import Chat, Completion, Sampling

_MOST_STOP = 256  # characters of a stop text: text is held back for as long as it may be the beginning of one


def answer_params(context: Context, body: Sampling, prompt: int, constrained: bool) -> Params:
    """Parameters for a prompt of so many tokens. constrained: a grammar rules the answer.

    Raises Error that names the field for what does not fit together, or does not fit the model.
    """
    vocabulary = context.vocabulary
    room = context.longest - prompt
    if room < 1:
        what = "messages" if isinstance(body, Chat) else "prompt"
        raise Error(f"{what} has {prompt} tokens; allowed: up to {context.longest - 1}, with room for an answer")
    asked = _max_tokens(body)
    if asked is not None and asked > room:
        raise Error(
            f"max_tokens is {asked}; allowed: up to {room}, since the prompt has {prompt} tokens and prompt and answer "
            f"together may have {context.longest}"
        )
    most = min(room, context.config.default_max_tokens) if asked is None else max(1, asked)
    least = min(body.min_tokens, most)
    if body.min_tokens > most:
        raise Error(f"min_tokens is {body.min_tokens}; allowed: up to max_tokens, {most}")
    if constrained and (body.min_tokens or body.ignore_eos):
        field = "min_tokens" if body.min_tokens else "ignore_eos"
        raise Error(f"{field} is set; allowed: where no grammar rules the answer")
    bias: dict[int, float] = {}
    for token, value in (body.logit_bias or {}).items():
        if not token.isdecimal() or not token.isascii() or len(token) > 9 or int(token) >= vocabulary:
            raise Error(f"logit_bias names token {token[:40]!r}; must be an id, 0 to {vocabulary - 1}")
        bias[int(token)] = value
    ends = [] if body.ignore_eos else [context.tokenizer.eos_id, context.tokenizer.text_end_id]
    for end in body.stop_token_ids or ():
        if end >= vocabulary:
            raise Error(f"stop_token_ids holds {end}; must be ids, 0 to {vocabulary - 1}")
    temperature = 1.0 if body.temperature is None else body.temperature
    return Params(
        max_tokens=most,
        # Closer to 0 than floating point can divide by.
        temperature=0.0 if temperature < 1e-6 else temperature,
        top_k=None if body.top_k in (None, 0, -1) else body.top_k,
        top_p=None if body.top_p in (None, 1.0) else body.top_p,
        min_p=body.min_p or None,
        seed=body.seed,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=bias,
        stop_ids=tuple(sorted({*ends, *(body.stop_token_ids or ())})),
        min_tokens=least,
        logprobs=_logprobs(body),
        prompt_logprobs=_prompt_logprobs(body),
    )


def stops(context: Context, body: Sampling) -> tuple[str, ...]:
    """The stop texts. Raises Error that names the field."""
    texts = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(texts) > context.config.max_stops:
        raise Error(f"stop holds {len(texts)} texts; allowed: up to {context.config.max_stops}")
    for text in texts:
        if not 0 < len(text) <= _MOST_STOP:
            raise Error(f"stop holds a text of {len(text)} characters; allowed: 1 to {_MOST_STOP}")
    return tuple(texts)


def answers(context: Context, body: Sampling) -> int:
    """How many answers are wanted. Raises Error beyond the server's limit."""
    n = body.n or 1
    if n > context.config.max_n:
        raise Error(f"n is {n}; allowed: 1 to {context.config.max_n}")
    if n > 1 and body.temperature is not None and body.temperature < 1e-6:
        raise Error(f"n is {n}; allowed: 1 at temperature 0, where all answers are the same")
    return n


def check_policy(policy: str | None, body: Sampling) -> None:
    """Raise Error for what Moonshot's own service refuses, where the server is told to."""
    if policy is None:
        return
    if (body.n or 1) != 1:
        raise Error(f"n is {body.n}; allowed: 1 (request policy {policy})")
    if body.temperature is not None and body.temperature > 1:
        raise Error(f"temperature is {body.temperature}; allowed: 0 to 1 (request policy {policy})")
    if body.top_p not in (None, 0.95):
        raise Error(f"top_p is {body.top_p}; allowed: 0.95 (request policy {policy})")
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(body, name):
            raise Error(f"{name} is {getattr(body, name)}; allowed: 0 (request policy {policy})")


def _max_tokens(body: Sampling) -> int | None:
    most = body.max_tokens
    if isinstance(body, Chat):
        if most == 0:
            raise Error("max_tokens is 0; must be >= 1")
        if most is not None and body.max_completion_tokens not in (None, most):
            raise Error(f"max_completion_tokens is {body.max_completion_tokens}, max_tokens {most}; give one of them")
        return body.max_completion_tokens or most
    return 16 if most is None else most


def _logprobs(body: Sampling) -> int | None:
    if isinstance(body, Completion):
        return body.logprobs
    if isinstance(body, Chat):
        if body.top_logprobs is not None and not body.logprobs:
            raise Error("top_logprobs is set; allowed: together with logprobs true")
        return (body.top_logprobs or 0) if body.logprobs else None
    return None


def _prompt_logprobs(body: Sampling) -> int | None:
    if body.stream and body.prompt_logprobs is not None:
        raise Error("prompt_logprobs is set; allowed: without stream")
    if isinstance(body, Completion) and body.echo and body.logprobs is not None:
        return max(body.logprobs, body.prompt_logprobs or 0)
    return body.prompt_logprobs


__all__ = ["answer_params", "answers", "check_policy", "stops"]
