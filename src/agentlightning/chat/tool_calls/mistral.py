"""Mistral: `[TOOL_CALLS]` before a list of calls, or before each call as `name[ARGS]{...}`.

Ids are nine letters and digits, and the model may write them itself: within the list, or after `[CALL_ID]`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from agentlightning.chat.tool_calls.format import (
    Malformed,
    MarkedFormat,
    ParsedToolCall,
    Tools,
    Unfinished,
    is_short_id,
)
from agentlightning.chat.tool_calls.partial_json import object_call, raw_elements, skip_space, value_end

CALLS: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"

_NAME: Final = re.compile(r"[\w.\-/:]+")
_ID: Final = re.compile(r"[0-9A-Za-z]*")


class Mistral(MarkedFormat):
    __slots__ = ()

    @property
    def opening(self) -> str:
        return CALLS

    def read_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
        start = skip_space(text, start)
        if start == len(text):
            raise Unfinished("nothing follows")
        return _listed(text, start) if text[start] == "[" else _named(text, start)


def _listed(text: str, start: int) -> tuple[tuple[ParsedToolCall, ...], int]:
    end = value_end(text, start)
    calls = tuple(_own_id(object_call(element)) for element in raw_elements(text[start:end]))
    if not calls:
        raise Malformed("an empty list calls nothing")
    return calls, end


def _own_id(call: ParsedToolCall) -> ParsedToolCall:
    return call if call.id is None or is_short_id(call.id) else replace(call, id=None)


def _named(text: str, start: int) -> tuple[tuple[ParsedToolCall, ...], int]:
    name, position = _word(text, start, _NAME)
    given = None
    if _stands(text, position, CALL_ID, ARGUMENTS):
        given, position = _word(text, position + len(CALL_ID), _ID)
        if not is_short_id(given):
            raise Malformed("the id is not nine letters and digits")
    if not _stands(text, position, ARGUMENTS, ARGUMENTS):
        raise Malformed(f"{ARGUMENTS} is missing")
    begin = skip_space(text, position + len(ARGUMENTS))
    if begin < len(text) and text[begin] != "{":
        raise Malformed("arguments are a JSON object")
    end = value_end(text, begin)
    return (ParsedToolCall(name, text[begin:end], given),), end


def _word(text: str, start: int, pattern: re.Pattern[str]) -> tuple[str, int]:
    found = pattern.match(text, start)
    if found is None:
        raise Malformed("a word is missing")
    if found.end() == len(text):
        raise Unfinished("the word may go on")
    return found[0], found.end()


def _stands(text: str, position: int, marker: str, other: str) -> bool:
    """Whether `marker` stands there. Raises Unfinished where it or `other` may yet."""
    if text.startswith(marker, position):
        return True
    rest = text[position:]
    if marker.startswith(rest) or other.startswith(rest):
        raise Unfinished(f"{marker} may follow")
    return False


MISTRAL: Final = Mistral("mistral", short_ids=True)
