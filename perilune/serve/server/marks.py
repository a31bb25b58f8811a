"""How grammars spell the markers of a chat format: one control character each.

JSON text and ordinary text have no place for control characters, so that a marker's token is allowed where the grammar
names the marker and nowhere else. Tokens that hold such a character are never allowed.
"""

from __future__ import annotations

import re

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

_CLASS_OR_DOT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\.", re.DOTALL)


def without_marks(pattern: str) -> str:
    """A regular expression whose dots and negated classes match no marker."""

    def change(found: re.Match[str]) -> str:
        part = found.group()
        if part == ".":
            return f"[^\n{RESERVED}]"
        return f"[^{RESERVED}{part[2:]}" if part.startswith("[^") else part

    return _CLASS_OR_DOT.sub(change, pattern)


__all__ = ["CLOSE", "K2", "K3", "OPEN", "RESERVED", "SEP", "SPELLED", "without_marks"]
