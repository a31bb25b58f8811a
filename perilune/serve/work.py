"""What the scheduler asks of the memory, what a step computes, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from perilune.serve.cache.cache import Copy
from perilune.serve.request import Logprob, Request


class Device(Protocol):
    """The bytes behind the ids. Calls take effect in the order they are made, and before the next step."""

    on_grid: bool
    """whether a state can be saved on the grid only, and only where a chunk ends; else it exports inside chunks too"""

    def load(self, slot: int, state: Sequence[int], depth: int) -> None:
        """Give a slot the state saved in the pages `state`, after `depth` tokens; without pages, the empty one."""

    def save(self, slot: int, depth: int, state: Sequence[int]) -> None:
        """Write a slot's state after `depth` tokens into pages; depth is all its tokens, or the last grid point."""

    def accept(self, kept: Sequence[tuple[int, int, int]]) -> None:
        """(slot, tokens of its last chunk, how many of them stay), for slots that decoded."""

    def free(self, slot: int) -> None:
        """Nobody uses the slot."""

    def move(self, copy: Copy) -> None:
        """Write a segment back to the host; its device pages may be written at once."""

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole device pages."""

    def fetch(self, copies: Sequence[Copy]) -> Callable[[], bool]:
        """Begin to copy pages from the host; the result says whether they have arrived."""

    def settle(self) -> None:
        """Copies that were begun and given up are over before whatever comes next."""


@dataclass(frozen=True)
class Chunk:
    """`tokens` of a request from position `start` on; the last `drafts` of them are guesses.

    sampled: how many of the last positions are sampled from (0 in the middle of a prompt). scored: whether every
    position's log probability of the token after it is wanted. decodes: whether it continues an answer.
    exports: depths inside a prefill chunk, on the grid, and the pages that get the states there.
    """

    request: Request
    tokens: list[int]
    start: int
    drafts: int = 0
    sampled: int = 0
    scored: bool = False
    decodes: bool = False
    exports: tuple[tuple[int, list[int]], ...] = ()

    @property
    def rows(self) -> int:
        """How many of the last positions need logits."""
        return len(self.tokens) if self.scored else self.sampled

    @property
    def slot(self) -> int:
        assert self.request.slot is not None
        return self.request.slot


@dataclass
class Result:
    """What the step found for a chunk: one token a sampled position.

    broken: the model's logits are no numbers. stuck: a bias or a mask leaves no token. error: what a callback raised.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob] | None = None
    routing: object = None
    broken: bool = False
    stuck: bool = False
    error: str | None = None


__all__ = ["Chunk", "Device", "Result"]
