"""Stop strings: does the text drawn so far contain one? Decoded as it grows, never from the start again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "�"
"""What a decoder writes for bytes that are not yet a whole character."""
LONGEST_CHARACTER = 4
"""Bytes, and so at most tokens, of one character in UTF-8."""


class StopScanner:
    """Watches one answer. `decode` turns token ids into text."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._keep = max(len(stop) for stop in stops) - 1
        self._tail = ""
        self._window: list[int] = []
        self._settled = 0
        """The first tokens of the window are known as text; they stay as context, for decoders that need it."""

    def push(self, token: int) -> bool:
        """Take the next token; True once the text contains a stop string."""
        self._window.append(token)
        known = self._decode(self._window[: self._settled]) if self._settled else ""
        fresh = self._decode(self._window)[len(known) :]
        text = self._tail + fresh
        if any(stop in text for stop in self._stops):
            return True
        whole = bool(fresh) and not fresh.endswith(INCOMPLETE)
        if whole or len(self._window) - self._settled >= LONGEST_CHARACTER:
            self._tail = text[max(0, len(text) - self._keep) :]
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
        return False
