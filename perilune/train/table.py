"""Dataclasses out of parsed tables: every key checked, and every error naming it."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal

from perilune.errors import Error


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise Error unless ok."""
    if not ok:
        raise Error(f"{name} is {value!r}; {allowed}")


def build(cls: Any, values: Any, where: str) -> Any:
    """A dataclass of nested `values`; where: in front of its keys. Raises Error for unknown keys and wrong types."""
    if not isinstance(values, dict):
        raise Error(f"config: {where.rstrip('.')} is {values!r}; must be a table of keys")
    kinds = typing.get_type_hints(cls)
    unknown = [key for key in values if key not in kinds]
    if unknown:
        raise Error(f"config: unknown key {where}{unknown[0]}; allowed: {', '.join(sorted(kinds))}")
    return cls(**{key: _convert(kinds[key], value, where + key) for key, value in values.items()})


def _convert(kind: Any, value: Any, name: str) -> Any:
    """`value` as the annotated type `kind`; integers are taken for floats, lists for tuples."""
    if dataclasses.is_dataclass(kind):
        return build(kind, value, name + ".")
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _convert(next(a for a in args if a is not type(None)), value, name)
    if origin is Literal:
        require(value in args, f"config: {name}", value, f"allowed: {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        variable = args[-1] is Ellipsis
        ok = isinstance(value, list | tuple) and (variable or len(value) == len(args))
        require(ok, f"config: {name}", value, "must be a list" + ("" if variable else f" of {len(args)}"))
        return tuple(_convert(args[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    require(type(value) is kind, f"config: {name}", value, f"must be of type {kind.__name__}")
    return value


def one_line(message: str) -> str:
    """tyro's boxed message as one line, without its frame and its help text."""
    lines = [line.strip(" │╭╮╰╯─|-") for line in message.splitlines()]
    kept: list[str] = []
    for line in lines[1:]:
        if line.startswith(("For full helptext", "Argument helptext", "Perhaps you meant")):
            break
        if line:
            kept.append(line)
    return "config: " + " ".join(kept)


__all__ = ["build", "one_line", "require"]
