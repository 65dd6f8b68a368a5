"""Streams the arguments of a tool call so that they are always a prefix of a valid JSON object.

Anthropic's SDK parses the arguments as they arrive and fails on anything but an object, whereas a model may write
anything. Once the text stops being valid, the rest is withheld; in the end, the streamed part is closed, with the whole
text in a field of its own. Pure.

    written     {"a": 1, "b": oops}
    streamed    {"a": 1, "b": null,"raw":"{\\"a\\": 1, \\"b\\": oops}"}
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Literal

import orjson

_State = Literal["begin", "key or end", "key", "colon", "value", "value or end", "more or end", "string", "word", "end"]

_SPACE: Final = " \t\n\r"
_WORDS: Final = ("true", "false", "null")
_NUMBER_BEGUN: Final = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:(?:\.\d*)?|(?:\.\d+)?[eE][+-]?\d*))?", re.ASCII)
_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_ESCAPE_BEGUN: Final = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{0,4})?')
_AFTER: Final[dict[_State, str]] = {"colon": ":null", "value": "null", "key": '"":null'}
"""What completes the open member of an object or list."""


@dataclass(slots=True)
class JsonObjectStream:
    """One text that should be a JSON object."""

    text: str = ""
    """The whole text."""
    _open: list[str] = field(default_factory=list[str], init=False)
    """The closing brackets of the open objects and lists."""
    _state: _State = field(default="begin", init=False)
    _word: str = field(default="", init=False)
    """The received part of a number, a literal, or an escape sequence."""
    _is_key: bool = field(default=False, init=False)
    """Whether the open string is a key."""
    _invalid: bool = field(default=False, init=False)
    _last: str = field(default="", init=False)
    """The end of the whole object, withheld until `finish`."""

    def feed(self, more: str) -> str:
        """Add text; returns the part of it that can be streamed."""
        self.text += more
        if self._invalid:
            return ""
        shown = 0
        for char in more:
            if not self._take(char):
                self._invalid = True
                break
            if self._state == "end":
                self._last += char
            else:
                shown += 1
        return more[:shown]

    def finish(self, name: str) -> str:
        """The rest, which makes the streamed text an object: the one that was written, or one with the whole text in
        the field `name`."""
        if self._state == "end" and not self._invalid:
            return self._last
        return self._close() + f"{orjson.dumps(name).decode()}:{orjson.dumps(self.text).decode()}}}"

    # -- reading ---------------------------------------------------------------------------------------------------

    def _take(self, char: str) -> bool:
        """Whether the text is still a prefix of an object."""
        if self._state == "string":
            return self._in_string(char)
        if self._state == "word":
            if self._word_goes_on(self._word + char):
                self._word += char
                return True
            if not _is_word(self._word):
                return False
            self._state = "more or end"
        return char in _SPACE or self._in_structure(char)

    def _in_string(self, char: str) -> bool:
        if self._word:
            if not _ESCAPE_BEGUN.fullmatch(self._word + char):
                return False
            self._word += char
            if self._word[1] != "u" or len(self._word) == 6:
                self._word = ""
            return True
        if char == '"':
            self._state = "colon" if self._is_key else "more or end"
        elif char == "\\":
            self._word = char
        return char >= " "

    def _in_structure(self, char: str) -> bool:
        state = self._state
        if char == '"' and state in ("key or end", "key", "value", "value or end"):
            self._is_key = state.startswith("key")
            self._state, self._word = "string", ""
        elif char == ":" and state == "colon":
            self._state = "value"
        elif char == "," and state == "more or end":
            self._state = "key" if self._open[-1] == "}" else "value"
        elif self._open and char == self._open[-1] and state.endswith("or end"):
            self._end()
        elif char == "{" and (state == "begin" or state.startswith("value")):
            self._open.append("}")
            self._state = "key or end"
        elif char == "[" and state.startswith("value"):
            self._open.append("]")
            self._state = "value or end"
        elif state.startswith("value") and self._word_goes_on(char):
            self._state, self._word = "word", char
        else:
            return False
        return True

    def _end(self) -> None:
        if len(self._open) == 1:
            # More text may follow and make it invalid: the state is needed by `_close` then.
            self._is_key = self._state == "key or end"
            self._state = "end"
            return
        self._open.pop()
        self._state = "more or end"

    @staticmethod
    def _word_goes_on(word: str) -> bool:
        return _NUMBER_BEGUN.fullmatch(word) is not None or any(known.startswith(word) for known in _WORDS)

    # -- closing ---------------------------------------------------------------------------------------------------

    def _close(self) -> str:
        """Closes everything but the object itself, up to where its next key may follow."""
        if not self._open:
            return "{"
        closing = self._end_scalar()
        if self._state == "end":
            self._state = "key or end" if self._is_key else "more or end"
        for end in reversed(self._open[1:]):
            closing += _AFTER.get(self._state, "") + end
            self._state = "more or end"
        if self._state in ("colon", "value"):
            closing += _AFTER[self._state]
            self._state = "more or end"
        return closing + ("," if self._state == "more or end" else "")

    def _end_scalar(self) -> str:
        word, self._word = self._word, ""
        if self._state == "string":
            self._state = "colon" if self._is_key else "more or end"
            return ("" if not word else '"' if word == "\\" else "0" * (6 - len(word))) + '"'
        if self._state != "word":
            return ""
        self._state = "more or end"
        if _is_word(word):
            return ""
        return next((known[len(word) :] for known in _WORDS if known.startswith(word)), "0")


def _is_word(text: str) -> bool:
    return text in _WORDS or _NUMBER.fullmatch(text) is not None
