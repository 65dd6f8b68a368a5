"""Llama 3: an answer that is `{"name": ..., "parameters": {...}}`, bare or after `<|python_tag|>`.

Several calls are divided by a semicolon or by whitespace. A bare object is a call only where the answer begins, and
only with the keys of a call; after `<|python_tag|>` also `name.call(key="value")`, as the built-in tools are called.
"""

from __future__ import annotations

import re
from typing import Final

from agentlightning.chat.tool_calls.format import (
    Before,
    Malformed,
    MarkedFormat,
    ParsedToolCall,
    Reading,
    Tools,
    Unfinished,
)
from agentlightning.chat.tool_calls.partial_json import object_call, skip_space, value_end
from agentlightning.chat.tool_calls.pythonic import read_python_call

PYTHON_TAG: Final = "<|python_tag|>"
_ARGUMENTS: Final = ("parameters", "arguments")
_KEYS: Final = frozenset({"type", "name", "id", *_ARGUMENTS})
_FIRST_KEY: Final = re.compile(r'\{\s*(?:"([^"\\]*)("?))?')


class Llama3(MarkedFormat):
    __slots__ = ()

    @property
    def opening(self) -> str:
        return PYTHON_TAG

    def read_unmarked(self, text: str, before: Before) -> Reading:
        if before == "content":
            raise Malformed("only an answer that begins so is a call")
        call, end = _bare_call(text, _begin(text, before))
        return Reading(0, (call,), end)

    def read_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
        start = skip_space(text, start)
        if text.startswith("{", start):
            call, end = _bare_call(text, start)
        else:
            call, end = read_python_call(text, start)
            call = ParsedToolCall(call.name.removesuffix(".call"), call.arguments)
        return (call,), end


def _begin(text: str, before: Before) -> int:
    start = skip_space(text, 0)
    return skip_space(text, start + 1) if before == "call" and text.startswith(";", start) else start


def _bare_call(text: str, start: int) -> tuple[ParsedToolCall, int]:
    if start == len(text):
        raise Unfinished("nothing follows")
    first = _FIRST_KEY.match(text, start)
    if first is None:
        raise Malformed("a call is a JSON object")
    key, closed = first[1] or "", first[2]
    if key not in _KEYS if closed else not any(known.startswith(key) for known in _KEYS):
        raise Malformed("the object has other keys than a call")
    end = value_end(text, start)
    return object_call(text[start:end], _ARGUMENTS, _KEYS), end


LLAMA3: Final = Llama3("llama3")
