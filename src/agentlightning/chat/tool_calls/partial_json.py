"""JSON within a text that is still being written: where a value ends, and its parts spelled as they were."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from agentlightning.chat.tool_calls.format import Malformed, ParsedToolCall, Unfinished

_decoder: Final = json.JSONDecoder()
_SPACE: Final = " \t\n\r"
_QUOTES: Final = re.compile(r'\\.|"', re.DOTALL)
_LITERALS: Final = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_CUT_NUMBER: Final = re.compile(r"(-|\.|\.?\d*[eE][+-]?)\Z")


def value_end(text: str, start: int) -> int:
    """Where the JSON value at `start` ends. Raises Unfinished where the text ends within one, else Malformed."""
    try:
        _, end = _decoder.raw_decode(text, start)
    except RecursionError as error:
        raise Malformed("it is nested too deeply") from error
    except ValueError as error:
        raise (Unfinished if _is_cut(text, error) else Malformed)(str(error)) from None
    return end


def _is_cut(text: str, error: ValueError) -> bool:
    """Whether decoding failed only because the text ends."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    rest = text[error.pos :]
    if error.msg.startswith("Unterminated string"):
        return True
    if error.msg.startswith("Invalid \\u"):
        return re.fullmatch(r"[\\u0-9a-fA-F]{0,5}", rest) is not None
    cut_word = any(word.startswith(rest) for word in _LITERALS)
    return not rest.strip(_SPACE) or cut_word or _CUT_NUMBER.match(rest) is not None


@cache
def _either(marker: str, opening: str) -> re.Pattern[str]:
    return re.compile(f"{re.escape(marker)}|{re.escape(opening)}")


def outside_strings(text: str, start: int, marker: str, opening: str) -> int:
    """The first place of `marker` from `start` on that is in no JSON string. Raises Unfinished where there is none,
    Malformed where `opening` comes first: a call holds no other."""
    checked, inside = start, False
    for found in _either(marker, opening).finditer(text, start):
        place = found.start()
        inside ^= sum(match[0] == '"' for match in _QUOTES.finditer(text, checked, place)) % 2 == 1
        if not inside and text.startswith(marker, place):
            return place
        if not inside:
            raise Malformed("another call begins within it")
        checked = place
    raise Unfinished(f"{marker} is missing")


def skip_space(text: str, position: int) -> int:
    return skip(text, position, _SPACE)


def skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def is_text(value: Any) -> bool:
    """Whether it is a string that UTF-8 can carry: JSON escapes can spell half a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def object_call(
    body: str, keys: tuple[str, ...] = ("arguments",), only: frozenset[str] | None = None
) -> ParsedToolCall:
    """The tool call in a JSON object of a name and arguments, which stand under the first of `keys` that is there.

    The arguments keep their spelling; arguments given as a string are its text, missing ones are {}. `only`: the
    object may have no other keys. Raises Malformed on anything else."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from None
    if not isinstance(call, dict) or not is_text(call.get("name")) or not call["name"]:
        raise Malformed("a call is an object with a name")
    if only is not None and not (only.issuperset(call) and call.keys() & set(keys)):
        raise Malformed("it has other keys than a call")
    name = call.get("id")
    given = name if is_text(name) and name else None
    key = next((key for key in keys if key in call), None)
    if key is None:
        return ParsedToolCall(call["name"], "{}", given)
    arguments = call[key]
    if isinstance(arguments, str):
        if not is_text(arguments):
            raise Malformed("the arguments hold half a character")
        return ParsedToolCall(call["name"], arguments, given)
    return ParsedToolCall(call["name"], raw_value(body, key), given)


def raw_value(body: str, key: str) -> str:
    """The text of a key's value in a JSON object known to be valid: spaces and number formats as they were written."""
    found, position = "", body.index("{") + 1
    while (position := skip(body, position, _SPACE + ",")) < len(body) and body[position] != "}":
        name, position = _decoder.raw_decode(body, position)
        start = skip(body, position, _SPACE + ":")
        _, position = _decoder.raw_decode(body, start)
        if name == key:  # The last of several, as every JSON reader has it.
            found = body[start:position]
    return found


def raw_elements(body: str) -> Iterator[str]:
    """The texts of the elements of a JSON array known to be valid."""
    position = body.index("[") + 1
    while (position := skip(body, position, _SPACE + ",")) < len(body) and body[position] != "]":
        start = position
        _, position = _decoder.raw_decode(body, start)
        yield body[start:position]


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
