"""The unit that rendering hands to the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Segment(NamedTuple):
    """A piece of a rendered conversation, encoded on its own.

    text: the characters. Never empty.
    special: True for exactly one special token, named by `text`; False for ordinary text, in which nothing is ever
        recognised as a special token, however it is spelled. This is what keeps a user from writing a marker.
    by_model: the model itself produces this text when it plays the assistant: the positions a fine-tuning loss counts.
    """

    text: str
    special: bool
    by_model: bool = False


def join(segments: Iterable[Segment]) -> str:
    """The rendering as one string, for people and logs; encoding it as one string would lose the barrier."""
    return "".join(segment.text for segment in segments)


__all__ = ["Segment", "join"]
