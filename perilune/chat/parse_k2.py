"""The K2 family's output: optional thinking up to `</think>`, text, then a section of tool calls.

Where a model departs from the format:
- a section or a call that begins inside thinking ends it; a call needs no section around it
- the singular spelling of the section markers counts; text inside a section around calls, and after it, is dropped
- a call that begins inside another ends that one, or replaces it while it has no arguments yet
- white space before calls is dropped when there is no other text; empty arguments become `{}`
- an id without a name (a bare counter, an id of another model) is matched to the one declared tool that has these
  arguments; without such a tool the call is dropped. Ids are kept as the model wrote them, white space left out
- at the end, a marker cut off half-way is dropped and an open call stays incomplete
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from perilune.chat.parse import Content, Cursor, Event, Machine, Options, Reasoning, held

_THINK, _UNTHINK = "<think>", "</think>"
_SECTION = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_SECTION_END = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_TURN = ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")
_LITERALS = (_THINK, _UNTHINK, *_SECTION, *_SECTION_END, _CALL, _ARGUMENTS, _CALL_END, *_TURN)
_LITERAL = re.compile("|".join(map(re.escape, _LITERALS)))


def advance(text: str, cursor: Cursor, options: Options, final: bool = False) -> tuple[list[Event], Cursor]:
    """Read `text` on from `cursor`: (events, next cursor). `final`: no more text follows."""
    machine = _K2(text, cursor, options, final)
    if not cursor.channel:
        machine.set(channel="think" if options.thinking else "content")
    while machine.cursor.channel != "done" and machine.step():
        pass
    return machine.events, machine.cursor


class _K2(Machine):
    stop = 0  # where the marker being acted on begins

    def step(self) -> bool:
        """Read up to and including the next marker; False when there is none."""
        start = self.cursor.position
        found = _LITERAL.search(self.text, start)
        if found is None:
            keep = held(self.text, start, _LITERALS)
            # A lone "<" at the very end is text; more than that is a marker cut off.
            stop = len(self.text) - (0 if self.final and keep == 1 else keep)
            self.read(start, stop)
            self.set(position=len(self.text) if self.final else stop)
            if self.final and self.cursor.channel == "content":
                self.emit_lead()
            return False
        self.stop = found.start()
        self.read(start, self.stop)
        self.set(position=found.end())
        self.act(found.group())
        return True

    def read(self, start: int, stop: int) -> None:
        """Plain text of the current channel."""
        if start >= stop:
            return
        text = self.text[start:stop]
        channel = self.cursor.channel
        if channel == "think":
            self.set(fresh=False)
            self.emit(Reasoning(text))
        elif channel == "content":
            if self.cursor.fresh and not text.strip():
                self.set(lead=self.cursor.lead + text)
                return
            self.emit_lead()
            self.emit(Content(text))
        elif channel == "arguments":
            self.arguments(text if self.cursor.wrote else text.lstrip())

    def emit_lead(self) -> None:
        """White space that turned out to be part of the text."""
        if self.cursor.lead:
            self.emit(Content(self.cursor.lead))
        self.set(lead="", fresh=False)

    def act(self, literal: str) -> None:
        """One marker."""
        channel = self.cursor.channel
        if channel == "arguments" and literal in (_THINK, _UNTHINK):
            self.read(self.stop, self.cursor.position)
        elif literal == _THINK:
            if channel == "content" and self.cursor.fresh:
                self.set(channel="think", lead="")
            elif channel == "content" or (channel == "think" and not self.cursor.fresh):
                self.read(self.stop, self.cursor.position)
        elif literal == _UNTHINK:
            if channel == "think":
                self.set(channel="content", fresh=True)
        elif literal in _TURN:
            self.end_arguments()
            if channel == "content":
                self.emit_lead()
            self.set(channel="done")
        elif literal in _SECTION:
            self.end_arguments()
            self.set(channel="section")
        elif literal in _SECTION_END:
            self.end_arguments()
            if channel in ("section", "name", "arguments"):
                self.set(channel="after")
        elif literal == _CALL:
            self.end_arguments()
            self.set(channel="name", mark=self.cursor.position)
        elif literal == _ARGUMENTS:
            if channel == "name":
                self.begin_arguments("".join(self.text[self.cursor.mark : self.stop].split()))
        elif literal == _CALL_END and channel in ("name", "arguments"):
            self.end_arguments()
            self.set(channel="section")

    def begin_arguments(self, id_: str) -> None:
        """The id is complete: begin the call, or keep its arguments back until they tell the tool."""
        name = self.name(id_)
        self.set(open=False, wrote=False)
        if name:
            self.start_call(id_, name)
        self.set(channel="arguments", mark=self.cursor.position, id="" if name else id_)

    def name(self, id_: str) -> str:
        """The tool that an id names; "" when it names none."""
        tools = self.options.tools
        bare = id_.removeprefix("functions.")
        head, _, tail = bare.rpartition(":")
        counted = tail.isdecimal() and bool(head)
        name = head if counted else bare
        if not name or name.isdecimal():
            return ""
        sure = counted or bare != id_ or tools is None or name in tools
        return name if sure else ""

    def end_arguments(self) -> None:
        """End the call whose arguments are being read, at `stop`."""
        if self.cursor.channel != "arguments":
            return
        if self.cursor.id:
            text = self.text[self.cursor.mark : self.stop].strip()
            self.start_call(self.cursor.id, _tool_of(text, self.options.tools or {}))
            self.arguments(text)
        if not self.cursor.wrote:
            self.arguments("{}")
        self.end_call()


def _tool_of(arguments: str, tools: Mapping[str, Mapping[str, Any]]) -> str:
    """The only tool whose parameters can take these arguments; "" when none or several can."""
    try:
        given = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return ""
    if not isinstance(given, dict):
        return ""
    fitting = [
        name
        for name, schema in tools.items()
        if set(schema.get("required") or ()) <= given.keys() <= set(schema.get("properties") or ())
    ]
    return fitting[0] if len(fitting) == 1 else ""


__all__ = ["advance"]
