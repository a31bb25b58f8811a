"""Command line arguments into a frozen dataclass, with tyro; a bad argument becomes one line instead of a box."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from typing import TypeVar

import tyro

from perilune.errors import Error

Args = TypeVar("Args")

_BOX = re.compile("[╭╮╰╯│─┌┐└┘|]+")


def parse(args: type[Args], command: str, arguments: Sequence[str], description: str) -> Args:
    """Read `arguments` into the dataclass `args`. `description` is the help text of `perilune COMMAND`, examples too.

    Raises Error, in one line, for an unknown, missing or unreadable argument; `--help` prints and raises SystemExit.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed: Args = tyro.cli(
                args,
                prog=f"perilune {command}",
                args=list(arguments),
                description=description,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise Error(f"{_reason(said.getvalue())} (see `perilune {command} --help`)") from None
    return parsed


def _reason(box: str) -> str:
    """The sentence in tyro's box: its rows up to the first rule, and the spelling that it proposes, if any."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    sections: list[list[str]] = [[]]
    for line in plain.splitlines()[1:]:
        words = _BOX.sub(" ", line).split()
        if words:
            sections[-1].append(" ".join(words))
        elif sections[-1]:
            sections.append([])
    reason = " ".join(sections[0]) or "arguments cannot be read"
    for section in sections[1:]:
        if section and section[0].startswith("Perhaps you meant"):
            return f"{reason}; perhaps {section[1]}" if len(section) > 1 else reason
    return reason
