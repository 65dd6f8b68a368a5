"""The contract of a tool-call format: how a model family writes tool calls as text.

A format parses the beginning of a text into content followed by tool calls. It is stateless and called again whenever
more text has arrived, and it reports only what is certain: text that may still become a call is withheld, text that no
longer can is content. A call that is malformed or never completed stays text.
A new format is an entry in the package's `FORMATS`: of a class in `formats`, or of its own.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from agentlightning.chat.lark_grammar import LarkGrammar

Preceding = Literal["start", "content", "call"]
"""What precedes a text: nothing, content, or a tool call."""
Tools = Sequence[dict[str, Any]] | None
"""The tools that a request offers, in the format of the chat completions API."""

_ID_LENGTH: Final = 9
_ALPHANUMERIC: Final = string.digits + string.ascii_letters


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    name: str
    arguments: str
    """The raw text, which is JSON if the model wrote JSON."""
    id: str | None = None
    """The id that the model wrote, in formats that have one."""


class ParsedMessage(NamedTuple):
    """A model's answer as content and tool calls."""

    content: str | None
    tool_calls: tuple[ParsedToolCall, ...] = ()


class Parsed(NamedTuple):
    """The beginning of a text as content and tool calls."""

    content: int
    """Number of characters that are certainly content."""
    calls: tuple[ParsedToolCall, ...] = ()
    """The tool calls that follow the content."""
    end: int = 0
    """End of the calls and their markers; 0 if nothing beyond the content is certain."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The text that a model's template writes around the names and arguments of calls:

        opening name middle arguments (between name middle arguments)... closing

    For Hermes, opening is `<tool_call>\\n{"name": "`, middle `", "arguments": ` and closing `}\\n</tool_call>`. `ID`
    stands for a call's id in these."""

    opening: str
    middle: str
    closing: str
    between: str | None
    """None: the template cannot write a second call."""
    probed: str
    """The arguments of the probe call as the template wrote them (`template_probe`)."""


ID: Final = "\0"


Calls: TypeAlias = tuple[tuple[ParsedToolCall, ...], int]
"""Calls, and the place where they end."""


class NoGrammar(Exception):
    """No grammar can enforce such an answer in the model's format."""


class MalformedCall(Exception):
    """The text looked like a tool call but is none."""


class IncompleteCall(MalformedCall):
    """The text is no tool call yet, but more text may complete one."""


@dataclass(frozen=True, slots=True)
class CallFormat(ABC):
    """One model family's tool-call format."""

    name: str
    closing: str | None = None
    """Text that ends a call and occurs nowhere else, so that an engine can stop there. None: there is no such text."""
    end: str = ""
    """A marker that may follow the calls of an answer, and is no content."""
    parallel: bool = True
    """Whether an answer may contain several calls. Some templates cannot write them; text after the first call is then
    content."""
    short_ids: bool = False
    """Whether ids must consist of nine letters and digits."""
    layout: Layout | None = None
    """How the model's template writes calls; None: unknown, so no answer can be constrained to be a call."""

    @abstractmethod
    def parse(self, text: str, preceding: Preceding, final: bool, tools: Tools = None) -> Parsed:
        """Parse the beginning of `text`. `final`: no more text follows, so nothing is withheld. Never raises."""
        ...

    def write_arguments(self, lark: LarkGrammar, schema: Mapping[str, Any], layout: Layout) -> str:
        """A grammar expression for arguments that match the JSON schema of an object. Raises NoGrammar if such
        arguments could not be parsed back unchanged."""
        return lark.json(schema)

    def new_id(self, prefix: str) -> str:
        """An id for a call that has none; `prefix` is the usual one of the caller's API."""
        if self.short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(_ID_LENGTH))
        return prefix + secrets.token_hex(12)

    def convert_id(self, call_id: str) -> str:
        """An id of another API in the form that the template accepts; deterministic."""
        if not self.short_ids or is_short_id(call_id):
            return call_id
        number = int.from_bytes(blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
        digits = ""
        for _ in range(_ID_LENGTH):
            number, digit = divmod(number, len(_ALPHANUMERIC))
            digits += _ALPHANUMERIC[digit]
        return digits


@dataclass(frozen=True, slots=True)
class MarkedFormat(CallFormat):
    """A format whose calls begin with a marker that is rare in content."""

    opening: str = ""

    @abstractmethod
    def parse_call(self, text: str, start: int, tools: Tools) -> Calls:
        """The calls after the marker that ends at `start`, and their end. Raises MalformedCall or IncompleteCall."""
        ...

    def parse_unmarked(self, text: str, preceding: Preceding) -> Parsed:
        """Calls without a marker at the start of the text, in formats that allow them. Raises as `parse_call` does."""
        raise MalformedCall("a call begins with its marker")

    def parse(self, text: str, preceding: Preceding, final: bool, tools: Tools = None) -> Parsed:
        try:
            return self.parse_unmarked(text, preceding)
        except IncompleteCall:
            if not final:
                return Parsed(0)
        except MalformedCall:
            pass
        return self._parse_marked(text, final, tools)

    def _parse_marked(self, text: str, final: bool, tools: Tools) -> Parsed:
        position, opening = 0, self.opening
        while (marker := text.find(opening, position)) >= 0:
            position = marker + len(opening)
            try:
                calls, end = self.parse_call(text, position, tools)
            except IncompleteCall:
                if not final:
                    return Parsed(marker)
            except MalformedCall:
                pass
            else:
                return Parsed(marker, calls, end)
        return Parsed(len(text) if final else len(text) - partial_marker_length(text[position:], opening))


def is_short_id(call_id: str) -> bool:
    """Whether an id consists of nine letters and digits, as Mistral's templates require."""
    return len(call_id) == _ID_LENGTH and all(character in _ALPHANUMERIC for character in call_id)


def partial_marker_length(text: str, marker: str) -> int:
    """Number of characters at the end of `text` that may begin `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


# -- partial json ------------------------------------------------------------------------------------------------------

# JSON at a position of a text that may be incomplete: where a value ends, and the original spelling of its parts.
#
# Partial-JSON parsers (jiter, pydantic-core) return values of a whole text; here the end of a value inside a longer
# text and its spelling matter.

_decoder: Final = json.JSONDecoder()
_SPACE: Final = " \t\n\r"
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
    rest = text[error.pos : error.pos + 32]  # Bounded: a long answer may fail at many places.
    if error.msg.startswith("Unterminated string"):
        return True
    if error.msg.startswith("Invalid \\u"):
        return re.fullmatch(r"[\\u0-9a-fA-F]{0,5}", rest) is not None
    incomplete_word = any(word.startswith(rest) for word in _LITERALS)
    return not rest.strip(_SPACE) or incomplete_word or _INCOMPLETE_NUMBER.match(rest) is not None


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
