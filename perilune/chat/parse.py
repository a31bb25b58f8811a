"""Model output -> messages, whole or as a stream.

A format is one pure function, `advance(text, cursor, options, final)`: all the text so far and a cursor in, events and
the next cursor out. It reads on from the cursor, decides nothing that later text could change, and so gives the same
message for every way of cutting the text into pieces.

Rules of Kimi-K3's output are in parse_k3.py, of the K2 family's in parse_k2.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from perilune.errors import Error

# A stream forgets text it is done with in steps of this many characters: appending copies all that is kept.
_LET_GO = 16_384


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of the thinking channel."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the response."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins: its position among this response's calls, its id and the tool's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More characters of a call's arguments, a JSON object once the call has ended."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete; one that never ends was cut off."""

    index: int


Event = Reasoning | Content | CallStart | CallArguments | CallEnd


@dataclass(frozen=True)
class ToolCall:
    """arguments: JSON text as the model gave it; complete is False for a call that was cut off."""

    id: str
    name: str
    arguments: str
    complete: bool = True

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments as typed values. Error when they are not a JSON object."""
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise Error(f"arguments of call {self.id!r} are not a JSON object")
        return value


@dataclass(frozen=True)
class Reply:
    """One assistant turn."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def to_message(self) -> dict[str, Any]:
        """An OpenAI-shaped assistant message that `render` takes back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


def call_name(name: str, index: int) -> str:
    """The id given to a call when the format carries none."""
    return f"functions.{name}:{index}"


@dataclass(frozen=True)
class Options:
    """What a parser knows of the request.

    thinking: the prompt ends inside an open think channel.
    calls: False (tool_choice none) drops every call, never showing it as content.
    tools: name -> parameter schema of the declared tools; calls of other tools are dropped. None: any name passes.
    call_id: gives a call its id from (name, index) where the format carries none (K3).
    """

    thinking: bool = True
    calls: bool = True
    tools: Mapping[str, Mapping[str, Any]] | None = None
    call_id: Callable[[str, int], str] = call_name

    def accepts(self, name: str) -> bool:
        """Whether a call of this tool is passed on."""
        return self.calls and bool(name) and (self.tools is None or name in self.tools)


@dataclass(frozen=True)
class Cursor:
    """All a parser remembers between two calls; the text before `position` is never read again, except from `mark` on.

    channel: where in the format's grammar the next character is ("" before the first).
    fresh: nothing but a repeated generation prefix has been read.
    calls: calls passed on so far. open: a call is being passed on. keys: its arguments so far. raw: its arguments come
    as JSON text; wrote: some of it was passed on. kind: type of the current argument. mark: start of text kept back
    until its end is seen. lead: white space kept back. id: of a call whose name its arguments must tell.
    """

    position: int = 0
    channel: str = ""
    fresh: bool = True
    calls: int = 0
    open: bool = False
    keys: tuple[str, ...] = ()
    raw: bool = False
    wrote: bool = False
    kind: str = ""
    mark: int = 0
    lead: str = ""
    id: str = ""

    @property
    def needed_from(self) -> int:
        """Text before this place is never read again."""
        keeps = self.channel in ("value", "name") or (self.channel == "arguments" and bool(self.id))
        return min(self.position, self.mark) if keeps else self.position


class Advance(Protocol):
    """A format's parser."""

    def __call__(
        self, text: str, cursor: Cursor, options: Options, final: bool = False
    ) -> tuple[list[Event], Cursor]: ...


def collect(events: Iterable[Event]) -> Reply:
    """The reply that a whole stream of events spells."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: dict[int, tuple[str, str, list[str]]] = {}
    ended: set[int] = set()
    for event in events:
        match event:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case CallStart(index, id_, name):
                calls[index] = (id_, name, [])
            case CallArguments(index, text):
                calls[index][2].append(text)
            case CallEnd(index):
                ended.add(index)
    return Reply(
        "".join(reasoning),
        "".join(content),
        tuple(ToolCall(id_, name, "".join(parts), index in ended) for index, (id_, name, parts) in calls.items()),
    )


@dataclass
class Stream:
    """A parser with its text and cursor kept for the caller: `push` text as it comes, then `finish` once.

    text: what may still be read; text that is done with is let go from time to time.
    """

    advance: Advance
    options: Options = field(default_factory=Options)
    text: str = ""
    cursor: Cursor = field(default_factory=Cursor)

    def push(self, text: str) -> list[Event]:
        """Events that this much more text makes certain."""
        done = self.cursor.needed_from
        if done > _LET_GO:
            self.text = self.text[done:]
            self.cursor = replace(self.cursor, position=self.cursor.position - done, mark=self.cursor.mark - done)
        self.text += text
        events, self.cursor = self.advance(self.text, self.cursor, self.options)
        return events

    def finish(self) -> list[Event]:
        """Events of what was held back, now that nothing follows."""
        events, self.cursor = self.advance(self.text, self.cursor, self.options, final=True)
        return events


def parser(name: str) -> Advance:
    """The parser called "kimi_k3" or "kimi_k2". Error for another name."""
    from perilune.chat import parse_k2, parse_k3

    parsers: dict[str, Advance] = {"kimi_k3": parse_k3.advance, "kimi_k2": parse_k2.advance}
    if name not in parsers:
        raise Error(f"parser is {name!r}; allowed: {', '.join(parsers)}")
    return parsers[name]


def parse(text: str, options: Options | None = None, name: str = "kimi_k3") -> Reply:
    """Parse a finished output: the text after the generation prefix, special tokens included."""
    events, _ = parser(name)(text, Cursor(), options or Options(), final=True)
    return collect(events)


def declared(tools: Iterable[Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """`Options.tools` of OpenAI-shaped tool declarations."""
    functions = [tool["function"] for tool in tools]
    return MappingProxyType({function["name"]: function.get("parameters") or {} for function in functions})


class Machine:
    """The part that both formats share while one call of `advance` runs: a cursor that may change, and events."""

    def __init__(self, text: str, cursor: Cursor, options: Options, final: bool) -> None:
        self.text = text
        self.options = options
        self.final = final
        self.events: list[Event] = []
        self.cursor = cursor

    def set(self, **changes: Any) -> None:
        """Change fields of the cursor."""
        self.cursor = replace(self.cursor, **changes)

    def emit(self, event: Event) -> None:
        """Append an event."""
        self.events.append(event)

    def start_call(self, id_: str, name: str) -> None:
        """Begin a call, or swallow it when the options refuse it."""
        accepted = self.options.accepts(name)
        self.set(open=accepted, keys=(), raw=False, wrote=False)
        if accepted:
            self.emit(CallStart(self.cursor.calls, id_, name))
            self.set(calls=self.cursor.calls + 1)

    def arguments(self, text: str) -> None:
        """More arguments of the call that is open, if one is."""
        if self.cursor.open and text:
            self.emit(CallArguments(self.cursor.calls - 1, text))
            self.set(wrote=True)

    def end_call(self) -> None:
        """Complete the open call, if one is."""
        if self.cursor.open:
            self.emit(CallEnd(self.cursor.calls - 1))
            self.set(open=False)


def held(text: str, start: int, literals: Iterable[str]) -> int:
    """Length of the longest end of text[start:] that is the beginning of a literal, but not all of it."""
    for length in range(min(max(map(len, literals)) - 1, len(text) - start), 0, -1):
        if any(len(literal) > length and text.endswith(literal[:length]) for literal in literals):
            return length
    return 0


__all__ = [
    "Advance",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Content",
    "Cursor",
    "Event",
    "Options",
    "Reasoning",
    "Reply",
    "Stream",
    "ToolCall",
    "collect",
    "declared",
    "parse",
    "parser",
]
