"""What a line of a trace must hold; an error names the line, the field, its value and what is allowed."""

from __future__ import annotations

from typing import Any

from perilune.errors import Error

MOST = 1 << 24  # tokens of a prompt or an answer
IDS = 1 << 32  # ids of a session
LATEST = 1e15  # seconds or milliseconds


def conversation(row: dict[str, Any], where: str, block: int) -> None:
    """`timestamp` ms, `input_length`, `output_length`, `hash_ids`: at least the prompt's whole blocks."""
    _time(row.get("timestamp"), f"{where}: timestamp")
    prompt = _whole(row.get("input_length"), f"{where}: input_length", 1, MOST)
    _whole(row.get("output_length"), f"{where}: output_length", 0, MOST)
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
        raise Error(f"{where}: hash_ids is {_short(ids)}; must be a list of integers >= 0")
    if len(ids) < prompt // block:
        raise Error(
            f"{where}: hash_ids has {len(ids)} entries; input_length {prompt} has {prompt // block} whole blocks"
        )


def agentic(row: dict[str, Any], where: str, block: int) -> None:
    """`block` as in the first line, and `requests` of six fields, in order of time."""
    if row.get("block") != block:
        raise Error(f"{where}: block is {_short(row.get('block'))}; must be the first line's, {block}")
    requests = row.get("requests")
    if not isinstance(requests, list) or not requests:
        raise Error(f"{where}: requests is {_short(requests)}; must be a list of at least one request")
    before, known = 0.0, 0
    for turn, request in enumerate(requests):
        here = f"{where}: requests[{turn}]"
        if not isinstance(request, list) or len(request) != 6:
            raise Error(f"{here} is {_short(request)}; must be [t, input, output, think, keep, runs]")
        at, prompt, output, _, keep, runs = request
        _time(at, f"{here} t")
        if at < before:
            raise Error(f"{here} t is {at}; must be >= {before}, that of the request before it")
        _whole(prompt, f"{here} input", 1, MOST)
        _whole(output, f"{here} output", 0, MOST)
        known = _whole(keep, f"{here} keep", 0, known) + _runs(runs, here)
        if known < prompt // block:
            raise Error(f"{here} has {known} ids; input {prompt} has {prompt // block} whole blocks")
        before = at


def _runs(runs: object, here: str) -> int:
    """Ids in [start, length] runs."""
    total = 0
    for run in runs if isinstance(runs, list) else [runs]:
        if not isinstance(run, list) or len(run) != 2:
            raise Error(f"{here} runs holds {_short(run)}; must be a list of [start, length]")
        start = _whole(run[0], f"{here} start of a run", 0, IDS - 1)
        total += _whole(run[1], f"{here} length of a run", 0, min(MOST, IDS - start))
    return total


def _whole(value: object, name: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise Error(f"{name} is {_short(value)}; must be an integer from {least} to {most}")
    return value


def _time(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LATEST:
        raise Error(f"{name} is {_short(value)}; must be a number from 0 to {LATEST:g}")


def _short(value: object) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


__all__ = ["agentic", "conversation"]
