"""How grammars spell the markers of a chat format: one control character each.

JSON text and ordinary text have no place for control characters, so that a marker's token is allowed where the grammar
names the marker and nowhere else. Tokens that hold such a character are never allowed.
"""

from __future__ import annotations

import re

from perilune.errors import Error

K3 = {"<|open|>": "\x01", "<|close|>": "\x02", "<|sep|>": "\x03"}
K2 = {
    "<|tool_calls_section_begin|>": "\x01",
    "<|tool_calls_section_end|>": "\x02",
    "<|tool_call_begin|>": "\x03",
    "<|tool_call_argument_begin|>": "\x04",
    "<|tool_call_end|>": "\x05",
    "<think>": "\x06",
    "</think>": "\x07",
}
RESERVED = "\x01\x02\x03\x04\x05\x06\x07"
OPEN, CLOSE, SEP = K3.values()
# A text may not spell a marker either: parsers read text.
SPELLED = (*K3, *K2, "<|end_of_msg|>", "<|im_end|>")

_CHARACTER = r"\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\u\{[0-9A-Fa-f]+\}|\\c[A-Za-z]|\\.|."
_ONE = re.compile(_CHARACTER, re.DOTALL)
_CLASS_OR_ONE = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|" + _CHARACTER, re.DOTALL)
# Printable characters that are no digit, no space, no part of a word; fewer than there are.
_OTHERS = {
    r"\D": r" -/:-~\u00a1-\ud7ff\ue000-\ufffd",
    r"\S": r"!-~\u00a1-\u167f\u3001-\ud7ff\ue000-\ufefe",
    r"\W": r" -/:-@\[-\^`{-~\u00a1-\ud7ff\ue000-\ufffd",
}


def without_marks(pattern: str) -> str:
    """A regular expression that matches no marker, however it comes by one. Raises Error for one that needs one."""

    def change(found: re.Match[str]) -> str:
        part = found.group()
        if part == ".":
            return rf"[^\n{RESERVED}]"
        if part.startswith("[^"):
            return f"[^{RESERVED}{part[2:]}"
        if part.startswith("[") and len(part) > 1:
            return _class(part)
        if part in _OTHERS:
            return f"[{_OTHERS[part]}]"
        if 0 < _code(part) <= len(RESERVED):
            raise Error(f"schema cannot be followed: pattern names {part!r}, which the chat format reserves")
        return part

    return _CLASS_OR_ONE.sub(change, pattern)


def _class(part: str) -> str:
    """A class [...] without the control characters up to the last marker."""
    ones, out = _ONE.findall(part[1:-1]), list[str]()
    while ones:
        first = ones.pop(0)
        last = ones[1] if len(ones) > 1 and ones[0] == "-" else None
        if last is not None:
            del ones[:2]
        if _code(last or first) <= len(RESERVED):
            continue
        if _code(first) <= len(RESERVED):
            first = r"\x08"
        out.append(_OTHERS.get(first, first) if last is None else f"{first}-{last}")
    if not out:
        raise Error(f"schema cannot be followed: pattern has {part!r}, all of which the chat format reserves")
    return f"[{''.join(out)}]"


def _code(one: str) -> int:
    """The code point of a character as a pattern writes it; of an escape that has no number, that of its letter."""
    kind, digits = one[:2], one[2:].strip("{}")
    if kind in (r"\x", r"\u") and digits:
        return int(digits, 16)
    if kind == r"\c" and digits:
        return ord(digits) & 31
    return 0 if one == r"\0" else ord(one[-1])


def check_plain(text: str) -> None:
    """Raise Error for a text of a schema in which a parser would read a marker."""
    for mark in (*RESERVED, *SPELLED):
        if mark in text:
            raise Error(f"schema cannot be followed: {text[:60]!r} holds {mark!r}, which the chat format reserves")


__all__ = ["CLOSE", "K2", "K3", "OPEN", "RESERVED", "SEP", "SPELLED", "check_plain", "without_marks"]
