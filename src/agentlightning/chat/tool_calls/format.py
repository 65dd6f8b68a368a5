"""Tool calls as models write them: what every format promises, and the reader that goes by it.

A format says what the beginning of a text is: so much content, then tool calls. It is asked again whenever more text
has come, so it keeps nothing itself, and it says no more than is certain: what may still become a call is held back,
what can no longer become one is content. A call that is malformed, or never finished, stays the text it was.
A new format is one module with a subclass of `CallFormat`, and a line in the package's `FORMATS`.
"""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, Literal

from agentlightning.chat.lark import Lark

Before = Literal["start", "content", "call"]
"""What stands right before a text: nothing, content, or a tool call."""
Tools = Sequence[dict[str, Any]] | None
"""The tools a request offers, as chat completions has them."""

_ID_LENGTH: Final = 9
_ALPHANUMERIC: Final = string.digits + string.ascii_letters


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    name: str
    arguments: str
    """The raw text: JSON where the model wrote JSON."""
    id: str | None = None
    """The one the model gave it, in formats where it does."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A model's answer, understood."""

    content: str | None
    tool_calls: tuple[ParsedToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """What the beginning of a text is."""

    content: int
    """So many characters are content for certain."""
    calls: tuple[ParsedToolCall, ...] = ()
    """The tool calls right after the content."""
    end: int = 0
    """Where they end, and the markers that belong to them; 0 where nothing is certain beyond the content."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a model's template writes around the names and the arguments of calls:

        opening name middle arguments (between name middle arguments)... closing

    For Hermes, opening is `<tool_call>\\n{"name": "`, middle `", "arguments": ` and closing `}\\n</tool_call>`. Where a
    call's id stands, these hold `ID`."""

    opening: str
    middle: str
    closing: str
    between: str | None
    """None: the template writes no second call."""
    probed: str
    """How it wrote the arguments of the call it was given (`tool_calls.layout`)."""


ID: Final = "\0"


class Malformed(Exception):
    """What looked like a tool call is none."""


class Unfinished(Malformed):
    """It is none yet; more text may make it one."""


@dataclass(frozen=True, slots=True)
class CallFormat(ABC):
    """One family's way to write tool calls."""

    name: str
    closing: str | None = None
    """What ends a call and stands nowhere else: an engine that stops there draws no second call. None: nothing does."""
    parallel: bool = True
    """Whether an answer may hold several calls: some templates cannot write them, and text after the first is then
    content."""
    short_ids: bool = False
    """Whether ids must be nine letters and digits."""
    layout: Layout | None = None
    """How the model's template writes calls; None: it is not known, and no answer can be held to be one."""

    @abstractmethod
    def read(self, text: str, before: Before, whole: bool, tools: Tools = None) -> Reading:
        """What `text` begins with. `whole`: nothing comes after it, so nothing is held back. Never raises."""
        ...

    def write_arguments(self, lark: Lark, schema: Mapping[str, Any], layout: Layout) -> str | None:
        """Arguments that fit the JSON schema of an object, as an expression of the grammar; None where they cannot be
        written so that they are read back as what they are."""
        return lark.json(schema)

    def new_id(self, prefix: str) -> str:
        """An id for a call that has none; `prefix` is how the caller's wire begins them."""
        if self.short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(_ID_LENGTH))
        return prefix + secrets.token_hex(12)

    def fit_id(self, name: str) -> str:
        """An id from elsewhere as the family's template takes it; the same one always becomes the same."""
        if not self.short_ids or is_short_id(name):
            return name
        number = int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
        digits = ""
        for _ in range(_ID_LENGTH):
            number, digit = divmod(number, len(_ALPHANUMERIC))
            digits += _ALPHANUMERIC[digit]
        return digits


class MarkedFormat(CallFormat):
    """A format whose calls begin with a marker that content seldom holds."""

    __slots__ = ()

    @property
    @abstractmethod
    def opening(self) -> str: ...

    @abstractmethod
    def read_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
        """The calls after the marker that ends at `start`, and where they end. Raises Malformed or Unfinished."""
        ...

    def read_unmarked(self, text: str, before: Before) -> Reading:
        """Calls that the text begins with, in formats that do without a marker at times. Raises as `read_call` does."""
        raise Malformed("a call begins with its marker")

    def read(self, text: str, before: Before, whole: bool, tools: Tools = None) -> Reading:
        try:
            return self.read_unmarked(text, before)
        except Unfinished:
            if not whole:
                return Reading(0)
        except Malformed:
            pass
        return self._read_marked(text, whole, tools)

    def _read_marked(self, text: str, whole: bool, tools: Tools) -> Reading:
        position, opening = 0, self.opening
        while (place := text.find(opening, position)) >= 0:
            position = place + len(opening)
            try:
                calls, end = self.read_call(text, position, tools)
            except Unfinished:
                if not whole:
                    return Reading(place)
            except Malformed:
                pass
            else:
                return Reading(place, calls, end)
        return Reading(len(text) if whole else len(text) - held_back(text[position:], opening))


class CallReader:
    """Content and tool calls of a text that arrives in pieces; whitespace beside a call is dropped."""

    def __init__(self, format: CallFormat, tools: Tools = None) -> None:
        self._format = format
        self._tools = tools
        self._held = ""
        self._before: Before = "start"
        self._ended = False
        """No further call is read."""

    def feed(self, text: str) -> list[str | ParsedToolCall]:
        """What has become certain."""
        self._held += text
        return self._take(whole=False)

    def finish(self) -> list[str | ParsedToolCall]:
        """What is left."""
        return self._take(whole=True)

    def _take(self, whole: bool) -> list[str | ParsedToolCall]:
        pieces: list[str | ParsedToolCall] = []
        while (reading := self._read(whole)).end:
            pieces += [*self._content(self._held[: reading.content].rstrip()), *reading.calls]
            self._held = self._held[reading.end :]
            self._before = "call"
            self._ended = bool(reading.calls) and not self._format.parallel
        certain = self._held[: reading.content]
        certain = certain if whole else certain.rstrip()
        self._held = self._held[len(certain) :]
        return pieces + self._content(certain)

    def _read(self, whole: bool) -> Reading:
        if self._before == "call":
            self._held = self._held.lstrip()
        if self._ended:
            return Reading(len(self._held))
        return self._format.read(self._held, self._before, whole, self._tools)

    def _content(self, text: str) -> list[str | ParsedToolCall]:
        if text:
            self._before = "content"
        return [text] if text else []


def read_whole(format: CallFormat, text: str, tools: Tools = None) -> ParsedMessage:
    """Content and tool calls of a whole answer."""
    reader = CallReader(format, tools)
    pieces = reader.feed(text) + reader.finish()
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    calls = tuple(piece for piece in pieces if isinstance(piece, ParsedToolCall))
    return ParsedMessage(content or None if calls else content, calls)


def is_short_id(name: str) -> bool:
    """Whether it is nine letters and digits, as Mistral's templates want ids."""
    return len(name) == _ID_LENGTH and all(character in _ALPHANUMERIC for character in name)


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
