"""Draft tokens: who guesses them, and how many are worth verifying.

A draft is verified in the step that computes it (`sampling`): the tokens of the answer are those that would have been
drawn without drafts, so speculation changes time alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from perilune.serve.request import Request
from perilune.serve.work import Chunk


class Drafter(Protocol):
    """Guesses how sequences go on."""

    def propose(self, requests: Sequence[Request], width: int) -> list[list[int]]:
        """Up to `width` token ids for each request, after its committed tokens; none where no guess is worth it."""


class NgramDrafter:
    """Prompt lookup: what came after the last few tokens when they were seen before, the longest match first.

    longest, shortest: tokens of the match. Each request's tokens are indexed once, as they come.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self._seen: dict[int, tuple[int, dict[tuple[int, ...], int]]] = {}

    def propose(self, requests: Sequence[Request], width: int) -> list[list[int]]:
        alive = {request.id for request in requests}
        self._seen = {id: seen for id, seen in self._seen.items() if id in alive}
        return [self._one(request, width) for request in requests]

    def _one(self, request: Request, width: int) -> list[int]:
        tokens = request.tokens
        done, index = self._seen.get(request.id, (0, {}))
        # What follows the last tokens is not known yet: ends before the last token only.
        for end in range(done + 1, len(tokens)):
            for size in self.sizes:
                if end >= size:
                    index[tuple(tokens[end - size : end])] = end
        self._seen[request.id] = (len(tokens) - 1, index)
        for size in self.sizes:
            at = index.get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if at is not None:
                period = len(tokens) - at
                return [tokens[at + i % period] for i in range(width)]
        return []


class Width:
    """How many drafts to verify: the most committed tokens a second, by a table of measured step times.

    seconds: (sequences, tokens a sequence) -> a step's seconds; other batches take the nearest smaller entry's. Without
    a table every step costs the same, and the width is the largest that helps.
    """

    def __init__(self, most: int, seconds: Mapping[tuple[int, int], float] | None = None) -> None:
        self.most, self.seconds = most, dict(seconds or {})

    def choose(self, sequences: int, accept: float) -> int:
        """The width for `sequences` sequences whose drafts are right with probability `accept`, each on its own."""
        best, width = 0.0, 0
        for drafts in range(self.most + 1):
            committed = sum(accept**i for i in range(drafts + 1))
            rate = committed / self._cost(sequences, 1 + drafts)
            if rate > best * (1 + 1e-9):
                best, width = rate, drafts
        return width

    def observe(self, sequences: int, tokens: int, seconds: float) -> None:
        """A step of `sequences` sequences of `tokens` tokens took so long."""
        key = (_bucket(sequences), tokens)
        old = self.seconds.get(key, seconds)
        self.seconds[key] = 0.9 * old + 0.1 * seconds

    def _cost(self, sequences: int, tokens: int) -> float:
        bucket = _bucket(sequences)
        while bucket and (bucket, tokens) not in self.seconds:
            bucket //= 2
        if bucket:
            return self.seconds[bucket, tokens]
        # Unmeasured widths cost what the nearest smaller measured one costs: they are tried, and then measured.
        return self._cost(sequences, tokens - 1) if tokens > 1 else 1.0


class Speculation:
    """What an engine drafts before a step, and what it learns from one. most: drafts of a sequence."""

    def __init__(self, drafter: Drafter, most: int, vocabulary: int) -> None:
        self.drafter, self.width, self.vocabulary = drafter, Width(most), vocabulary

    def propose(self, requests: Sequence[Request]) -> None:
        """Set the drafts of decoding requests."""
        if not self.width.most or not requests:
            return
        accept = sum(request.accept for request in requests) / len(requests)
        width = self.width.choose(len(requests), accept)
        drafts = self.drafter.propose(requests, width) if width else [[] for _ in requests]
        for request, mine in zip(requests, drafts, strict=True):
            request.drafts = [token for token in mine[:width] if 0 <= token < self.vocabulary]

    def observe(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """A step took so long."""
        if all(chunk.decodes for chunk in chunks):
            self.width.observe(len(chunks), max(len(chunk.tokens) for chunk in chunks), seconds)


def _bucket(sequences: int) -> int:
    return 1 << (max(sequences, 1).bit_length() - 1)


__all__ = ["Drafter", "NgramDrafter", "Speculation", "Width"]
