"""Incremental search for stop strings in a growing answer, without decoding it from the start again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "�"
"""What a decoder writes for bytes that do not form a whole character yet."""
MAX_CHARACTER_TOKENS = 4
"""UTF-8 characters have at most this many bytes, and so at most this many tokens."""


class StopScanner:
    """Scans one answer. `decode` turns token ids into text."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._overlap = max(len(stop) for stop in stops) - 1
        self._tail = ""
        """The last `_overlap` characters of the scanned text."""
        self._window: list[int] = []
        self._scanned = 0
        """Number of leading tokens of the window already scanned; they stay as context for decoders that need it."""

    def push(self, token: int) -> bool:
        """Append the next token; True once the text contains a stop string."""
        self._window.append(token)
        scanned = self._decode(self._window[: self._scanned]) if self._scanned else ""
        new = self._decode(self._window)[len(scanned) :]
        text = self._tail + new
        if any(stop in text for stop in self._stops):
            return True
        complete = bool(new) and not new.endswith(REPLACEMENT)
        if complete or len(self._window) - self._scanned >= MAX_CHARACTER_TOKENS:
            self._tail = text[max(0, len(text) - self._overlap) :]
            self._window = self._window[self._scanned :]
            self._scanned = len(self._window)
        return False
