"""JSON schemas rewritten: references followed, several schemas that hold at once made one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from perilune.errors import Error

Schema = Mapping[str, Any]

DEEPEST = 32  # references and alternatives inside each other
_REPEATED = re.compile(r"\^(\[[^\[\]]+\])([*+])\$")


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


def merged(root: Schema, schema: Schema, depth: int = 0) -> dict[str, Any]:
    """A schema and all of its `allOf` as one, as far as keywords can be put side by side. Raises Error as `target`."""
    if depth > DEEPEST:
        raise Error(f"schema cannot be followed: allOf is nested deeper than {DEEPEST}")
    parts = schema.get("allOf") or []
    if not isinstance(parts, list):
        raise Error("schema cannot be followed: allOf must be a list")
    out = {key: value for key, value in schema.items() if key != "allOf"}
    for part in parts:
        for _ in range(DEEPEST):
            if isinstance(part, Mapping) and "$ref" in part:
                part = target(root, part["$ref"])
        if not isinstance(part, Mapping):
            continue
        for key, value in merged(root, part, depth + 1).items():
            if key == "properties" and isinstance(value, Mapping):
                out[key] = {**out.get(key, {}), **value}
            elif key == "required" and isinstance(value, list):
                out[key] = [*out.get(key, []), *value]
            else:
                out[key] = value
    return out


def plain(schema: Any, root: Schema) -> Any:
    """A schema in words that xgrammar follows.

    Several schemas that hold at once become one; a pattern that repeats one class of characters says how often, since a
    pattern and a length are not followed together.
    """
    if isinstance(schema, list):
        return [plain(each, root) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    if isinstance(schema.get("allOf"), list):
        schema = merged(root, schema)
    out = {key: plain(value, root) for key, value in schema.items()}
    pattern, lengths = out.get("pattern"), [out.get(key) for key in ("minLength", "maxLength")]
    if isinstance(pattern, str) and any(isinstance(length, int) for length in lengths):
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


__all__ = ["DEEPEST", "Schema", "merged", "moved", "plain", "target"]
