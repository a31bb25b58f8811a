"""JSON schemas rewritten: references followed, several schemas that hold at once made one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from perilune.errors import Error

Schema = Mapping[str, Any]

DEEPEST = 32  # references and alternatives inside each other
# Of one object, of the schemas of one request together, and of its lists (enum and others).
MOST_PROPERTIES, MOST_OBJECTS, MOST_ITEMS = 1_000, 5_000, 10_000
MOST_LOOKS = 10_000  # at schemas, references followed
_SHAPES: tuple[tuple[str, type, str], ...] = (
    *((key, list, "a list") for key in ("enum", "anyOf", "oneOf", "allOf", "required", "prefixItems")),
    *((key, Mapping, "an object") for key in ("properties", "patternProperties")),
    *((key, int, "a whole number") for key in ("minLength", "maxLength", "minItems", "maxItems")),
)
_KEYWORDS = frozenset(key for key, _, _ in _SHAPES)
_REPEATED = re.compile(r"\^(\[[^\[\]]+\])([*+])\$")


def checked(schema: Schema) -> dict[str, Any]:
    """The schema without keywords that are null. Raises Error for a value of another kind than its keyword has."""
    for key, kind, text in _SHAPES:
        value = schema.get(key)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise Error(f"schema cannot be followed: {key} is {repr(value)[:60]}; must be {text}")
    if len(schema.get("properties") or ()) > MOST_PROPERTIES:
        count = len(schema["properties"])
        raise Error(f"schema cannot be followed: it has {count} properties; allowed: up to {MOST_PROPERTIES}")
    return {key: value for key, value in schema.items() if value is not None or key not in _KEYWORDS}


def check_size(schemas: Any) -> None:
    """Raise Error for what would take a grammar many seconds: others wait while one is made."""
    objects = items = 0
    rest = [schemas]
    while rest:
        each = rest.pop()
        if isinstance(each, Mapping):
            objects += 1
            rest += each.values()
        elif isinstance(each, list):
            items += len(each)
            rest += each
    for found, allowed, text in ((objects, MOST_OBJECTS, "objects"), (items, MOST_ITEMS, "items of lists")):
        if found > allowed:
            raise Error(f"schema cannot be followed: it has {found} {text}; allowed: up to {allowed}")


def target(root: Schema, reference: Any) -> Schema:
    """What "#/..." refers to. Raises Error for a reference that leads nowhere, or elsewhere."""
    found: Any = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise Error(f"schema cannot be followed: $ref is {str(reference)[:80]!r}; must begin with '#'")
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, Mapping) and part in found:
            found = found[part]
        else:
            raise Error(f"schema cannot be followed: $ref {reference[:80]!r} leads nowhere")
    return found if isinstance(found, Mapping) else {}


def budget() -> Iterator[int]:
    """How many schemas may be looked at: references can spell far more of them than a body has."""
    return iter(range(MOST_LOOKS))


def look(left: Iterator[int]) -> None:
    """Raise Error where a budget is spent."""
    if next(left, None) is None:
        raise Error(f"schema cannot be followed: with all alternatives and references it has over {MOST_LOOKS} parts")


def merged(root: Schema, schema: Schema, left: Iterator[int], depth: int = 0) -> dict[str, Any]:
    """A schema and all of its `allOf` as one, as far as keywords can be put side by side. Raises Error as `target`."""
    look(left)
    if depth > DEEPEST:
        raise Error(f"schema cannot be followed: allOf is nested deeper than {DEEPEST}")
    schema = checked(schema)
    parts = schema.get("allOf") or []
    out = {key: value for key, value in schema.items() if key != "allOf"}
    for part in parts:
        for _ in range(DEEPEST):
            if isinstance(part, Mapping) and "$ref" in part:
                part = target(root, part["$ref"])
        if not isinstance(part, Mapping):
            continue
        for key, value in merged(root, part, left, depth + 1).items():
            if key == "properties" and isinstance(value, Mapping):
                out[key] = {**(out.get(key) or {}), **value}
            elif key == "required" and isinstance(value, list):
                out[key] = [*(out.get(key) or []), *value]
            else:
                out[key] = value
    return out


def plain(schema: Any, root: Schema, left: Iterator[int]) -> Any:
    """A schema in words that xgrammar follows.

    Several schemas that hold at once become one; a pattern that repeats one class of characters says how often, since a
    pattern and a length are not followed together.
    """
    if isinstance(schema, list):
        return [plain(each, root, left) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    look(left)
    if isinstance(schema.get("allOf"), list):
        schema = merged(root, schema, left)
    out = {key: plain(value, root, left) for key, value in schema.items()}
    pattern, lengths = out.get("pattern"), [out.get(key) for key in ("minLength", "maxLength")]
    known = [length for length in lengths if length is not None]
    if isinstance(pattern, str) and known and all(isinstance(length, int) for length in known):
        repeated = _REPEATED.fullmatch(pattern)
        if repeated is not None:
            shortest = max(int(lengths[0] or 0), int(repeated[2] == "+"))
            out["pattern"] = f"^{repeated[1]}{{{shortest},{'' if lengths[1] is None else lengths[1]}}}$"
    return out


def moved(value: Any) -> Any:
    """References of a schema that has become a definition called "root"."""
    if isinstance(value, Mapping):
        out = {key: moved(each) for key, each in value.items()}
        reference = value.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            out["$ref"] = "#/$defs/root" + reference[1:]
        if isinstance(out.get("$id"), str):
            del out["$id"]
        return out
    return [moved(each) for each in value] if isinstance(value, list) else value


__all__ = ["DEEPEST", "Schema", "budget", "check_size", "checked", "look", "merged", "moved", "plain", "target"]
