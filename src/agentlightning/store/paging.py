"""Sizes of the pages in which lists of a store are read, so that a list of any length takes little memory."""

from __future__ import annotations

from typing import Final

PAGE: Final = 2_000
"""Items of a list that are read at once at most."""
PAGE_BYTES: Final = 4 * 1024 * 1024


class PageSizer:
    """Chooses how many items to read at once: few at first, then about `target_bytes`, at most `max_items` items."""

    def __init__(self, target_bytes: int = PAGE_BYTES, max_items: int | None = None, first: int = 8) -> None:
        self._target_bytes = target_bytes
        self._max_items = PAGE if max_items is None else max_items
        self.items = min(first, self._max_items)

    def record(self, items: int, size: int) -> None:
        """Note that the last page of `items` items had `size` bytes."""
        fitting = self._target_bytes * items // max(size, 1)
        self.items = max(1, min(fitting, 4 * self.items, self._max_items))
