"""Writer of grammars in llguidance's dialect of Lark: texts, patterns, JSON schemas and rules.

It knows a model's markers, the tokens outside ordinary text such as `<tool_call>`, which a grammar names by id. It
never compiles anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

ANY = "(?s:.*)"
"""Pattern of any text. No pattern matches a marker."""
_JSON_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Fixed spacing of JSON: with free spacing, a weak model may write whitespace forever."""
_META = frozenset("\\.+*?()|[]{}^$#&-~/")
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


class LarkGrammar:
    """A grammar under construction. `markers`: text -> token id."""

    def __init__(self, markers: Mapping[str, int]) -> None:
        self.markers = markers
        longest = sorted(markers, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest)) if longest else r"(?!)")
        self._rules: list[str] = []

    def contains_marker(self, text: str) -> bool:
        return self._marker.search(text) is not None

    def literal(self, text: str) -> str:
        """Exactly this text: markers as their tokens, the rest in any tokens."""
        parts: list[str] = []
        position = 0
        for found in self._marker.finditer(text):
            parts += [_quoted(text[position : found.start()]), f"<[{self.markers[found[0]]}]>"]
            position = found.end()
        return " ".join(filter(None, [*parts, _quoted(text[position:])])) or '""'

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON value that matches a schema, with the spacing of most models."""
        return "%json " + json.dumps({**schema, "x-guidance": _JSON_SPACING}, ensure_ascii=False)

    def rule(self, *choices: str) -> str:
        """A rule with these alternatives; returns its name."""
        return self._add("rule_{}", " | ".join(choices))

    def pattern(self, pattern: str, without: Iterable[str] = ()) -> str:
        """A text that `pattern` matches entirely and none of `without` does."""
        return self._add("TEXT_{}", " & ".join([f"/{pattern}/", *(f"~/{other}/" for other in without)]))

    def until(self, end: str, without: Iterable[str] = ()) -> str:
        """Any text up to and including its first `end`."""
        return self._add("rule_{}", self.pattern(ANY + escaped(end), without), "[lazy]")

    def _add(self, name: str, body: str, attributes: str = "") -> str:
        name = name.format(len(self._rules))
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def render(self, start: str) -> str:
        """The grammar with this start expression."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, ""])


def optional(expression: str) -> str:
    return f"({expression})?"


def escaped(text: str) -> str:
    """Pattern of exactly this text."""
    # Not re.escape: in this dialect a backslash before < or > is a word boundary.
    return "".join(_ESCAPES.get(sign, "\\" + sign if sign in _META else sign) for sign in text)


def containing(text: str) -> str:
    """Pattern of texts that contain this one."""
    return ANY + escaped(text) + ANY


def beginning(text: str) -> str:
    """Pattern of texts that begin with this one, after optional whitespace."""
    return r"\s*" + escaped(text) + ANY


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
