"""The arguments of a tool call, shown while they are written.

A client reads them as one JSON object, and fails on anything else; a model may write anything. What is shown is always
the beginning of an object: where the text stops being one, the rest is held back, and in the end what was shown is
closed, with the whole text under a name of its own. Pure; called by the dialect whose SDK parses arguments by itself.

    written     {"a": 1, "b": oops}
    shown       {"a": 1, "b": null,"raw":"{\\"a\\": 1, \\"b\\": oops}"}
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
"""What is missing before the object or list may end, or go on."""


@dataclass(slots=True)
class ObjectText:
    """One text that should be a JSON object."""

    text: str = ""
    """All that was written."""
    _open: list[str] = field(default_factory=list[str], init=False)
    """What ends the objects and lists that are open."""
    _state: _State = field(default="begin", init=False)
    _word: str = field(default="", init=False)
    """What there is of a number, a literal, or an escape in a string."""
    _is_key: bool = field(default=False, init=False)
    """Of the string that is open."""
    _broken: bool = field(default=False, init=False)
    _last: str = field(default="", init=False)
    """What ends the whole object, held back to the end."""

    def feed(self, more: str) -> str:
        """What of it can be shown."""
        self.text += more
        if self._broken:
            return ""
        shown = 0
        for char in more:
            if not self._take(char):
                self._broken = True
                break
            if self._state == "end":
                self._last += char
            else:
                shown += 1
        return more[:shown]

    def finish(self, name: str) -> str:
        """The rest, so that what was shown is an object: the one that was written, or else one that holds the whole
        text under `name`."""
        if self._state == "end" and not self._broken:
            return self._last
        return self._close() + f"{orjson.dumps(name).decode()}:{orjson.dumps(self.text).decode()}}}"

    # -- reading ---------------------------------------------------------------------------------------------------

    def _take(self, char: str) -> bool:
        """Whether the text is still the beginning of an object."""
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
            # The object could still be followed by what does not belong to it: its state is kept, for `_close`.
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
        """What ends all that is open but the object itself, up to where its next name may stand."""
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
