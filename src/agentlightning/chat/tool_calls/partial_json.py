"""JSON at a position of a text that may be incomplete: where a value ends, and the original spelling of its parts.

Partial-JSON parsers (jiter, pydantic-core) return values of a whole text; here the end of a value inside a longer text
and its spelling matter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from agentlightning.chat.tool_calls.format import IncompleteCall, MalformedCall, ParsedToolCall

_decoder: Final = json.JSONDecoder()
_SPACE: Final = " \t\n\r"
_QUOTES: Final = re.compile(r'\\.|"', re.DOTALL)
_LITERALS: Final = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_INCOMPLETE_NUMBER: Final = re.compile(r"(-|\.|\.?\d*[eE][+-]?)\Z")


def value_end(text: str, start: int) -> int:
    """End of the JSON value at `start`. Raises IncompleteCall if the text ends inside it, else MalformedCall."""
    try:
        _, end = _decoder.raw_decode(text, start)
    except RecursionError as error:
        raise MalformedCall("it is nested too deeply") from error
    except ValueError as error:
        raise (IncompleteCall if _is_incomplete(text, error) else MalformedCall)(str(error)) from None
    return end


def _is_incomplete(text: str, error: ValueError) -> bool:
    """Whether decoding failed only because the text ends too early."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    rest = text[error.pos :]
    if error.msg.startswith("Unterminated string"):
        return True
    if error.msg.startswith("Invalid \\u"):
        return re.fullmatch(r"[\\u0-9a-fA-F]{0,5}", rest) is not None
    incomplete_word = any(word.startswith(rest) for word in _LITERALS)
    return not rest.strip(_SPACE) or incomplete_word or _INCOMPLETE_NUMBER.match(rest) is not None


@cache
def _either(marker: str, opening: str) -> re.Pattern[str]:
    return re.compile(f"{re.escape(marker)}|{re.escape(opening)}")


def outside_strings(text: str, start: int, marker: str, opening: str) -> int:
    """Position of the first `marker` from `start` on that is outside JSON strings. Raises IncompleteCall if there is
    none, MalformedCall if `opening` comes first, because calls do not nest."""
    checked, inside = start, False
    for match in _either(marker, opening).finditer(text, start):
        position = match.start()
        inside ^= sum(quote[0] == '"' for quote in _QUOTES.finditer(text, checked, position)) % 2 == 1
        if not inside and text.startswith(marker, position):
            return position
        if not inside:
            raise MalformedCall("another call begins within it")
        checked = position
    raise IncompleteCall(f"{marker} is missing")


def expect(text: str, position: int, marker: str, *others: str, optional: bool = False) -> int:
    """The end of `marker` after whitespace. Raises IncompleteCall if it or one of `others` may follow; where it is
    `optional`, its absence is no error."""
    place = skip_space(text, position)
    if text.startswith(marker, place):
        return place + len(marker)
    rest = text[place:]
    if any(each != rest and each.startswith(rest) for each in (marker, *others)):
        raise IncompleteCall(f"{marker} may follow")
    if not optional:
        raise MalformedCall(f"{marker} is missing")
    return position


def skip_space(text: str, position: int) -> int:
    return skip(text, position, _SPACE)


def skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def is_utf8(value: Any) -> bool:
    """Whether it is a string without lone surrogates, which JSON escapes can spell and UTF-8 cannot encode."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def object_call(
    body: str,
    keys: tuple[str, ...] = ("arguments",),
    only: frozenset[str] | None = None,
    name_key: str = "name",
) -> ParsedToolCall:
    """The tool call in a JSON object with a name and arguments, which are under the first of `keys` that is present.

    The arguments keep their spelling; a string is taken as their text, and missing ones are {}. `only`: the allowed
    keys of the object. Raises MalformedCall for anything else."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(str(error)) from None
    if not isinstance(call, dict) or not is_utf8(name := call.get(name_key)) or not name:
        raise MalformedCall("a call is an object with a name")
    if only is not None and not (only.issuperset(call) and call.keys() & set(keys)):
        raise MalformedCall("it has other keys than a call")
    call_id = call.get("id")
    call_id = call_id if is_utf8(call_id) and call_id else None
    key = next((key for key in keys if key in call), None)
    if key is None:
        return ParsedToolCall(name, "{}", call_id)
    arguments = call[key]
    if isinstance(arguments, str):
        if not is_utf8(arguments):
            raise MalformedCall("the arguments contain a lone surrogate")
        return ParsedToolCall(name, arguments, call_id)
    texts = [*raw_elements(body)]
    spelled = dict(zip(map(json.loads, texts[::2]), texts[1::2], strict=True))
    return ParsedToolCall(name, spelled[key], call_id)


def raw_elements(body: str) -> Iterator[str]:
    """The texts of the elements of a valid JSON array, or of the keys and values of an object by turns, with their
    original spacing and number formats."""
    position = skip_space(body, 0) + 1
    while (position := skip(body, position, _SPACE + ",:")) < len(body) and body[position] not in "]}":
        start = position
        _, position = _decoder.raw_decode(body, start)
        yield body[start:position]
