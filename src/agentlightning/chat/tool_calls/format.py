"""The contract of a tool-call format: how a model family writes tool calls as text.

A format parses the beginning of a text into content followed by tool calls. It is stateless and called again whenever
more text has arrived, and it reports only what is certain: text that may still become a call is withheld, text that no
longer can is content. A call that is malformed or never completed stays text.
A new format is an entry in `formats.FORMATS`: of a class there, or of its own. `CallReader` reads answers
as they are written, and `probe_layout` finds how a model's template writes calls.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from typing import Any, Literal, NamedTuple

from agentlightning.chat.lark_grammar import LarkGrammar

Preceding = Literal["start", "content", "call"]
"""What precedes a text: nothing, content, or a tool call."""
Tools = Sequence[dict[str, Any]] | None
"""The tools that a request offers, in the format of the chat completions API."""

_ID_LENGTH = 9
_ALPHANUMERIC = string.digits + string.ascii_letters


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
    """The arguments of the probe call as the template wrote them (`probe_layout`)."""


ID = "\0"


Calls = tuple[tuple[ParsedToolCall, ...], int]
"""Calls, and the place where they end."""


class NoGrammar(Exception):
    """No grammar can enforce such an answer in the model's format."""


class MalformedCall(Exception):
    """The text looked like a tool call but is none."""


class IncompleteCall(MalformedCall):
    """The text is no tool call yet, but more text may complete one."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One model family's tool-call format."""

    name: str
    opening: str = ""
    """A marker that begins calls and is rare in content. Empty: the format has others."""
    closing: str | None = None
    """Text that ends a call and occurs nowhere else, so that an engine can stop there. None: there is no such text."""
    end: str = ""
    """A marker that may follow the calls of an answer, and is no content."""
    unmarked: tuple[Preceding, ...] = ()
    """After what a call may begin without a marker."""
    parallel: bool = True
    """Whether an answer may contain several calls. Some templates cannot write them; text after the first call is then
    content."""
    short_ids: bool = False
    """Whether ids must consist of nine letters and digits."""
    layout: Layout | None = None
    """How the model's template writes calls; None: unknown, so no answer can be constrained to be a call."""

    def parse(self, text: str, preceding: Preceding, final: bool, tools: Tools = None) -> Parsed:
        """Parse the beginning of `text`. `final`: no more text follows, so nothing is withheld. Never raises."""
        for start, body in chain([(0, 0)] if preceding in self.unmarked else [], self.starts(text)):
            try:
                calls, end = self.parse_call(text, body, tools)
            except IncompleteCall:
                if not final:
                    return Parsed(start)
            except MalformedCall:
                pass
            else:
                return Parsed(start, calls, end)
        withheld = 0 if final else max(partial_marker_length(text, marker) for marker in self.markers)
        return Parsed(len(text) - withheld)

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts at which calls may begin."""
        return (self.opening,)

    def starts(self, text: str) -> Iterator[tuple[int, int]]:
        """Where calls may begin in a text, and where `parse_call` reads them from."""
        return ((found.start(), found.end()) for found in re.finditer(re.escape(self.opening), text))

    def parse_call(self, text: str, start: int, tools: Tools) -> Calls:
        """The calls from `start` on, right after a marker or, where they are `unmarked`, from 0 on, and their end.
        Raises MalformedCall or IncompleteCall."""
        raise NotImplementedError(f"{type(self).__name__} reads no calls")

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

_decoder = json.JSONDecoder()
_SPACE = " \t\n\r"
_LITERALS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_INCOMPLETE_NUMBER = re.compile(r"(-|\.|\.?\d*[eE][+-]?)\Z")


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
    body: str, keys: tuple[str, ...] = ("arguments",), only: frozenset[str] | None = None, name_key: str = "name"
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


# -- reader ----------------------------------------------------------------------------------------------------------

# Incremental parsing of an answer into content and tool calls, for any tool-call format.


class CallReader:
    """Incremental parser of content and tool calls; whitespace next to a call is dropped."""

    def __init__(self, format: CallFormat, tools: Tools = None) -> None:
        self._format = format
        self._tools = tools
        self._pending = ""
        self._preceding: Preceding = "start"
        self._ended = False
        """No further call is parsed."""

    def feed(self, text: str) -> list[str | ParsedToolCall]:
        """The content and calls that have become certain."""
        self._pending += text
        return self._take(final=False)

    def finish(self) -> list[str | ParsedToolCall]:
        """The rest."""
        return self._take(final=True)

    def _take(self, final: bool) -> list[str | ParsedToolCall]:
        pieces: list[str | ParsedToolCall] = []
        while (parsed := self._parse(final)).end:
            pieces += [*self._content(self._pending[: parsed.content].rstrip()), *parsed.calls]
            self._pending = self._pending[parsed.end :]
            self._preceding = "call"
            self._ended |= bool(parsed.calls) and not self._format.parallel
        certain = self._pending[: parsed.content]
        certain = certain if final else certain.rstrip()
        self._pending = self._pending[len(certain) :]
        return pieces + self._content(certain)

    def _parse(self, final: bool) -> Parsed:
        if self._preceding == "call":
            self._pending, end = self._pending.lstrip(), self._format.end
            if end and self._pending.startswith(end):
                return Parsed(0, (), len(end))
            if end.startswith(self._pending) and not final:
                return Parsed(0)
        if self._ended:
            return Parsed(len(self._pending))
        return self._format.parse(self._pending, self._preceding, final, self._tools)

    def _content(self, text: str) -> list[str | ParsedToolCall]:
        if text:
            self._preceding = "content"
        return [text] if text else []


def parse_answer(format: CallFormat, text: str, tools: Tools = None) -> ParsedMessage:
    """Content and tool calls of a complete answer."""
    reader = CallReader(format, tools)
    pieces = reader.feed(text) + reader.finish()
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    calls = tuple(piece for piece in pieces if isinstance(piece, ParsedToolCall))
    return ParsedMessage(content or None if calls else content, calls)


# -- probes ------------------------------------------------------------------------------------------------------------

# Detection of a template's tool-call layout from probes: a rendered turn with one call, and one with two. The chat
# format renders them. A layout counts only if the format parses calls written with it.

NAME = "probe"
"""Name of the probe tool."""
KEY = "agentlightning_probe"
ARGUMENTS: dict[str, Any] = {KEY: NAME}
"""Arguments of the probe calls."""
IDS = ("callprobe", "callother")

_ARGUMENTS = (
    re.compile(rf'\{{\s*"{KEY}"\s*:\s*"{NAME}"\s*\}}'),
    re.compile(
        rf'\s*<(?:parameter=|parameter name="|arg_key>){KEY}(?:"?>|</arg_key>\s*<arg_value>)'
        rf"\n?{NAME}\n?</(?:parameter|arg_value)>"
    ),
    re.compile(rf"""{KEY}=(["']){NAME}\1"""),
)


def probe_layout(format: CallFormat, one: str, two: str, ends: Iterable[str]) -> Layout | None:
    """The layout, from what the template writes for one and for two calls ("" if it refuses) and the texts that may end
    a turn."""
    ends = [*ends]
    layout = _first_call(_call_text(format, one, ends))
    if layout is None or not _parses(format, layout, 1):
        return None
    first = _first_call(_call_text(format, two, ends)) if format.parallel else None
    second = _first_call(first.closing) if first else None
    if first is None or second is None or replace(layout, closing=first.closing) != first:
        return layout
    several = replace(layout, between=second.opening)
    return several if replace(layout, opening=second.opening) == second and _parses(format, several, 2) else layout


def _call_text(format: CallFormat, text: str, ends: list[str]) -> str:
    """The calls of a turn, without the text around them."""
    for end in ends:
        text = text.partition(end)[0]
    text = text.strip()
    parsed = format.parse(text, "start", True)
    return text[parsed.content :] if parsed.calls else ""


def _first_call(text: str) -> Layout | None:
    """The texts around the first call; what follows it is the closing."""
    for name in IDS:
        text = text.replace(name, ID)
    found = next(filter(None, (pattern.search(text) for pattern in _ARGUMENTS)), None)
    if found is None or (place := text.find(NAME, 0, found.start())) < 0:
        return None
    return Layout(text[:place], text[place + len(NAME) : found.start()], text[found.end() :], None, found[0])


def _parses(format: CallFormat, layout: Layout, count: int) -> bool:
    message = parse_answer(format, render_calls(layout, [NAME] * count, layout.probed))
    return not message.content and [call.name for call in message.tool_calls] == [NAME] * count


def render_calls(layout: Layout, names: Iterable[str], arguments: str) -> str:
    """The text of calls of these tools, each with these arguments."""
    calls = (layout.between or "").join(f"{name}{layout.middle}{arguments}" for name in names)
    return f"{layout.opening}{calls}{layout.closing}".replace(ID, IDS[0])
