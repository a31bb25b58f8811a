"""Kimi-K3's output: think body, response, tools, as elements between `<|open|>`, `<|close|>` and `<|sep|>`.

Where a model departs from the grammar:
- a response opened or closed, or tools opened, inside the think channel ends thinking; what came before stays reasoning
- text between channels is response text, white space there is dropped; text around calls is dropped
- a marker without `<|sep|>`, or with spaces between its parts, counts; the markers themselves never become text
- a call without a tool name is dropped, an argument without a key or with a repeated key too
- an argument that is no string but not JSON either becomes a string
- a body can hold any marker text except the closing of its own or an enclosing element
- at the end, a marker cut off half-way is dropped and an open call stays incomplete
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from perilune.chat.parse import Content, Cursor, Event, Machine, Options, Reasoning, held

_OPEN, _CLOSE, _SEP, _END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
_LITERALS = (_OPEN, _CLOSE, _SEP, _END)
_LITERAL = re.compile("|".join(map(re.escape, _LITERALS)))
# Channels whose text is a value: other markers in it are data.
_BODIES = ("string", "value", "json", "skip")
_BODY_ENDS = (_CLOSE, _END)
_BODY_END = re.compile("|".join(map(re.escape, _BODY_ENDS)))
_ENCLOSING = ("call", "tools", "message")
_TAGS = ("think", "response", "tools", "call", "argument", "json", "message")
_WORD = re.compile(r"\w*")
_ATTRIBUTE = re.compile(r' +([\w-]+)="([^"]*)"')
_ATTRIBUTE_CUT = re.compile(r'[\w-]*|[\w-]+=|[\w-]+="[^"]*')
# No header is longer, so that none is waited for without end.
_LONGEST = 4096


class _Header(NamedTuple):
    """The tag ("" for text that is no header) and attributes after `<|open|>` or `<|close|>`; where text goes on."""

    tag: str
    attributes: dict[str, str]
    end: int


def advance(text: str, cursor: Cursor, options: Options, final: bool = False) -> tuple[list[Event], Cursor]:
    """Read `text` on from `cursor`: (events, next cursor). `final`: no more text follows."""
    machine = _K3(text, cursor, options, final)
    if not cursor.channel:
        machine.set(channel="think" if options.thinking else "response")
    while machine.cursor.channel != "done" and machine.step():
        pass
    return machine.events, machine.cursor


class _K3(Machine):
    stop = 0  # where the marker being acted on begins

    def step(self) -> bool:
        """Read up to and including the next marker; False when there is none, or it must wait for more text."""
        body = self.cursor.channel in _BODIES
        start = self.cursor.position
        found = (_BODY_END if body else _LITERAL).search(self.text, start)
        if found is None:
            keep = held(self.text, start, _BODY_ENDS if body else _LITERALS)
            # A lone "<" at the very end is text; more than that is a marker cut off.
            stop = len(self.text) - (0 if self.final and keep == 1 else keep)
            self.read(start, stop)
            self.set(position=len(self.text) if self.final else stop)
            return False
        self.stop = found.start()
        self.read(start, self.stop)
        self.set(position=self.stop)
        if found.group() == _END:
            self.finish()
            return True
        if found.group() == _SEP:
            self.set(position=found.end())
            return True
        header = _header(self.text, found.end(), self.final, strict=body)
        if header is None:
            self.set(position=len(self.text) if self.final else self.stop)
            return False
        if body and header.tag not in (*_ENCLOSING, self.own_tag()):
            self.read(self.stop, found.end())
            self.set(position=found.end())
            return True
        self.set(position=header.end)
        if found.group() == _OPEN:
            self.opened(header.tag, header.attributes)
        else:
            self.closed(header.tag)
        return True

    def own_tag(self) -> str:
        """The tag that closes the body being read."""
        channel = self.cursor.channel
        return self.cursor.kind if channel == "skip" else "json" if channel == "json" else "argument"

    def read(self, start: int, stop: int) -> None:
        """Plain text of the current channel."""
        if start >= stop:
            return
        text = self.text[start:stop]
        channel = self.cursor.channel
        if channel == "between":
            text = text.lstrip()
            if not text:
                return
            channel = "response"
            self.set(channel=channel)
        if channel == "think":
            self.emit(Reasoning(text))
        elif channel == "response":
            self.emit(Content(text))
        elif channel == "string":
            self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        elif channel == "json":
            self.arguments(text)
        self.set(fresh=False)

    def opened(self, tag: str, attributes: dict[str, str]) -> None:
        """`<|open|>tag attributes<|sep|>`."""
        channel, fresh = self.cursor.channel, self.cursor.fresh
        if not tag:
            return
        if tag == "message":
            # The generation prefix repeated, or the model going on to play another turn.
            if not fresh:
                self.finish()
            return
        self.set(fresh=fresh and tag == "think")
        if tag in ("think", "response", "tools"):
            self.finish_call()
            self.set(channel=tag)
        elif tag == "call":
            self.finish_call()
            self.set(channel="call")
            name = attributes.get("tool", "")
            self.start_call(self.options.call_id(name, self.cursor.calls), name)
        elif channel == "call":
            self.opened_argument(tag, attributes)

    def opened_argument(self, tag: str, attributes: dict[str, str]) -> None:
        """An argument, or the whole arguments as one JSON text."""
        keys = self.cursor.keys
        key = attributes.get("key")
        if tag == "json" and not keys and not self.cursor.raw:
            self.set(channel="json", raw=True)
        elif tag == "argument" and key is not None and key not in keys and not self.cursor.raw:
            self.set(keys=(*keys, key), mark=self.cursor.position, kind=attributes.get("type", ""))
            self.set(channel="string" if self.cursor.kind == "string" else "value")
            if self.cursor.channel == "string":
                self.arguments(self.key() + '"')
        else:
            self.set(channel="skip", kind=tag)

    def closed(self, tag: str) -> None:
        """`<|close|>tag<|sep|>`."""
        channel = self.cursor.channel
        self.set(fresh=False)
        if channel in _BODIES:
            self.finish_argument()
            channel = "call"
        if tag == "message":
            self.finish()
        elif tag == "tools":
            self.finish_call()
            self.set(channel="after" if channel in ("tools", "call") else channel)
        elif tag == "call" and channel == "call":
            self.finish_call()
            self.set(channel="tools")
        elif (tag == "think" and channel == "think") or (tag == "response" and channel in ("think", "response")):
            self.set(channel="between")

    def key(self) -> str:
        """What stands before the newest argument's value."""
        start = "{" if len(self.cursor.keys) == 1 else ", "
        return start + json.dumps(self.cursor.keys[-1], ensure_ascii=False) + ": "

    def finish_argument(self) -> None:
        """End the body that is open, at `stop`."""
        channel = self.cursor.channel
        if channel == "string":
            self.arguments('"')
        elif channel == "value":
            self.arguments(self.key() + _value(self.text[self.cursor.mark : self.stop]))
        self.set(channel="call")

    def finish_call(self) -> None:
        """End the call that is open, and its argument."""
        if self.cursor.channel in _BODIES:
            self.finish_argument()
        if not self.cursor.raw:
            self.arguments("}" if self.cursor.keys else "{}")
        elif not self.cursor.wrote:
            self.arguments("{}")
        self.end_call()

    def finish(self) -> None:
        """The turn is over: what follows is not read."""
        self.finish_call()
        self.set(channel="done")


def _header(text: str, at: int, final: bool, strict: bool) -> _Header | None:
    """The header at `at`; None while undecided, and for one that the end of the text cut off.

    strict: a marker must follow it; else plain text may, the missing `<|sep|>` being forgiven.
    """
    window = text[at : at + _LONGEST]
    growing = len(window) < _LONGEST
    start = len(window) - len(window.lstrip(" "))
    word = _WORD.match(window, start)
    tag = word.group() if word else ""
    end = start + len(tag)
    if tag not in _TAGS:
        undecided = growing and end == len(window) and any(name.startswith(tag) for name in _TAGS)
        return None if undecided else _Header("", {}, at)
    if growing and end == len(window) and not final:
        return None
    attributes: dict[str, str] = {}
    while attribute := _ATTRIBUTE.match(window, end):
        attributes.setdefault(attribute[1], attribute[2].replace("&quot;", '"').replace("&amp;", "&"))
        end = attribute.end()
    rest = window[end:].lstrip(" ")
    gap = len(window) - len(rest)
    if rest.startswith(_SEP):
        return _Header(tag, attributes, at + gap + len(_SEP))
    if growing and any(literal.startswith(rest) for literal in _LITERALS):
        # A whole tag at the end of the text counts: only its last marker is missing.
        return _Header(tag, attributes, at + len(window)) if final else None
    if growing and gap > end and _ATTRIBUTE_CUT.fullmatch(rest):
        return None
    if strict and not rest.startswith(_LITERALS):
        return _Header("", {}, at)
    return _Header(tag, attributes, at + end)


def _value(body: str) -> str:
    """An argument's body as JSON text: itself when it is JSON, else a JSON string of it."""
    try:
        json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(body, ensure_ascii=False)
    return body.strip()


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


__all__ = ["advance"]
