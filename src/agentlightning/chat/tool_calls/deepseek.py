"""DeepSeek V3, R1 and V3.1: each call between two markers, and all calls between two more.

V3 and R1 write `function`, a separator, the name and a fenced block of JSON; V3.1 writes the name, the separator and
the JSON.
"""

from __future__ import annotations

import re
from typing import Final

from agentlightning.chat.tool_calls.format import (
    IncompleteCall,
    MalformedCall,
    MarkedFormat,
    Parsed,
    ParsedToolCall,
    Preceding,
    Tools,
)
from agentlightning.chat.tool_calls.partial_json import is_object, is_utf8, outside_strings, skip_space

CALLS_BEGIN: Final = "<｜tool▁calls▁begin｜>"
CALLS_END: Final = "<｜tool▁calls▁end｜>"
CALL_BEGIN: Final = "<｜tool▁call▁begin｜>"
CALL_END: Final = "<｜tool▁call▁end｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"

_FENCED: Final = re.compile(r"\s*([^\n`]+?)\s*\n```(?:json)?\n(.*?)\n?```\s*", re.DOTALL)


class DeepSeek(MarkedFormat):
    __slots__ = ()

    @property
    def opening(self) -> str:
        return CALLS_BEGIN

    def parse_unmarked(self, text: str, preceding: Preceding) -> Parsed:
        """After a call: another call, or the end of all calls."""
        if preceding != "call":
            raise MalformedCall("the first call begins with a marker for all")
        if text.startswith(CALLS_END):
            return Parsed(0, (), len(CALLS_END))
        if CALLS_END.startswith(text):
            raise IncompleteCall(f"{CALLS_END} may follow")
        return Parsed(0, *_call(text, 0))

    def parse_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
        return _call(text, skip_space(text, start))


def _call(text: str, start: int) -> tuple[tuple[ParsedToolCall, ...], int]:
    if not text.startswith(CALL_BEGIN, start):
        raise (IncompleteCall if CALL_BEGIN.startswith(text[start:]) else MalformedCall)(f"{CALL_BEGIN} is missing")
    body = start + len(CALL_BEGIN)
    end = outside_strings(text, body, CALL_END, CALL_BEGIN)
    head, _, rest = text[body:end].partition(SEPARATOR)
    name, arguments = head.strip(), rest.strip()
    if name == "function" and (fenced := _FENCED.fullmatch(rest)):
        name, arguments = fenced.groups()
    if not name or not is_utf8(name) or not is_object(arguments):
        raise MalformedCall("a call is a name and a JSON object")
    return (ParsedToolCall(name, arguments),), end + len(CALL_END)


DEEPSEEK: Final = DeepSeek("deepseek")
