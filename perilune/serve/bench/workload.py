"""What is sent: prompts of common English words, so that any server can read them, and when.

A length in tokens becomes a number of words by `words_per_token`, which the client measures on the server itself. The
same seed gives the same prompts; equal prefixes are equal texts. Items are made as they are sent: the prompts of a long
trace would fill the memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b

from perilune.errors import Error
from perilune.serve.simulate import Trace

# One token each in large vocabularies, and enough of them that the experts of a sparse model are all used.
_COMMON = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part over new sound take only little work know place
year live me back give most very after thing our just name good sentence man think say great where help through much
before line right too mean old any same tell boy follow came want show also around form three small set put end does
another well large must big even such because turn here why ask went men read need land different home us move try kind
hand picture again change off play spell air away animal house point page letter mother answer found study still learn
should world high every near add food between own below country plant last school father keep tree never start city
"""
WORDS = _COMMON.split()


POOL = 1 << 17  # words that texts are cut from


@dataclass(frozen=True)
class Item:
    """One request. at: seconds after the start, where the load has times of its own. output: tokens to answer."""

    prompt: str
    output: int
    at: float = 0.0


def random_items(count: int, tokens: int, output: int, words_per_token: float, seed: int = 0) -> Iterator[Item]:
    """Prompts of `tokens` tokens that share nothing. Raises Error for tokens < 1."""
    length = _length("tokens", tokens, words_per_token)
    return (Item(_text((seed, "random", i), length), output) for i in range(count))


def shared_items(
    count: int, prefixes: int, prefix_tokens: int, tokens: int, output: int, words_per_token: float, seed: int = 0
) -> Iterator[Item]:
    """Prompts that begin with one of some prefixes, drawn for each, and end with `tokens` tokens of their own.

    Raises Error for a number < 1.
    """
    if prefixes < 1:
        raise Error(f"prefixes is {prefixes}; must be >= 1")
    shared, own = _length("prefix_tokens", prefix_tokens, words_per_token), _length("tokens", tokens, words_per_token)
    draw = random.Random(f"{seed} choices")
    return (
        Item(f"{_text((seed, 'prefix', draw.randrange(prefixes)), shared)} {_text((seed, 'own', i), own)}", output)
        for i in range(count)
    )


def trace_items(
    trace: Trace, words_per_token: float, speed: float = 1.0, shrink: int = 1, seed: int = 0
) -> Iterator[Item]:
    """A trace's requests: its shared units are equal texts. speed: times as fast; shrink: divides all lengths.

    Raises Error for a speed <= 0 or a shrink that does not divide the trace's unit.
    """
    if not speed > 0:
        raise Error(f"speed is {speed}; must be > 0")
    if shrink < 1 or trace.unit % shrink:
        raise Error(f"shrink is {shrink}; must divide the {trace.unit} tokens of the trace's unit")
    unit = _length("unit", trace.unit // shrink, words_per_token)

    def items() -> Iterator[Item]:
        for number, request in enumerate(trace.requests):
            parts = [_text((seed, "unit", key), unit) for key in request.keys[: request.prompt // trace.unit]]
            rest = round(request.prompt % trace.unit / shrink * words_per_token)
            parts += [_text((seed, "rest", number), rest)] if rest else []
            at = (request.at - trace.requests[0].at) / speed
            yield Item(" ".join(parts) or WORDS[0], max(1, request.output // shrink), at)

    return items()


def poisson(items: Iterable[Item], rate: float, seed: int = 0) -> Iterator[Item]:
    """The same items at the times of a Poisson process of `rate` a second, the first at 0. Raises Error for another."""
    if not 0 < rate < float("inf"):
        raise Error(f"rate is {rate}; must be > 0 and finite")

    def timed() -> Iterator[Item]:
        draw, at = random.Random(f"{seed} arrivals"), 0.0
        for item in items:
            yield replace(item, at=at)
            at += draw.expovariate(rate)

    return timed()


def _length(name: str, tokens: int, words_per_token: float) -> int:
    if tokens < 1:
        raise Error(f"{name} is {tokens}; must be >= 1")
    return max(1, round(tokens * words_per_token))


def _text(key: object, words: int) -> str:
    """The text of a key: eight words that name it, then a cut of the pool. Microseconds, since it delays the load."""
    digest = blake2b(repr(key).encode(), digest_size=24).digest()
    name = [WORDS[int.from_bytes(digest[i : i + 2], "little") % len(WORDS)] for i in range(0, 16, 2)][:words]
    pool, rest = _pool(), words - len(name)
    start = int.from_bytes(digest[16:], "little") % POOL
    cut = pool[start : start + rest]
    while len(cut) < rest:
        cut = cut + pool[: rest - len(cut)]
    return " ".join(name + cut)


@lru_cache
def _pool() -> list[str]:
    return random.Random("pool").choices(WORDS, k=POOL)


__all__ = ["WORDS", "Item", "poisson", "random_items", "shared_items", "trace_items"]
