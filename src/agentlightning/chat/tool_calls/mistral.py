"""Mistral: `[TOOL_CALLS]` before a list of calls, or before each call as `name[ARGS]{...}`.

Ids have nine letters and digits. The model may write them, in the list or after `[CALL_ID]`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from agentlightning.chat.tool_calls.format import (
    IncompleteCall,
    MalformedCall,
    MarkedFormat,
    ParsedToolCall,
    Tools,
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

    def parse_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
        start = skip_space(text, start)
        if start == len(text):
            raise IncompleteCall("nothing follows")
        return _call_list(text, start) if text[start] == "[" else _named_call(text, start)


def _call_list(text: str, start: int) -> tuple[tuple[ParsedToolCall, ...], int]:
    end = value_end(text, start)
    calls = tuple(_drop_invalid_id(object_call(element)) for element in raw_elements(text[start:end]))
    if not calls:
        raise MalformedCall("an empty list calls nothing")
    return calls, end


def _drop_invalid_id(call: ParsedToolCall) -> ParsedToolCall:
    return call if call.id is None or is_short_id(call.id) else replace(call, id=None)


def _named_call(text: str, start: int) -> tuple[tuple[ParsedToolCall, ...], int]:
    name, position = _match_word(text, start, _NAME)
    call_id = None
    if _has_marker(text, position, CALL_ID, ARGUMENTS):
        call_id, position = _match_word(text, position + len(CALL_ID), _ID)
        if not is_short_id(call_id):
            raise MalformedCall("the id is not nine letters and digits")
    if not _has_marker(text, position, ARGUMENTS, ARGUMENTS):
        raise MalformedCall(f"{ARGUMENTS} is missing")
    begin = skip_space(text, position + len(ARGUMENTS))
    if begin < len(text) and text[begin] != "{":
        raise MalformedCall("arguments are a JSON object")
    end = value_end(text, begin)
    return (ParsedToolCall(name, text[begin:end], call_id),), end


def _match_word(text: str, start: int, pattern: re.Pattern[str]) -> tuple[str, int]:
    found = pattern.match(text, start)
    if found is None:
        raise MalformedCall("a word is missing")
    if found.end() == len(text):
        raise IncompleteCall("the word may continue")
    return found[0], found.end()


def _has_marker(text: str, position: int, marker: str, other: str) -> bool:
    """Whether `marker` is at `position`. Raises IncompleteCall if it or `other` may follow."""
    if text.startswith(marker, position):
        return True
    rest = text[position:]
    if marker.startswith(rest) or other.startswith(rest):
        raise IncompleteCall(f"{marker} may follow")
    return False


MISTRAL: Final = Mistral("mistral", short_ids=True)
