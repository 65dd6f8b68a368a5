"""One grammar while it is written, in llguidance's dialect of Lark, which vLLM reads too.

Responsible for spelling: how a text, a pattern and a JSON schema are written there. Of a model it knows the markers:
tokens that are no part of a text, `<tool_call>` say, and are named by number. Called by `policy.tool_calls` and
`policy.answer_grammar`; it never compiles anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

ANY: Final = "(?s:.*)"
"""Pattern of any text; no pattern matches a marker."""
_SPELLED: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is spaced. Left free, a weak model may write whitespace for ever."""
_META: Final = frozenset("\\.+*?()|[]{}^$#&-~/")
_ESCAPES: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


class Lark:
    """A grammar to which rules are added. `markers`: text -> token id."""

    def __init__(self, markers: Mapping[str, int]) -> None:
        self.markers = markers
        longest = sorted(markers, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest)) if longest else r"(?!)")
        self._rules: list[str] = []

    def marked(self, text: str) -> bool:
        """Whether a text holds what a marker is written as."""
        return self._marker.search(text) is not None

    def literal(self, text: str) -> str:
        """Exactly this text: its markers as tokens, the rest in any tokens."""
        parts: list[str] = []
        position = 0
        for found in self._marker.finditer(text):
            parts += [_quoted(text[position : found.start()]), f"<[{self.markers[found[0]]}]>"]
            position = found.end()
        return " ".join(filter(None, [*parts, _quoted(text[position:])])) or '""'

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON value that fits a schema, spaced as most models space it."""
        return "%json " + json.dumps({**schema, "x-guidance": _SPELLED}, ensure_ascii=False)

    def rule(self, *choices: str) -> str:
        """One of these. Returns the rule's name."""
        return self._add("rule_{}", " | ".join(choices))

    def pattern(self, pattern: str, without: Iterable[str] = ()) -> str:
        """A text that a pattern matches as a whole, and none of the others does."""
        return self._add("TEXT_{}", " & ".join([f"/{pattern}/", *(f"~/{other}/" for other in without)]))

    def until(self, end: str, without: Iterable[str] = ()) -> str:
        """Any text up to its first `end`, and that."""
        return self._add("rule_{}", self.pattern(ANY + escaped(end), without), "[lazy]")

    def _add(self, name: str, body: str, how: str = "") -> str:
        name = name.format(len(self._rules))
        self._rules.append(f"{name}{how}: {body}")
        return name

    def whole(self, start: str) -> str:
        """The grammar of answers that are `start`."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, ""])


def optional(expression: str) -> str:
    return f"({expression})?"


def escaped(text: str) -> str:
    """A pattern that matches exactly this text."""
    # Not re.escape: to this dialect a backslash before < or > is the edge of a word.
    return "".join(_ESCAPES.get(sign, "\\" + sign if sign in _META else sign) for sign in text)


def containing(text: str) -> str:
    """Pattern of the texts that hold this one."""
    return ANY + escaped(text) + ANY


def beginning(text: str) -> str:
    """Pattern of the texts that begin with this one, after whitespace."""
    return r"\s*" + escaped(text) + ANY


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
