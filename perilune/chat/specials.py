"""Names of the special tokens of the Kimi family, as offsets from the first id after the ordinary vocabulary.

In a released vocabulary that first id is 163584 and 256 special ids follow it; ids without a name here are called
`<|reserved_token_ID|>`.
"""

from __future__ import annotations

from collections.abc import Mapping

SPAN = 256

_SHARED = {0: "[BOS]", 1: "[EOS]", 254: "[UNK]", 255: "[PAD]"}
_MEDIA = {18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>"}

K3: Mapping[int, str] = {
    **_SHARED,
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    9: "[EOT]",
    **_MEDIA,
}
K2: Mapping[int, str] = {
    **_SHARED,
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    **_MEDIA,
    22: "<think>",
    23: "</think>",
}
FAMILIES: Mapping[str, Mapping[int, str]] = {"k3": K3, "k2": K2}

# Kept by a decode that skips special tokens: parsers of model output need them.
STRUCTURE = frozenset(("<|open|>", "<|close|>", "<|sep|>"))
# The first of these that a vocabulary has ends an assistant turn.
END_OF_TURN = ("<|end_of_msg|>", "<|im_end|>")


def family_names(base: int, family: str) -> dict[int, str]:
    """Id -> name of the named special tokens of a vocabulary with `base` ordinary tokens."""
    return {base + offset: name for offset, name in FAMILIES[family].items()}


def special_names(base: int, named: Mapping[int, str]) -> dict[str, int]:
    """Name -> id of all 256 special tokens; ids that `named` does not name are reserved, ids outside are ignored."""
    return {named.get(id_, reserved(id_)): id_ for id_ in range(base, base + SPAN)}


def compact_names(base: int, size: int) -> dict[str, int]:
    """Name -> id when a small vocabulary of `size` ends with K3's named tokens; unused ids from `base` are reserved."""
    names = [K3[offset] for offset in sorted(K3)]
    first = size - len(names)
    table = {reserved(id_): id_ for id_ in range(base, first)}
    return table | {name: first + i for i, name in enumerate(names)}


def reserved(id_: int) -> str:
    """The name of a special id that has no meaning."""
    return f"<|reserved_token_{id_}|>"


__all__ = [
    "END_OF_TURN",
    "FAMILIES",
    "K2",
    "K3",
    "SPAN",
    "STRUCTURE",
    "compact_names",
    "family_names",
    "reserved",
    "special_names",
]
