"""The short ends of a regular expression: whatever a match begins with, one of them completes it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

_parser: Any = importlib.import_module("re._parser")  # that of the standard library
_MOST = 256  # ends of a pattern
_LONGEST = 1024  # characters of one
# Characters that stand for a class, tried in turn: code points that few patterns leave out come first.
_ORDINARY = [*map(ord, "a0A-_ ."), *range(33, 127), 0xE9, 0x4E2D, 10, 9, 13, *range(128, 256), *range(1, 33)]


def ends(pattern: str) -> frozenset[str]:
    """Texts such that every beginning of a match of `pattern`, the empty one too, becomes one by one of them.

    Empty for a pattern with parts that are no plain regular expression, or with too many ends.
    """
    try:
        whole, inside = _sequence(_parser.parse(pattern))
    except Exception:  # the parser's own errors, nesting that is too deep, or _OtherError
        return frozenset()
    return inside | {whole}


class _OtherError(Exception):
    """A part that has no ends of its own, or too many."""


Part = tuple[str, frozenset[str]]  # a shortest match, and what completes one that has begun


def _sequence(parts: Sequence[Any]) -> Part:
    rest, inside = "", frozenset[str]()
    for kind, value in reversed([*parts]):
        whole, mine = _part(str(kind), value)
        inside = _some(inside | {end + rest for end in mine} | {rest})
        rest = whole + rest
    return rest, _some(inside)


def _part(kind: str, value: Any) -> Part:
    if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        return _character(kind, value), frozenset()
    if kind == "AT":
        return "", frozenset()
    if kind == "SUBPATTERN":
        return _sequence(value[3])
    if kind == "BRANCH":
        shortest, inside = _sequence(value[1][0])
        for way in value[1][1:]:
            whole, mine = _sequence(way)
            shortest, inside = min(shortest, whole, key=len), _some(inside | mine)
        return shortest, inside
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        least, _, body = value
        whole, inside = _sequence(body)
        if least > _MOST or least * len(whole) > _LONGEST or least * len(inside) > 4 * _MOST:
            raise _OtherError
        after = [whole * times for times in range(max(least, 1))]
        return whole * least, _some(frozenset(end + more for more in after for end in (*inside, "")))
    raise _OtherError


def _character(kind: str, value: Any) -> str:
    """A character that a class holds."""
    if kind == "LITERAL":
        return chr(value)
    for code in _ORDINARY:
        if kind == "IN":
            negated = str(value[0][0]) == "NEGATE"
            found = any(_holds(str(each), what, code) for each, what in value) != negated
        else:
            found = code != value if kind == "NOT_LITERAL" else code != 10
        if found:
            return chr(code)
    if kind == "IN" and str(value[0][0]) in ("LITERAL", "RANGE"):
        return chr(value[0][1] if str(value[0][0]) == "LITERAL" else value[0][1][0])
    raise _OtherError


def _holds(kind: str, value: Any, code: int) -> bool:
    if kind in ("LITERAL", "RANGE"):
        low, high = (value, value) if kind == "LITERAL" else value
        return bool(low <= code <= high)
    if kind != "CATEGORY":
        return False
    # In ASCII: grammar libraries differ in what else is a digit, a word or a space.
    name, one = str(value).removeprefix("CATEGORY_"), chr(code) if code < 128 else ""
    member = {"DIGIT": one.isdigit(), "WORD": one.isalnum() or one == "_", "SPACE": one.isspace()}
    return code < 128 and member[name.removeprefix("NOT_")] != name.startswith("NOT_")


def _some(texts: frozenset[str]) -> frozenset[str]:
    if len(texts) > _MOST or any(len(text) > _LONGEST for text in texts):
        raise _OtherError
    return texts


__all__ = ["ends"]
