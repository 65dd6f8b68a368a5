"""Sizes of the pages in which lists of a store are read, so that a list of any length takes little memory."""

from __future__ import annotations

from typing import Final

PAGE: Final = 500
"""Items of a list that are read at once."""
PAGE_OF_SPANS: Final = 100
"""Spans may be large."""
PAGE_OF_SORTED_SPANS: Final = 2000
"""The store reads all spans of the rollout for each page of these."""


def max_page(method: str, *, is_sorted: bool) -> int:
    """The number of items to read at once from the list that a method of the store returns."""
    if method != "query_spans":
        return PAGE
    return PAGE_OF_SORTED_SPANS if is_sorted else PAGE_OF_SPANS


class PageSizer:
    """Chooses how many items to read at once: few at first, then about `target_bytes`, at most `max_items` items."""

    def __init__(self, target_bytes: int, max_items: int) -> None:
        self._target_bytes = target_bytes
        self._max_items = max_items
        self.items = min(8, max_items)

    def record(self, items: int, size: int) -> None:
        """Note that the last page of `items` items had `size` bytes."""
        fitting = self._target_bytes * items // max(size, 1)
        self.items = max(1, min(fitting, 4 * self.items, self._max_items))
