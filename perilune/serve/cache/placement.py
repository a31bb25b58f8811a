"""Where a request leaves checkpoints. A checkpoint costs as much as 16,000 tokens of KV, so there are few.

Kinds: "fork" where a second request was seen to leave the path of a first one; "mark" where the client said so;
"prompt" at the end of the prompt; "turn" after the last committed token, which is where the next turn of a
conversation begins again, where the answer is long.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from perilune.serve.cache.tree import Match


@dataclass(frozen=True)
class Mark:
    """A checkpoint to make: after `depth` tokens. origin: the arithmetic of the state: prefill, decode or exact."""

    depth: int
    kind: str
    origin: str = "prefill"


@dataclass(frozen=True)
class Placement:
    """guard: distance of one more checkpoint before the prompt's end, for prompts rewritten near their end; 0 is none.

    low_fork: with a fork, one more checkpoint at the tenth percentile of the depths where recent requests left the same
    path, for shared prefixes whose length changes from request to request.
    min_fork: least tokens that a fork saves over the checkpoint before it. min_turn: least tokens of an answer
    whose end gets a state: a shorter one is computed again sooner than a state is worth its bytes.
    keep: checkpoints that stay on a path without forks, counted from its end; 0 keeps all.
    every: one more checkpoint after so many computed tokens; 0 is none. prompt_end: whether the prompt's end gets one
    although the turn's end does.
    """

    guard: int = 0
    min_fork: int = 1
    low_fork: bool = True
    min_turn: int = 1024
    keep: int = 2
    every: int = 0
    prompt_end: bool = True

    def plan(
        self,
        match: Match,
        prompt: int,
        total: int,
        grid: int,
        exact: bool = False,
        marks: Sequence[int] = (),
        splits: Collection[int] = (),
    ) -> list[Mark]:
        """Checkpoints for a request of `prompt` tokens that ends at `total`, deeper than its hit, in order of depth.

        Prefill leaves states on the `grid` and at most at prompt - 1, so that the same prompt sent again hits.
        exact: whether a turn end may lie off the grid. marks: depths that the client asks for.
        splits: KV depths of recent requests with the same hit, this one's included.
        """
        end = floor(prompt - 1, grid)
        wanted = {floor(mark, grid): "mark" for mark in marks if mark < prompt}
        if self.every:
            steps = range(match.depth + self.every, end, self.every)
            wanted |= {floor(step, grid): "step" for step in steps}
        fork = floor(match.kv_depth, grid)
        if fork - match.depth >= self.min_fork and fork < end:
            wanted[fork] = "fork"
            if self.low_fork and len(splits) > 1:
                low = floor(sorted(splits)[len(splits) // 10], grid)
                if match.depth + self.min_fork <= low < fork:
                    wanted.setdefault(low, "fork")
        if self.guard and end - self.guard > match.depth:
            wanted.setdefault(floor(end - self.guard, grid), "guard")
        turn = total if exact else floor(total, grid)
        if total - prompt >= self.min_turn and turn > end:
            wanted[turn] = "turn"
        if self.prompt_end or "turn" not in wanted.values():
            wanted.setdefault(end, "prompt")
        return [
            Mark(depth, kind, "decode" if depth > prompt else "prefill")
            for depth, kind in sorted(wanted.items())
            if depth > match.depth
        ]


def floor(depth: int, grid: int) -> int:
    return depth // grid * grid


__all__ = ["Mark", "Placement"]
