"""Traces of requests as streams of hash keys: an agent's sessions and a chat service, plain or gzip.

agentic: one JSON object a line, a session: `block` tokens a hash and `requests`, lists of [t seconds, input tokens,
output tokens, think seconds, keep, runs]; a request's ids are the first `keep` of the request before it, then the
[start, length] runs. Ids belong to their session.
conversation: one JSON object a line, a request: `timestamp` ms, `input_length`, `output_length`, `hash_ids` of
512-token blocks, the last one perhaps filled in part.

Traces do not say what a request's answer hashes to. Where the session's next prompt continues the whole prompt and
is long enough to hold the answer, the answer is taken to be its next tokens, as models with preserved thinking
require; otherwise nobody sends the answer again, and it gets keys of its own: a server cannot know that beforehand.
"""

from __future__ import annotations

import gzip
import heapq
import json
import zlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import inf
from pathlib import Path
from typing import Any

from perilune.errors import Error
from perilune.serve.simulate.rows import agentic, conversation

BLOCK = 512  # of a conversation trace


@dataclass(frozen=True)
class Request:
    """One request. keys: of the prompt's whole units and then of the answer's.

    at: arrival in seconds. prompt, output: tokens. turn: how many requests of its session came before, if known.
    """

    at: float
    prompt: int
    output: int
    keys: Sequence[Hashable]
    turn: int = 0


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival. unit: tokens of a key."""

    requests: list[Request]
    unit: int


def read(
    path: str | Path, unit: int | None = None, offsets: str | Path | None = None, limit: int | None = None
) -> Trace:
    """Read a trace of either format. unit: tokens of a key, a multiple of the trace's own (the default).

    offsets: a JSON file whose `offset_s` says when each session starts; without it sessions of an agentic trace follow
    one another. limit: the first so many sessions (agentic) or requests (conversation). Raises Error for a file that
    cannot be read, another format, or a unit that does not fit.
    """
    if limit is not None and limit < 1:
        raise Error(f"limit is {limit}; must be >= 1")
    lines = list(islice(_lines(Path(path)), limit))
    if not lines:
        raise Error(f"trace {str(path)!r} is empty; must hold one JSON object a line")
    first = lines[0][1]
    if "requests" in first:
        block = first.get("block")
        if type(block) is not int or block < 1:
            raise Error(f"{lines[0][0]}: block is {block!r}; must be an integer >= 1")
        for where, row in lines:
            agentic(row, where, block)
        return _agentic([row for _, row in lines], unit, _offsets(offsets))
    if "hash_ids" in first:
        if offsets is not None:
            raise Error(f"offsets is {str(offsets)!r}; a conversation trace has arrival times of its own")
        before = 0
        for where, row in lines:
            conversation(row, where, BLOCK)
            if row["timestamp"] < before:
                raise Error(f"{where}: timestamp is {row['timestamp']}; must be >= {before}, the line before's")
            before = row["timestamp"]
        return _conversation([row for _, row in lines], unit)
    raise Error(f"trace {str(path)!r} has lines with {sorted(first)}; must have 'requests' or 'hash_ids'")


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects, each with where it stands. Empty lines are none."""
    number = 0
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt", encoding="utf-8") if packed else open(path, encoding="utf-8") as text:
            for number, line in enumerate(text, 1):
                if not line.strip():
                    continue
                row = json.loads(line.strip())
                if not isinstance(row, dict):
                    raise ValueError(f"it holds a {type(row).__name__}")
                yield f"trace {str(path)!r} line {number}", row
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise Error(f"trace {str(path)!r} cannot be read after line {number}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise Error(f"trace {str(path)!r} line {number} is not one JSON object a line: {error}") from None


def _offsets(path: str | Path | None) -> list[float] | None:
    if path is None:
        return None
    try:
        starts = [float(at) for at in json.loads(Path(path).read_text(encoding="utf-8"))["offset_s"]]
        if not all(0 <= at < inf for at in starts):
            raise ValueError("one is negative or not finite")
        return starts
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Error(
            f"offsets {str(path)!r} must be a JSON object with 'offset_s', a list of numbers >= 0: {error}"
        ) from None


def _fit(unit: int | None, block: int) -> int:
    if unit is not None and (unit < 1 or unit % block):
        raise Error(f"unit is {unit}; must be a multiple of the trace's {block} tokens")
    return unit or block


def _agentic(rows: list[dict[str, Any]], unit: int | None, offsets: list[float] | None) -> Trace:
    block = int(rows[0]["block"])
    unit = _fit(unit, block)
    if offsets is not None and len(offsets) < len(rows):
        raise Error(f"offsets has {len(offsets)} entries; the trace has {len(rows)} sessions")
    sessions, start = [], 0.0
    for number, row in enumerate(rows):
        begin = start if offsets is None else offsets[number]
        sessions.append(_session(row["requests"], number, begin, block, unit))
        start = begin + max(request.at - begin for request in sessions[-1]) + 1
    ordered = heapq.merge(*sessions, key=lambda request: request.at) if offsets is not None else chain(*sessions)
    return Trace(list(ordered), unit)


def _session(requests: list[Any], number: int, begin: float, block: int, unit: int) -> list[Request]:
    documents: list[list[int]] = []
    ids: list[int] = []
    salt = number << 32
    for _, _, _, _, keep, runs in requests:
        ids = ids[:keep]
        for first, length in runs:
            ids.extend(range(salt + first, salt + first + length))
        documents.append(ids)
    found = []
    for turn, (at, prompt, output, *_) in enumerate(requests):
        whole = prompt // block
        keys = documents[turn][:whole] + _private(number, turn, (prompt + output) // block - whole)
        if turn + 1 < len(requests) and requests[turn + 1][4] >= whole and requests[turn + 1][1] >= prompt + output:
            keys = documents[turn + 1][: (prompt + output) // block]
        found.append(Request(begin + at, prompt, output, _group(keys, unit // block), turn))
    return found


def _conversation(rows: list[dict[str, Any]], unit: int | None) -> Trace:
    unit = _fit(unit, BLOCK)
    requests = [
        Request(row["timestamp"] / 1e3, row["input_length"], row["output_length"], _prompt(row, unit)) for row in rows
    ]
    return Trace(_answers(requests, rows, unit), unit)


def _prompt(row: dict[str, Any], unit: int) -> Sequence[Hashable]:
    return _group(row["hash_ids"][: row["input_length"] // BLOCK], unit // BLOCK)


def _answers(requests: list[Request], rows: list[dict[str, Any]], unit: int) -> list[Request]:
    """Add each answer's keys where a later prompt continues the request, and the turn that this makes it."""
    last: dict[Hashable, int] = {}  # last whole key of a prompt -> the latest request that ended with it
    turns = [0] * len(requests)
    resent: dict[int, Sequence[Hashable]] = {}
    for number, request in enumerate(requests):
        mine = request.keys
        for i in range(len(mine) - 1, 0, -1):  # the longest earlier prompt; the first block is shared by everybody
            before = last.get(mine[i])
            if before is not None and before != number and len(requests[before].keys) == i + 1:
                if request.prompt >= requests[before].prompt + requests[before].output:
                    answered = (requests[before].prompt + requests[before].output) // unit
                    resent[before] = mine[:answered]
                turns[number] = turns[before] + 1
                break
        if mine:
            last[mine[-1]] = number
    return [
        replace(request, keys=resent.get(number, request.keys), turn=turns[number])
        for number, request in enumerate(_with_private(requests, unit))
    ]


def _with_private(requests: list[Request], unit: int) -> Iterator[Request]:
    for number, request in enumerate(requests):
        more = (request.prompt + request.output) // unit - request.prompt // unit
        yield replace(request, keys=[*request.keys, *_private(number, 0, more)])


def _private(number: int, turn: int, count: int) -> list[int]:
    """Keys that no other request has: of an answer that is not sent again."""
    first = -1 - ((number << 20 | turn) << 20)
    return list(range(first, first - count, -1))


def _group(keys: Sequence[int], count: int) -> Sequence[Hashable]:
    """Join `count` keys to one; a rest is not a whole unit."""
    if count == 1:
        return keys
    return [tuple(keys[i : i + count]) for i in range(0, len(keys) - count + 1, count)]


__all__ = ["Request", "Trace", "read"]
