"""Calls written as Python: `[get(city="Bern"), wait()]`, as Llama 4, small Llama 3.2 models and LFM2 write them.

The list is the whole answer, or stands between two markers. Arguments are keyword arguments
with constant values; they are converted to JSON with the original spelling of numbers. JSON's constants are accepted
too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.chat.lark_grammar import LarkGrammar
from agentlightning.chat.tool_calls.format import (
    IncompleteCall,
    Layout,
    MalformedCall,
    MarkedFormat,
    Parsed,
    ParsedToolCall,
    Preceding,
    Tools,
)
from agentlightning.chat.tool_calls.parameters import read_parameters
from agentlightning.chat.tool_calls.partial_json import is_utf8, skip_space

MAX_DEPTH: Final = 100
"""Nesting depth of lists and objects."""

LONG_LIST: Final = 1000
"""Characters from which an unterminated list is not parsed again for every token."""

_NAME: Final = re.compile(r"[^\W\d]\w*(?:[.\-]\w+)*")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])")
_INCOMPLETE_NUMBER: Final = re.compile(r"-?\d*\.?\d*(?:[eE][+-]?\d*)?\Z")
_WORDS: Final = {
    **{"True": "true", "False": "false", "None": "null"},
    **{"true": "true", "false": "false", "null": "null"},
}
_STRING: Final = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(0[0-9a-fA-F]{7})|([0-7]{1,3})|(.))", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}


@dataclass(frozen=True, slots=True)
class Pythonic(MarkedFormat):
    bare: bool = True
    """Whether a list without markers may be the answer."""

    def write_arguments(self, lark: LarkGrammar, schema: Mapping[str, Any], layout: Layout) -> str | None:
        parameters = read_parameters(schema)
        if parameters is None or not all(_NAME.fullmatch(each.name) for each in parameters):
            return None
        written = [
            (f"{lark.literal(each.name + '=')} {_value(lark, each.schema)}", each.required) for each in parameters
        ]
        return _argument_list(lark, written)

    def parse_unmarked(self, text: str, preceding: Preceding) -> Parsed:
        if preceding != "start" or not self.bare:
            raise MalformedCall("a list of calls must start the answer")
        return Parsed(0, *_parse_list(text, skip_space(text, 0)))

    def parse_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
        return _parse_list(text, skip_space(text, start))


def _value(lark: LarkGrammar, schema: Mapping[str, Any]) -> str:
    """A constant as JSON, except for the words that differ in Python."""
    if schema.get("type") == "boolean" and not schema.keys() & {"enum", "const"}:
        return lark.rule('"True"', '"False"')
    return lark.json(schema)


def _argument_list(lark: LarkGrammar, items: list[tuple[str, bool]]) -> str:
    """Comma-separated (expression, required) items in their order; optional ones may be omitted."""
    first, later = '""', '""'
    for item, required in reversed(items):
        # `first`: the rest if no item has been written yet; `later`: if one has.
        alone = f"{item} {later}"
        first = alone if required else lark.rule(alone, first)
        later = lark.rule(f'", " {alone}') if required else lark.rule(f'", " {alone}', later)
    return first


def _parse_list(text: str, start: int) -> tuple[tuple[ParsedToolCall, ...], int]:
    """The calls in the list at `start`, and its end. An empty list is malformed."""
    if len(text) - start > LONG_LIST and "]" not in text[start:]:
        raise IncompleteCall("a long list has no end yet")
    parser = _Parser(text, start)
    parser.take("[")
    calls = [parser.call()]
    while parser.more("]"):
        calls.append(parser.call())
    return tuple(calls), parser.position


def parse_python_call(text: str, start: int) -> tuple[ParsedToolCall, int]:
    """The call at `start`, and its end. Raises MalformedCall or IncompleteCall."""
    parser = _Parser(text, start)
    return parser.call(), parser.position


class _Parser:
    """Recursive-descent parser. Methods raise MalformedCall, or IncompleteCall where the text ends too early."""

    def __init__(self, text: str, position: int) -> None:
        self._text = text
        self.position = position

    def call(self) -> ParsedToolCall:
        name = self._match(_NAME, "a name")
        self.take("(")
        arguments: dict[str, str] = {}
        if not self._ends(")"):
            self._argument(arguments)
            while self.more(")"):
                self._argument(arguments)
        written = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
        return ParsedToolCall(name, "{" + written + "}")

    def take(self, character: str) -> None:
        if self._peek() != character:
            raise MalformedCall(f"{character} is missing")
        self.position += 1

    def more(self, end: str) -> bool:
        """Consume a comma or `end`; whether another element follows."""
        if self._ends(end):
            return False
        self.take(",")
        return not self._ends(end)

    def _ends(self, end: str) -> bool:
        if self._peek() != end:
            return False
        self.position += 1
        return True

    def _peek(self) -> str:
        self.position = skip_space(self._text, self.position)
        if self.position == len(self._text):
            raise IncompleteCall("more must follow")
        return self._text[self.position]

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        self._peek()
        if (found := pattern.match(self._text, self.position)) is None:
            raise MalformedCall(f"{what} is missing")
        if self._text[found.end() :] in ("", ".", "-"):  # A name may continue after these.
            raise IncompleteCall(f"{what} may continue")
        self.position = found.end()
        return found[0]

    def _argument(self, arguments: dict[str, str]) -> None:
        key = self._match(_NAME, "the name of an argument")
        self.take("=")
        arguments[key] = self._value(0)

    def _value(self, depth: int) -> str:
        """A constant, as JSON."""
        if depth > MAX_DEPTH:
            raise MalformedCall("it is nested too deeply")
        match self._peek():
            case "'" | '"':
                return json.dumps(self._string(), ensure_ascii=False)
            case "[":
                return self._list(depth)
            case "{":
                return self._dict(depth)
            case character if character == "-" or character.isdigit():
                return self._number()
            case _:
                word = self._match(_NAME, "a value")
        if word not in _WORDS:
            raise MalformedCall(f"{word} is not a constant")
        return _WORDS[word]

    def _number(self) -> str:
        if _INCOMPLETE_NUMBER.match(self._text, self.position):
            raise IncompleteCall("the number may continue")
        return self._match(_NUMBER, "a number")

    def _string(self) -> str:
        if (found := _STRING.match(self._text, self.position)) is None:
            raise IncompleteCall("a string is not closed")
        self.position = found.end()
        # Two escapes may spell the two surrogates of one character.
        written = _ESCAPE.sub(_unescape, found[1] or found[2] or "")
        text = written.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        if not is_utf8(text):
            raise MalformedCall("it contains a lone surrogate")
        return text

    def _list(self, depth: int) -> str:
        self.take("[")
        if self._ends("]"):
            return "[]"
        values = [self._value(depth + 1)]
        while self.more("]"):
            values.append(self._value(depth + 1))
        return f"[{', '.join(values)}]"

    def _dict(self, depth: int) -> str:
        self.take("{")
        if self._ends("}"):
            return "{}"
        items = [self._item(depth)]
        while self.more("}"):
            items.append(self._item(depth))
        return "{" + ", ".join(items) + "}"

    def _item(self, depth: int) -> str:
        if self._peek() not in "'\"":
            raise MalformedCall("a key is a string")
        key = json.dumps(self._string(), ensure_ascii=False)
        self.take(":")
        return f"{key}: {self._value(depth + 1)}"


def _unescape(found: re.Match[str]) -> str:
    two, four, eight, octal, other = found.groups()
    if digits := two or four or eight:
        number = int(digits, 16)
        return chr(number) if number < 0x110000 else "�"
    if octal:
        return chr(int(octal, 8))
    return _ESCAPED.get(other, other if other in "'\"\\/" else "\\" + other)
