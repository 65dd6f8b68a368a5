"""What may be printed on a terminal, in a log or in an error: no control characters of others, and no passwords."""

from __future__ import annotations

import re
from typing import Final

_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, line separators and characters that change the direction of text."""


def printable(text: str) -> str:
    r"""The text with each control character as an escape sequence, such as `\x1b` or `\n`."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    """The same for text of several lines, which stay lines."""
    return "\n".join(map(printable, text.split("\n")))


def shown_url(url: str) -> str:
    """An address without its user, password and query.

    >>> shown_url("https://me:secret@host:8000/score?key=secret")
    'https://host:8000/score'
    """
    return re.sub(r"(?<=//)[^/?#]*@", "", url).partition("?")[0]
