"""Llama 3: an answer that is `{"name": ..., "parameters": {...}}`, bare or after `<|python_tag|>`.

Several calls are separated by a semicolon or whitespace. A bare object is a call only at the start of the answer and
with the keys of a call. After `<|python_tag|>` a call may also be `name.call(key="value")`, as for built-in tools.
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
from agentlightning.chat.tool_calls.partial_json import object_call, skip_space, value_end
from agentlightning.chat.tool_calls.pythonic import parse_python_call

PYTHON_TAG: Final = "<|python_tag|>"
_ARGUMENTS: Final = ("parameters", "arguments")
_KEYS: Final = frozenset({"type", "name", "id", *_ARGUMENTS})
_FIRST_KEY: Final = re.compile(r'\{\s*(?:"([^"\\]*)("?))?')


class Llama3(MarkedFormat):
    __slots__ = ()

    @property
    def opening(self) -> str:
        return PYTHON_TAG

    def parse_unmarked(self, text: str, preceding: Preceding) -> Parsed:
        if preceding == "content":
            raise MalformedCall("a bare call must start the answer")
        call, end = _bare_call(text, _call_start(text, preceding))
        return Parsed(0, (call,), end)

    def parse_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
        start = skip_space(text, start)
        if text.startswith("{", start):
            call, end = _bare_call(text, start)
        else:
            call, end = parse_python_call(text, start)
            call = ParsedToolCall(call.name.removesuffix(".call"), call.arguments)
        return (call,), end


def _call_start(text: str, preceding: Preceding) -> int:
    start = skip_space(text, 0)
    return skip_space(text, start + 1) if preceding == "call" and text.startswith(";", start) else start


def _bare_call(text: str, start: int) -> tuple[ParsedToolCall, int]:
    if start == len(text):
        raise IncompleteCall("nothing follows")
    first = _FIRST_KEY.match(text, start)
    if first is None:
        raise MalformedCall("a call is a JSON object")
    key, closed = first[1] or "", first[2]
    if key not in _KEYS if closed else not any(known.startswith(key) for known in _KEYS):
        raise MalformedCall("the object has other keys than a call")
    end = value_end(text, start)
    return object_call(text[start:end], _ARGUMENTS, _KEYS), end


LLAMA3: Final = Llama3("llama3")
