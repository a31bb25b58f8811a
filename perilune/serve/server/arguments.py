"""A tool's parameter schema as the grammar of Kimi-K3's calls: one element an argument, strings raw, the rest JSON.

    <|open|>argument key="city" type="string"<|sep|>Beijing<|close|>argument<|sep|>

The element names the JSON type of its value, so a property's schema is split by type first. Formats are xgrammar's
structural tags. JSON values are written as `json.dumps` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import xgrammar

from perilune.chat.render import json_type
from perilune.errors import Error
from perilune.serve.server.marks import CLOSE, OPEN, RESERVED, SEP, SPELLED, check_plain, without_marks
from perilune.serve.server.schemas import DEEPEST, Schema, budget, checked, look, merged, moved, plain, target

Format = dict[str, Any]

TYPES = ("string", "number", "boolean", "null", "object", "array")
# Text in which no marker can be read.
PLAIN: Format = {"type": "any_text", "excludes": [*RESERVED, *SPELLED]}
_LARGEST = 2_000_000  # characters of all schemas of a call that are given to xgrammar: each has all that is referred to
_LONGEST = 4096  # characters that a length is counted up to
_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}


def arguments(schema: Schema) -> Format:
    """The arguments of one call. Raises Error for a schema that cannot be followed."""
    root = _Root(schema)
    ways = []
    for kind, branch in root.split(schema):
        if kind == "object":
            ways.append(_members(root, branch))
        else:
            # No object: the call's arguments can only be one JSON text.
            value = root.json(branch) if kind == "string" else root.value(kind, branch)
            ways.append(_element("json", 'type="object"', value))
    return one_of(ways)


def json_value(schema: Schema | bool) -> Format:
    """JSON text of a schema, without line breaks. Raises Error for a schema that cannot be followed."""
    try:
        followed = plain(schema, schema if isinstance(schema, Mapping) else {}, budget())
        grammar = xgrammar.Grammar.from_json_schema(json.dumps(followed), any_whitespace=False)
    except (RuntimeError, ValueError, RecursionError) as problem:
        raise Error(f"schema cannot be followed: {reason(problem)}") from None
    # Texts whose length is limited may hold control characters there; in JSON they may not.
    text = str(grammar).replace(r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]")
    # xgrammar passes over the patterns, which are in the grammar: they are for the end of an answer.
    found = [{"pattern": each} for each in sorted({*patterns(followed)})]
    return {"type": "grammar", "grammar": text, "patterns": found}


def patterns(value: Any) -> Iterator[str]:
    """The regular expressions in a format or a schema."""
    if isinstance(value, Mapping):
        if isinstance(value.get("pattern"), str):
            yield value["pattern"]
        value = [*value.values()]
    if isinstance(value, list):
        for each in value:
            yield from patterns(each)


def one_of(ways: list[Format]) -> Format:
    if not ways:
        raise Error("schema cannot be followed: nothing satisfies it")
    return ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}


def sequence(*parts: Format) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def constant(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _members(root: _Root, schema: Schema) -> Format:
    """Declared properties in their order, and others where nothing is declared."""
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = [key for key in schema.get("required") or () if isinstance(key, str)]
    more = schema.get("additionalProperties", True)
    parts = [_property(root, key, value, key not in required) for key, value in properties.items()]
    parts += [_property(root, key, more, False) for key in dict.fromkeys(required) if key not in properties]
    if "properties" not in schema and more is not False and not required:
        ways = [_argument(None, kind, root.value(kind, branch)) for kind, branch in root.split(more)]
        parts.append({"type": "star", "content": one_of(ways)})
    return sequence(*parts) if parts else constant("")


def _property(root: _Root, key: str, schema: Any, optional: bool) -> Format:
    ways = [_argument(key, kind, root.value(kind, branch)) for kind, branch in root.split(schema)]
    if not ways and optional:
        return constant("")
    if not ways:
        raise Error(f"schema cannot be followed: nothing satisfies property {key!r}")
    return {"type": "optional", "content": one_of(ways)} if optional else one_of(ways)


def _argument(key: str | None, kind: str, value: Format) -> Format:
    """An argument; key None: of any plain name."""
    if key is not None:
        check_plain(key)
        shown = key.replace("&", "&amp;").replace('"', "&quot;")
        return _element("argument", f'key="{shown}" type="{kind}"', value)
    name = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_.-]{0,63}"}
    return sequence(constant(f'{OPEN}argument key="'), name, constant(f'" type="{kind}"{SEP}'), value, _end("argument"))


def _element(tag: str, attributes: str, value: Format) -> Format:
    return sequence(constant(f"{OPEN}{tag} {attributes}{SEP}"), value, _end(tag))


def _end(tag: str) -> Format:
    return constant(f"{CLOSE}{tag}{SEP}")


class _Root:
    """A whole schema, whose parts refer to it."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.left = budget()
        self.size = len(json.dumps(schema))
        self.given = 0

    def json(self, schema: Schema) -> Format:
        """JSON text of a part of the schema, what it refers to included."""
        if "$ref" in json.dumps(schema):
            self.given += self.size
            if self.given > _LARGEST:
                raise Error(f"schema cannot be followed: with what its parts refer to it is over {_LARGEST} characters")
            schema = {**moved(schema), "$defs": {"root": moved(self.schema)}}
        return json_value(schema)

    def value(self, kind: str, schema: Schema) -> Format:
        """The body of an argument of this type."""
        return _text(schema) if kind == "string" else self.json(schema)

    def split(self, schema: Any, depth: int = 0) -> Iterator[tuple[str, Schema]]:
        """(type, schema of the values of that type) for every type that a value may have."""
        look(self.left)
        if depth > DEEPEST:
            raise Error(f"schema cannot be followed: references or alternatives are nested deeper than {DEEPEST}")
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, Mapping):
            raise Error(f"schema cannot be followed: {type(schema).__name__} where a schema must be")
        schema = checked(schema)
        rest = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf", "oneOf", "allOf")}
        if "$ref" in schema:
            yield from self.split({**target(self.schema, schema["$ref"]), **rest}, depth + 1)
        elif alternatives := schema.get("anyOf") or schema.get("oneOf"):
            for each in alternatives:
                yield from self.split({**rest, **each} if isinstance(each, Mapping) else each, depth + 1)
        elif schema.get("allOf"):
            yield from self.split(merged(self.schema, schema, self.left), depth + 1)
        elif "const" in schema:
            yield json_type(schema["const"]), {"enum": [schema["const"]]}
        elif "enum" in schema:
            allowed = self.kinds(schema)
            for kind in TYPES:
                values = [value for value in schema["enum"] if json_type(value) == kind]
                if values and kind in allowed:
                    yield kind, {"enum": values}
        else:
            integer = "integer" in _listed(schema.get("type")) and "number" not in _listed(schema.get("type"))
            for kind in self.kinds(schema):
                yield kind, {**rest, "type": "integer" if kind == "number" and integer else kind}

    def kinds(self, schema: Schema) -> list[str]:
        """The types that a schema names, or that its keywords are about; all where it says nothing."""
        named = ["number" if kind == "integer" else kind for kind in _listed(schema.get("type"))]
        if not named:
            named = [kind for kind, words in _KEYWORDS.items() if any(word in schema for word in words)] or [*TYPES]
        return [kind for kind in TYPES if kind in named]


def _text(schema: Schema) -> Format:
    """Raw text of a string schema."""
    if "enum" in schema:
        for value in schema["enum"]:
            check_plain(value)
        return one_of([constant(value) for value in schema["enum"]])
    schema = plain(schema, {}, budget())
    pattern, shortest, longest = schema.get("pattern"), schema.get("minLength", 0), schema.get("maxLength")
    if isinstance(pattern, str):
        # A text that matches as a whole matches in any reading of the pattern.
        return {"type": "regex", "pattern": without_marks(pattern.removeprefix("^").removesuffix("$"))}
    shortest = min(int(shortest), _LONGEST)
    rest = dict(PLAIN)
    if longest is not None and longest < _LONGEST:
        rest["max_chars"] = int(longest) - shortest
        if rest["max_chars"] < 0:
            raise Error(f"schema cannot be followed: minLength {shortest} exceeds maxLength {longest}")
    if not shortest:
        return rest
    return sequence({"type": "regex", "pattern": f"[^<{RESERVED}]{{{shortest}}}"}, rest)


def _listed(kind: Any) -> list[Any]:
    return list(kind) if isinstance(kind, list) else [] if kind is None else [kind]


def reason(problem: BaseException) -> str:
    """The sentence behind a library's file and line."""
    return str(problem).split("] ", 1)[-1].split(": ", 1)[-1].splitlines()[0][:300]


__all__ = ["PLAIN", "Format", "arguments", "constant", "json_value", "one_of", "patterns", "reason", "sequence"]
