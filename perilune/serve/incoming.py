"""A client's wish as a request: everything that can be wrong with it is said before it is queued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from typing import Any

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.serve.request import Params, Request, token_ids


def new_request(
    id: int,
    tokens: Sequence[int],
    params: Params,
    model: ModelConfig,
    now: float,
    seed: int,
    *,
    salt: str,
    turn: int,
    marks: Sequence[int],
    deadline: float | None,
    hold: float | None,
    stop: Callable[[int], bool] | None,
    mask: Callable[[Sequence[int]], Any] | None,
    priority: int,
) -> Request:
    """Fields as in `Request`; deadline and hold in seconds from now. seed: of the engine, for requests without one.

    Raises Error for tokens outside the vocabulary, too long a request, or a time that is none.
    """
    tokens = token_ids("tokens", tokens)
    for name, seconds in (("deadline", deadline), ("hold", hold)):
        if seconds is not None and (isnan(seconds) or (name == "hold" and seconds < 0)):
            raise Error(f"{name} is {seconds}; must be seconds from now, >= 0 for hold")
    if not isinstance(priority, int):
        raise Error(f"priority is {priority!r}; must be an integer")
    if not tokens:
        raise Error("tokens is empty; needs at least one token (a beginning-of-sequence token, say)")
    named = (("tokens", tokens), ("stop_ids", params.stop_ids), ("logit_bias", list(params.logit_bias)))
    for name, ids in named:
        for token in (min(ids), max(ids)) if ids else ():
            if not 0 <= token < model.vocab_size:
                raise Error(f"{name} holds id {token}; the vocabulary is 0..{model.vocab_size - 1}")
    longest = model.max_position_embeddings
    if len(tokens) + params.max_tokens > longest:
        raise Error(f"{len(tokens)} prompt tokens and max_tokens {params.max_tokens} exceed {longest} positions")
    return Request(
        id,
        tokens,
        params,
        now,
        salt,
        turn,
        tuple(marks),
        None if deadline is None else now + deadline,
        hold,
        stop,
        mask,
        priority,
        params.seed if params.seed is not None else hash((seed, id)),
    )


__all__ = ["new_request"]
