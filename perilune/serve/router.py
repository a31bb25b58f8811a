"""Which of several engines a request goes to: the one that has least to compute until the request's first token.

What an engine has cached is not asked but remembered: the prompts that went to it, by chained hashes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

UNIT = 512  # tokens of a hash
KEYS = 1 << 16  # that are remembered of an engine, the last used
RUNNING = 256  # prompt tokens that an answer on its way counts as


@dataclass
class Load:
    """One engine. waiting: prompt tokens that it has to compute, by request; running: requests that have begun."""

    waiting: dict[int, int] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    known: OrderedDict[int, None] = field(default_factory=OrderedDict)
    alive: bool = True

    @property
    def work(self) -> int:
        """In prompt tokens."""
        return sum(self.waiting.values()) + RUNNING * len(self.running)


class Router:
    """engines: how many there are."""

    def __init__(self, engines: int) -> None:
        self.loads = [Load() for _ in range(engines)]

    def choose(self, request: int, tokens: Sequence[int], salt: str = "") -> int | None:
        """The engine for a request; None if none is alive."""
        keys = _keys(tokens, salt)
        best: tuple[int, int, int] | None = None
        for number, load in enumerate(self.loads):
            if load.alive:
                left = len(tokens) - UNIT * _prefix(keys, load)
                cost = (load.work + left, len(load.running), number)
                best = cost if best is None else min(best, cost)
        if best is None:
            return None
        load = self.loads[best[2]]
        load.waiting[request] = len(tokens) - UNIT * _prefix(keys, load)
        for key in keys:
            load.known[key] = None
            load.known.move_to_end(key)
        while len(load.known) > KEYS:
            load.known.popitem(last=False)
        return best[2]

    def began(self, engine: int, request: int) -> None:
        """Its first token has come."""
        if self.loads[engine].waiting.pop(request, None) is not None:
            self.loads[engine].running.add(request)

    def ended(self, engine: int, request: int) -> None:
        """It is over, in whatever way."""
        self.loads[engine].waiting.pop(request, None)
        self.loads[engine].running.discard(request)

    def forget(self) -> None:
        """Nothing is cached anywhere: the weights have changed."""
        for load in self.loads:
            load.known.clear()


def _keys(tokens: Sequence[int], salt: str) -> list[int]:
    keys, key = [], hash(salt)
    for end in range(UNIT, len(tokens) + 1, UNIT):
        key = hash((key, *tokens[end - UNIT : end]))
        keys.append(key)
    return keys


def _prefix(keys: Sequence[int], load: Load) -> int:
    """How many of the first keys are known."""
    return next((i for i, key in enumerate(keys) if key not in load.known), len(keys))


__all__ = ["Router"]
