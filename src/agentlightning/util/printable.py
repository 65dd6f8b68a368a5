"""Text of others on a terminal or in a log: one line stays one line, and nothing in it moves a cursor."""

from __future__ import annotations

import re
from typing import Final

_UNSEEN: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, and what ends a line or turns its direction."""


def printable(text: str) -> str:
    r"""The text with each control character spelled out: `\x1b` for an escape, `\n` for a new line."""
    return _UNSEEN.sub(lambda found: _spelled(found[0]), text)


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode()
