"""Hermes, as Qwen 2.5 and 3 write it too: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from typing import Final

from agentlightning.chat.tool_calls.format import IncompleteCall, MalformedCall, MarkedFormat, ParsedToolCall, Tools
from agentlightning.chat.tool_calls.partial_json import object_call, outside_strings, skip_space

CALL_START: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"


class Hermes(MarkedFormat):
    __slots__ = ()

    @property
    def opening(self) -> str:
        return CALL_START

    def parse_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
        body = skip_space(text, start)
        if body == len(text):
            raise IncompleteCall("nothing follows")
        if text[body] != "{":
            raise MalformedCall("a call is a JSON object")
        end = outside_strings(text, body, CALL_END, CALL_START)
        return (object_call(text[body:end]),), end + len(CALL_END)


HERMES: Final = Hermes("hermes", closing=CALL_END)
